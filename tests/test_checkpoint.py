"""Checkpoints: killed at any moment, on other numbers of ranks, broken ones, and a run that goes on as if never stopped."""

import contextlib
import dataclasses
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time

import psutil
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, TOY
from test_learner import BASE, learner_for, one_step, trajectories
from test_run import arguments, read_log

import checkpoint
from config import Config
from data import ParquetData
from model import load_lm
from report import Report


def parameters(learner):
    return {n: p.detach().clone() for n, p in learner.policy.named_parameters()}


def test_rows_drawn_are_skipped_without_reading_them(toy_data, monkeypatch):
    data = ParquetData([str(toy_data / "train.parquet")])
    everything = [s.where for s in data.shuffled(3, 0, 60)]  # two epochs and a half of 24 rows in groups of 8
    read, whole = [], pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile, "iter_batches", lambda *a, **k: (read.append(k["row_groups"]), whole(*a, **k))[1]
    )
    for start in (0, 5, 8, 24, 47, 48):
        read.clear()
        data = ParquetData([str(toy_data / "train.parquet")])
        assert [s.where for s in data.shuffled(3, start, 12)] == everything[start : start + 12]
        assert 2 <= len(read) <= 3, "only the groups that are needed, each once"


def test_everything_comes_back(codec, tmp_path):
    """Weights, moments of both optimizers, KL coefficient, counters and generators; the next update is the same."""
    changes = {"advantage": "gae", "kl_reward_coef": 0.3, "kl_target": 0.01}
    learner = learner_for(codec, tmp_path, **changes)
    one_step(learner, trajectories(codec))
    learner.skipped_updates = 3
    torch.manual_seed(5)
    random.seed(5)
    path = checkpoint.save(learner.cfg, learner, step=1, rows_drawn=6, log_position=99)
    drawn, picked, coef = torch.rand(3), random.random(), learner.kl.coef
    expected = one_step(learner, trajectories(codec), step=1)
    weights = parameters(learner)
    other = learner_for(codec, tmp_path, **changes)
    meta = checkpoint.load(path, other)
    assert (meta["step"], meta["policy_version"], meta["rows_drawn"], meta["log_position"]) == (1, 1, 6, 99)
    assert torch.equal(torch.rand(3), drawn) and random.random() == picked
    assert other.skipped_updates == 3 and other.kl.coef == coef != 0.3
    again = one_step(other, trajectories(codec), step=1)
    assert again == pytest.approx(expected, rel=1e-9)
    assert all(torch.equal(weights[n], p) for n, p in other.policy.named_parameters())


def test_only_the_newest_are_kept_and_auto_finds_the_newest_whole_one(codec, tmp_path, capsys, monkeypatch):
    learner = learner_for(codec, tmp_path, keep_checkpoints=2)
    assert checkpoint.find(dataclasses.replace(learner.cfg, resume="auto")) == ""
    paths = [checkpoint.save(learner.cfg, learner, step=s, rows_drawn=s, log_position=1) for s in (1, 2, 3)]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step_000002", "step_000003"]
    assert checkpoint.find(learner.cfg) == "", "a new run begins anew"
    auto = dataclasses.replace(learner.cfg, resume="auto")
    assert checkpoint.find(auto) == paths[2]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert checkpoint.find(learner.cfg) == paths[2], "one that torchrun started again does not"
    # Half-copied: the newest lacks the end of a file.
    (shards,) = [f for f in os.listdir(paths[2]) if f.endswith(".distcp")]
    with open(os.path.join(paths[2], shards), "r+b") as f:
        f.truncate(1000)
    assert checkpoint.find(auto) == paths[1]
    assert f"{shards} is not whole; taking the one before" in capsys.readouterr().out
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    with pytest.raises(checkpoint.CheckpointError, match="distcp is not whole"):
        checkpoint.find(dataclasses.replace(learner.cfg, resume=paths[2]))
    with pytest.raises(checkpoint.CheckpointError, match="is not whole: .*No such file"):
        checkpoint.find(dataclasses.replace(learner.cfg, resume=str(tmp_path / "gone")))
    # Other shapes than this run's.
    with pytest.raises(checkpoint.CheckpointError, match="does not fit this run"):
        checkpoint.load(paths[1], learner_for(codec, tmp_path, lora_rank=2))


