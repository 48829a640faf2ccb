"""Shared pieces: the toy's folder and codec, a scripted engine, a real engine that a module shares."""

import os
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOY = os.path.join(ROOT, "assets", "toy_base")
SHARED = os.path.join(
    os.path.dirname(ROOT), "shared"
)  # large real files beside the checkout; tests that need them skip without
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def no_namespaces():
    """Why network namespaces cannot be made here; "" where they can."""
    import subprocess

    name = f"nanoeyes-{os.getpid()}"
    try:
        for what in ("add", "del"):
            subprocess.run(["ip", "netns", what, name], check=True, capture_output=True, text=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as e:
        return f"no network namespaces here: {getattr(e, 'stderr', '') or e}"
    return ""


@pytest.fixture(scope="session")
def codec():
    from data import Codec

    return Codec(TOY)


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory):
    """A folder with a small train.parquet and eval.parquet."""
    import toy
    from data import write_parquet

    folder = tmp_path_factory.mktemp("toy_data")
    write_parquet(str(folder / "train.parquet"), toy.make_rows(24, 0, "train"), row_group_size=8)
    write_parquet(str(folder / "eval.parquet"), toy.make_rows(8, 0, "eval"))
    return folder


@pytest.fixture(scope="module")
def vllm_engine(codec):
    """A real vLLM on the toy's base model, one per test module."""
    import psutil

    from engine import VLLMEngine

    before = psutil.Process().children()
    engine = VLLMEngine(TOY, codec, max_len=320, max_images=8, max_num_seqs=32, kv_cache_mb=64, threads=1)
    new = [p for p in psutil.Process().children() if p not in before]
    (engine.process,) = [p for p in new if "resource_tracker" not in " ".join(p.cmdline())]
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def run_script():
    """Runs a script of the repository in a subprocess, with `ranks` under torchrun; returns the finished process."""
    import subprocess

    def run(*args, ranks=0, check=False, env=None, timeout=400):
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)) if ranks else ()
        done = subprocess.run(
            [sys.executable, *torchrun, *args],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "PYTHONPATH": ROOT, **(env or {})},  # scripts in tests/ import the project
        )
        if check and done.returncode:
            raise AssertionError(f"{args} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
        return done

    return run
