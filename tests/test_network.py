"""Two hosts: network namespaces with names and addresses of their own, on a switch from which a cable can be pulled."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch.distributed as torch_dist
from conftest import ROOT
from test_checkpoint import kill_tree
from test_run import arguments, read_log

import checkpoint
import dist
from config import Config

GONE = "another rank is gone, this one cannot go on"


def test_a_store_that_does_not_answer_is_given_up(monkeypatch):
    """Its process is stopped: the connection stands, and the store's own timeout does not end the wait."""
    serve = """if True:
        import time, torch.distributed
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        print(store.port, flush=True)
        time.sleep(600)"""
    server = subprocess.Popen([sys.executable, "-c", serve], stdout=subprocess.PIPE, text=True)
    try:
        port = int(server.stdout.readline())
        store = torch_dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1))
        monkeypatch.setattr(dist, "_store", store)
        monkeypatch.setattr(dist, "_seconds", 1.0)
        assert [dist.take("a"), dist.take("a"), dist.take("b")] == [0, 1, 0]
        server.send_signal(signal.SIGSTOP)
        with pytest.raises(torch_dist.DistStoreError, match="has not answered for 1 seconds") as e:
            dist.take("a")
        assert dist.is_gone(e.value)
    finally:
        server.kill()
        server.wait()
    with pytest.raises(torch_dist.DistError) as e:  # and the store's own errors arrive
        dist.take("a")
    assert dist.is_gone(e.value)


def ip(*args):
    return subprocess.run(["ip", *args], check=True, capture_output=True, text=True).stdout


class Hosts:
    """node1 and node2, each in a network namespace, and a switch between them in a third."""

    names = ("node1", "node2")

    def __init__(self, folder):
        self.folder, self.processes = folder, []
        self.spaces = {name: f"nanoeyes-{os.getpid()}-{name}" for name in ("switch", *self.names)}

    def build(self):
        switch = self.spaces["switch"]
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "name", "switch", "type", "bridge")
        ip("-n", switch, "link", "set", "switch", "up")
        for i, name in enumerate(self.names, 1):
            space = self.spaces[name]
            ip("netns", "add", space)
            ip("-n", switch, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("-n", switch, "link", "set", name, "master", "switch", "up")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "addr", "add", f"10.77.0.{i}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            # How long the kernel sends again what nobody acknowledges: 25 seconds here; 15, the default, is 15 minutes.
            retries = "echo 6 > /proc/sys/net/ipv4/tcp_retries2"
            subprocess.run(["ip", "netns", "exec", space, "sh", "-c", retries], check=True)
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 node1\n10.77.0.2 node2\n")

    def cut(self):
        """Pulls node2's cable at the switch: nothing arrives any more, and no interface goes down."""
        ip("-n", self.spaces["switch"], "link", "set", "node2", "nomaster")

    def mend(self):
        ip("-n", self.spaces["switch"], "link", "set", "node2", "master", "switch")

    def start(self, *command):
        """The command on both hosts; returns [(process, file with its output)]."""
        started = []
        for name in self.names:
            named = 'mount --bind "$0" /etc/hosts && echo "$1" > /proc/sys/kernel/hostname && shift && exec "$@"'
            enter = ["ip", "netns", "exec", self.spaces[name], "unshare", "--uts", "sh", "-c", named]
            path = self.folder / f"{name}-{len(self.processes)}.txt"
            with open(path, "w") as output:
                process = subprocess.Popen(
                    [*enter, str(self.folder / "hosts"), name, *command],
                    cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            self.processes.append(process)
            started.append((process, path))
        return started

    def running(self):
        """Ids of all processes on the two hosts: each of them was started here."""
        there = [s for s in self.spaces.values() if os.path.exists(f"/run/netns/{s}")]
        return [int(pid) for space in there for pid in ip("netns", "pids", space).split()]

    def remove(self):
        for pid in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        for space in self.spaces.values():
            if os.path.exists(f"/run/netns/{space}"):
                ip("netns", "del", space)


@pytest.fixture
def hosts(tmp_path, no_namespaces):
    if no_namespaces:
        pytest.skip(no_namespaces)
    hosts = Hosts(tmp_path)
    try:
        hosts.build()
        yield hosts
    finally:
        hosts.remove()


def wait_for(condition, nodes, seconds=150):
    """Until `condition()` holds; no node may end before."""
    deadline = time.time() + seconds
    while not condition():
        for process, path in nodes:
            assert process.poll() is None, path.read_text()[-3000:]
        assert time.time() < deadline, "\n".join(path.read_text()[-3000:] for _, path in nodes)
        time.sleep(0.05)


@pytest.mark.slow
def test_two_hosts_a_cut_link_and_a_dead_node(toy_data, tmp_path, hosts):
    """The documented command on both; the link is cut, both say so and end; started again, they go on; one is killed."""
    out = tmp_path / "out"
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:29500", "--rdzv-id", "toy"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *meet]
    own = ["--group_size=2", "--steps=1000", "--eval_files=[]", "--show=0", "--save_every=1", "--comm_timeout=10"]
    run = [*launch, "train.py", *arguments(toy_data, out), *own]

    def newest():
        path = checkpoint.find(Config(out_dir=str(out), resume="auto"))
        return checkpoint.read_meta(path)["step"] if path else 0

    def says_so(process, path):
        assert process.wait(timeout=100) != 0
        told = path.read_text()
        assert told.count(GONE) == 1 and "[rank" not in told, told[-5000:]  # torch puts that before a rank's traceback

    nodes = hosts.start(*run)
    wait_for(lambda: newest() >= 2, nodes)
    hosts.cut()
    for node in nodes:
        says_so(*node)
    assert hosts.running() == [], "no rank and no engine is left"
    hosts.mend()

    last = newest()
    nodes = hosts.start(*run, "--resume=auto")
    wait_for(lambda: newest() >= last + 2, nodes)
    assert f"going on from {out}/checkpoints/step_{last:06d}" in nodes[0][1].read_text()
    kill_tree(nodes[1][0].pid)
    says_so(*nodes[0])
    nodes[1][0].wait()
    assert hosts.running() == []
    _, steps, _ = read_log(out)
    assert [r["step"] for r in steps] == list(range(1, len(steps) + 1)) and len(steps) >= last + 2, "each step once"