def in_a_child(function) -> int:
    """Exit status of `function` in a forked process; 0 if it returns."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    return pid


def test_a_kill_during_the_write_loses_that_write_alone(codec, tmp_path):
    """Twenty times kill -9 at a random moment of a process that does nothing but write checkpoints."""
    torch.set_num_threads(1)
    learner = learner_for(codec, tmp_path)
    one_step(learner, trajectories(codec))
    auto = dataclasses.replace(learner.cfg, resume="auto")
    rng, newest, cut = random.Random(0), 0, 0

    def write(first):
        for step in range(first, first + 1000):
            checkpoint.save(learner.cfg, learner, step=step, rows_drawn=step, log_position=1)

    checkpoint.save(learner.cfg, learner, step=0, rows_drawn=0, log_position=1)
    for _ in range(20):
        pid = in_a_child(lambda: write(newest + 1))  # noqa: B023
        time.sleep(rng.uniform(0.02, 0.4))
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        path = checkpoint.find(auto)
        cut += any(name.endswith(".tmp") for name in os.listdir(tmp_path / "checkpoints"))
        meta = checkpoint.load(path, learner)
        assert meta["step"] == meta["rows_drawn"] >= newest
        newest = meta["step"]
    assert cut >= 3 and newest >= 3, "some kills fell into a write, and some writes were done"


def test_a_disk_without_room_leaves_the_last_good_one(codec, tmp_path):
    torch.set_num_threads(1)
    learner = learner_for(codec, tmp_path)
    one_step(learner, trajectories(codec))
    good = checkpoint.save(learner.cfg, learner, step=1, rows_drawn=1, log_position=1)

    def full():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # no file may grow beyond 1 MB
        try:
            checkpoint.save(learner.cfg, learner, step=2, rows_drawn=2, log_position=1)
        except checkpoint.CheckpointError as e:
            assert re.search(r"step_000002 cannot be written \(\d+ MB are free there\): .", str(e)), e
            os._exit(7)

    assert os.waitstatus_to_exitcode(os.waitpid(in_a_child(full), 0)[1]) == 7
    assert os.listdir(tmp_path / "checkpoints") == ["step_000001"]
    assert checkpoint.find(dataclasses.replace(learner.cfg, resume="auto")) == good
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    with pytest.raises(checkpoint.CheckpointError, match="cannot be written .*(Not a directory|File exists)"):
        checkpoint.save(learner.cfg, learner, step=2, rows_drawn=2, log_position=1)


def test_export_is_a_folder_that_loads(codec, tmp_path, run_script):
    learner = learner_for(codec, tmp_path)
    one_step(learner, trajectories(codec))
    path = checkpoint.save(learner.cfg, learner, step=1, rows_drawn=1, log_position=1)
    run_script("checkpoint.py", "export", path, str(tmp_path / "hf"), check=True)
    saved = dict(load_lm(str(tmp_path / "hf"), torch.float32).named_parameters())
    assert all(torch.equal(saved[n], p) for n, p in learner.policy.lm.named_parameters())
    done = run_script("checkpoint.py", "export", str(tmp_path / "nothing"), str(tmp_path / "hf2"))
    assert done.returncode == 1 and "CheckpointError: checkpoint" in done.stderr and "Traceback" not in done.stderr


def test_a_run_does_not_mix_with_an_earlier_one(codec, tmp_path, monkeypatch):
    """A checkpoint beyond the first step of a run is not its own, and a restart would take it; a broken one is nobody's."""
    learner = learner_for(codec, tmp_path)
    paths = [checkpoint.save(learner.cfg, learner, step=s, rows_drawn=0, log_position=0) for s in (4, 8)]
    for step in (0, 4):
        with pytest.raises(
            checkpoint.CheckpointError, match=f"step_000008' is of an earlier run, .* begins at step {step}"
        ):
            checkpoint.refuse_newer(learner.cfg, step)
    checkpoint.refuse_newer(learner.cfg, 8)
    os.remove(os.path.join(paths[1], "rank0.pt"))
    checkpoint.refuse_newer(learner.cfg, 4)
    # Started again by torchrun it goes on from its own newest one, not from where it once began.
    back = dataclasses.replace(learner.cfg, resume=paths[0])
    newer = checkpoint.save(learner.cfg, learner, step=5, rows_drawn=0, log_position=0)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step_000004", "step_000005"], "the broken one goes"
    assert checkpoint.find(back) == paths[0]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert checkpoint.find(back) == newer
    monkeypatch.setattr("dist.gather", lambda path: [path, ""])
    with pytest.raises(
        checkpoint.CheckpointError, match="the ranks see different checkpoints \\('', '.*step_000005'\\)"
    ):
        checkpoint.find(back)


def test_a_log_that_another_run_has_written_is_not_there(tmp_path):
    """A checkpoint of another out_dir: its log position says nothing about this log."""
    report = Report(Config(out_dir=str(tmp_path)), 5000)
    report.close()
    (head,) = (tmp_path / "log.jsonl").read_text().splitlines()
    assert "config" in json.loads(head)


@pytest.mark.slow
def test_a_folder_that_cannot_be_made_is_told_on_every_rank(tmp_path, run_script):
    """The first rank alone makes it: the other one must hear of the failure, and not wait for it."""
    (tmp_path / "checkpoints").write_text("a file stands in the way")
    run_script("tests/checkpoint_ranks.py", str(tmp_path), ranks=2, check=True, timeout=200)
    told = [(tmp_path / f"told{rank}").read_text() for rank in (0, 1)]
    assert "step_000001 cannot be written" in told[0] and "Not a directory" in told[0]
    assert told[1].split(" MB are free")[1] == told[0].split(" MB are free")[1]


@pytest.mark.slow
def test_two_ranks_write_what_one_rank_reads(tmp_path, run_script):
    """The next update on the same trajectories: on two ranks, on two after loading, and on one after loading."""
    path = str(tmp_path / "checkpoints" / "step_000001")
    results = []
    for ranks, resumed in ((2, []), (2, [path]), (0, [path])):
        run_script("tests/checkpoint_ranks.py", str(tmp_path), *resumed, ranks=ranks, check=True)
        with open(os.path.join(path, "meta.json")) as f:
            assert {"rank0.pt", "rank1.pt"} < set(json.load(f)["sizes"]), "each rank's generators"
        results.append(torch.load(tmp_path / ("whole.pt" if len(results) == 0 else "resumed.pt")))
    start = load_lm(TOY, torch.float32).state_dict()
    for other in results[1:]:
        for key in ("loss", "grad_norm", "critic/loss", "critic/grad_norm", "kl", "entropy"):
            assert other["log"][key] == pytest.approx(results[0]["log"][key], rel=1e-5, abs=1e-7), key
        for n, p in results[0]["parameters"].items():
            # Adam moves by the learning rate, 1e-3, wherever a gradient's sign is certain: a lost moment would show.
            assert (other["parameters"][n] - p).abs().mean() < 1e-5, n
    moved = [n for n, p in results[0]["parameters"].items() if n[10:] in start and not torch.equal(p, start[n[10:]])]
    assert len(moved) > 50


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_it_had_not_been(toy_data, tmp_path, run_script):
    """Five steps of 8 prompts from 24 rows; killed after the third, at the epoch's edge."""
    common = [*arguments(toy_data, "OUT"), "--prompts_per_step=8", "--group_size=2", "--eval_files=[]", "--show=0"]
    command = lambda out, *more: [  # noqa: E731
        "train.py", *(f"--out_dir={out}" if a == "--out_dir=OUT" else a for a in common), "--steps=5", *more
    ]  # fmt: skip
    run_script(*command(tmp_path / "whole"), check=True)
    cut = tmp_path / "cut"
    process = subprocess.Popen(
        [sys.executable, *command(cut, "--save_every=1")],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    deadline = time.time() + 120
    while time.time() < deadline and not (cut / "checkpoints" / "step_000003").exists():
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for later in ("step_000004", "step_000005"):  # if the kill came late
        shutil.rmtree(cut / "checkpoints" / later, ignore_errors=True)
    run_script(*command(cut, "--save_every=1", "--resume=auto"), check=True)
    _, whole, _ = read_log(tmp_path / "whole")
    _, steps, _ = read_log(cut)
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5], "each step once"
    for a, b in zip(whole, steps, strict=True):
        for key in ("reward/mean", "num_tokens", "tool/calls", "sampled_len/mean"):
            assert a[key] == b[key], "the same tokens were sampled"
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-6)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)
    with open(cut / "checkpoints" / "step_000005" / "meta.json") as f:
        assert json.load(f)["rows_drawn"] == 40


@pytest.mark.slow
def test_torchrun_starts_a_killed_rank_again(toy_data, tmp_path, run_script):
    """--max-restarts: one of two ranks is killed, both start again and go on from the checkpoint; the log holds each step
    once, and what stands in it is what one rank logs that nobody has disturbed."""
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
    ]
    more = ["--group_size=2", "--steps=4", "--eval_files=[]", "--show=0", "--save_every=1"]
    with open(tmp_path / "output", "w") as output:
        process = subprocess.Popen(
            [*launch, "train.py", *arguments(toy_data, tmp_path / "out"), *more],
            cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.time() + 120
        while time.time() < deadline and not (tmp_path / "out" / "checkpoints" / "step_000002").exists():
            time.sleep(0.02)
        ranks = [c for c in psutil.Process(process.pid).children() if "train.py" in c.cmdline()]
        (second,) = [c for c in ranks if c.environ()["RANK"] == "1"]
        second.kill()
        assert process.wait(timeout=200) == 0, (tmp_path / "output").read_text()[-3000:]
    finally:
        if process.poll() is None:
            kill_tree(process.pid)
    assert "going on from" in (tmp_path / "output").read_text()
    _, steps, _ = read_log(tmp_path / "out")
    assert [r["step"] for r in steps] == [1, 2, 3, 4]
    run_script("train.py", *arguments(toy_data, tmp_path / "whole"), *more, check=True)
    for a, b in zip(read_log(tmp_path / "whole")[1], steps, strict=True):
        for key in ("reward/mean", "num_tokens", "tool/calls", "sampled_len/mean"):
            assert a[key] == b[key], "the same tokens were sampled"
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)
        assert b.get("loss") == pytest.approx(a.get("loss"), abs=1e-5), "none where all advantages of a step are 0"


def kill_tree(pid):
    """torchrun's ranks have sessions of their own: a signal to its group does not reach them."""
    root = psutil.Process(pid)
    for p in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            p.kill()


@pytest.mark.slow
def test_two_launchers_one_dies_both_go_on(toy_data, tmp_path, no_namespaces):
    """Two nodes of one rank each, as two launchers on loopback: one is killed, the other says so; a restart goes on."""
    if not no_namespaces:
        pytest.skip("test_network.py does the same on two hosts")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]

    def start(node, steps, *more):
        meet = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
        run = [sys.executable, "-m", "torch.distributed.run", *meet, "--nproc-per-node", "1", "train.py"]
        own = ["--group_size=2", f"--steps={steps}", "--eval_files=[]", "--show=0", "--save_every=1", *more]
        return subprocess.Popen(
            [*run, *arguments(toy_data, tmp_path / "out"), *own],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    nodes = [start(0, 1000), start(1, 1000)]
    try:
        deadline = time.time() + 150
        while time.time() < deadline and not (tmp_path / "out" / "checkpoints" / "step_000002").exists():
            assert nodes[0].poll() is None, nodes[0].stdout.read()[-3000:]
            time.sleep(0.05)
        kill_tree(nodes[1].pid)  # the node is gone: launcher, rank and engine
        told, _ = nodes[0].communicate(timeout=90)
        assert nodes[0].returncode != 0 and "another rank is gone, this one cannot go on" in told, told[-3000:]
        meta = checkpoint.read_meta(checkpoint.find(Config(out_dir=str(tmp_path / "out"), resume="auto")))
        last = meta["step"] + 1
        nodes = [start(n, last, "--resume=auto") for n in (0, 1)]
        outputs = [n.communicate(timeout=200)[0] for n in nodes]
        assert [n.returncode for n in nodes] == [0, 0], outputs[0][-3000:] + outputs[1][-3000:]
    finally:
        for n in nodes:
            if n.poll() is None:
                kill_tree(n.pid)
    _, steps, _ = read_log(tmp_path / "out")
    assert [r["step"] for r in steps] == list(range(1, last + 1)), "each step once"


def test_config_of_a_checkpoint_is_whole():
    assert Config(**dataclasses.asdict(BASE)) == BASE
