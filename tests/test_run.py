"""The real script: two ranks for three steps, the checkpoint it leaves, the sentences it says, and how it is interrupted."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import families
import psutil
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, TOY
from fake_judge import FakeJudge

from data import write_parquet

pytestmark = pytest.mark.slow
SMALL = [
    "--prompts_per_step=4",
    "--group_size=4",
    "--steps=3",
    "--show=1",
    "--engine_kv_cache_mb=64",
    "--warmup_steps=0",
]


def arguments(toy_data, out):
    files = [f"--{split}_files=['{toy_data}/{split}.parquet']" for split in ("train", "eval")]
    return ["configs/toy.py", *files, f"--out_dir={out}", *SMALL]


def read_log(out):
    with open(out / "log.jsonl") as f:
        head, *records = map(json.loads, f)
    return head, [r for r in records if "reward/mean" in r], [r for r in records if "eval/accuracy" in r]


def test_three_steps_on_two_ranks_and_one_more_from_the_checkpoint(toy_data, tmp_path, run_script):
    out = tmp_path / "two"
    done = run_script("train.py", *arguments(toy_data, out), ranks=2, check=True)
    head, steps, evals = read_log(out)
    assert head["hardware"]["ranks"] == 2 and head["config"]["steps"] == 3 and head["versions"]["vllm"]
    assert [r["step"] for r in steps] == [1, 2, 3] and [r["step"] for r in evals] == [0, 3]
    for r in steps:
        assert r["mismatch/max"] < 1e-4 and r["push/error"] < 1e-4 and r["grad_norm"] > 0
        assert r["num_tokens"] > 0 and r["lr"] == 3e-4
        assert {
            "acc/mean",
            "tool/rate",
            "response_len/mean",
            "time/rollout",
            "time/update",
            "time/push",
            "finish/answer",
        } <= set(r)
    assert (out / "curve.png").stat().st_size > 10_000
    with open(os.path.join(ROOT, "docs", "glossary.md")) as f:
        glossary = f.read()
    generic = lambda k: re.sub(r"_\d+_images", "_N_images", k)  # noqa: E731
    unknown = {
        k for r in steps for k in r if f"`{generic(k)}`" not in glossary and not k.startswith(("finish/", "step"))
    }
    assert not unknown, "every number in the log has its formula in the glossary"
    bench = run_script("bench.py", "step", str(out / "log.jsonl"), check=False)
    assert bench.returncode == 1 and "no step after the first 3" in bench.stderr
    assert "⟦<think>" in done.stdout and "[image 112x112: 16" in done.stdout

    from model import load_lm

    before, after = load_lm(TOY, torch.float32).state_dict(), load_lm(str(out / "final"), torch.float32).state_dict()
    assert set(before) == set(after)
    moved = [k for k in before if not torch.equal(before[k], after[k])]
    assert len(moved) > 0.9 * len(before), "nearly every parameter must have moved"
    assert max(float((before[k] - after[k]).abs().max()) for k in before) < 3 * 3e-4 * 1.01, (
        "Adam moves at most lr per step"
    )

    # vLLM loads the checkpoint too, and the run goes on from it: one rank, one step, with greedy baselines.
    again = tmp_path / "again"
    more = [f"--model={out}/final", "--steps=1", "--advantage=remax"]
    run_script("train.py", *arguments(toy_data, again), *more, check=True)
    _, steps, _ = read_log(again)
    assert len(steps) == 1 and steps[0]["mismatch/max"] < 1e-4


@pytest.mark.parametrize(
    "objective",
    [
        ["--kl_coef=0.01", "--kl_reward_coef=0.01", "--num_minibatches=2", "--num_epochs=2", "--entropy_coef=0.001"],
        ["--lora_rank=4", "--kl_coef=0.01", "--policy_loss=gspo", "--aggregation=seq-mean-token-mean"],
    ],
)
def test_ppo_with_all_its_models_on_two_ranks(toy_data, tmp_path, run_script, objective):
    """Policy, critic and reference are sharded; the engine takes what is trained, adapters merged."""
    more = ["--advantage=gae", "--steps=2", "--eval_files=[]", *objective]
    run_script("train.py", *arguments(toy_data, tmp_path), *more, ranks=2, check=True)
    _, steps, _ = read_log(tmp_path)
    assert [r["policy_version"] for r in steps] == [1, 2]
    for r in steps:
        assert r["mismatch/max"] < 1e-3 and r["push/error"] < 1e-4 and r["grad_norm"] > 0 and r["kl"] >= 0
        assert r["critic/loss"] > 0 and r["critic/grad_norm"] > 0 and r["skipped_updates"] == 0
    assert steps[1]["kl"] > 0, "the policy has moved away from the reference"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--kl_target=0.1"], "ConfigError: kl_target adapts kl_reward_coef, which is 0"),
        (["--advantage=gea"], "ConfigError: advantage must be one of grpo, rloo"),
        (["--rollout_tp=2"], "ConfigError: rollout_tp 2 must divide the ranks of a host, 1: they share an engine"),
        (["--stepz=3"], "ConfigError: --stepz: unknown key 'stepz'; did you mean 'steps'?"),
        (["--model=no/such/folder"], "DataError: model folder 'no/such/folder'"),
        (["--train_files=['gone.parquet']", "--prepare="], "DataError: data file 'gone.parquet'"),
        (["--env_name=teleporter"], "row 0: unknown tool 'teleporter'; there are visual_toolbox_v2"),
    ],
)
def test_one_sentence_for_each_mistake(toy_data, tmp_path, run_script, change, message):
    done = run_script("train.py", *arguments(toy_data, tmp_path / "x"), *change)
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr


def test_a_broken_image_is_named_with_its_row(toy_data, tmp_path, run_script):
    rows = pq.read_table(toy_data / "train.parquet").to_pylist()
    for i, row in enumerate(rows):
        if i != 0:  # the first row serves the probe: the run gets as far as its first step
            row["images"] = [{"bytes": b"not a picture", "path": None}]
    write_parquet(str(tmp_path / "broken.parquet"), rows)
    done = run_script("train.py", *arguments(toy_data, tmp_path / "x"), f"--train_files=['{tmp_path}/broken.parquet']")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert (
        "DataError: " in done.stderr
        and "broken.parquet row " in done.stderr
        and "an image cannot be decoded" in done.stderr
    )


def test_check_compares_and_trains_nothing(toy_data, tmp_path, run_script):
    out = tmp_path / "x"
    done = run_script("train.py", "--check", *arguments(toy_data, out), ranks=1, check=True)  # torchrun serves one too
    assert float(re.search(r"agree on a fixed prompt within (\S+)", done.stdout)[1]) < 1e-4
    assert not (out / "log.jsonl").exists() and not (out / "final").exists()


def test_a_judge_in_the_run(toy_data, tmp_path, run_script):
    """Rows that need a judge: it is checked at the start, asked where rules cannot tell, and stops the run if it fails."""
    rows = pq.read_table(toy_data / "train.parquet").to_pylist()
    for row in rows:
        row["data_source"], row["reward_model"]["ground_truth"] = "vl_agent", "a digit between zero and nine"
    write_parquet(str(tmp_path / "judged.parquet"), rows)
    own = [
        f"--train_files=['{tmp_path}/judged.parquet']",
        "--eval_files=[]",
        "--steps=2",
        "--show=0",
        "--judge_tries=1",
    ]
    run = lambda url, out: run_script(  # noqa: E731
        "train.py", *arguments(toy_data, tmp_path / out), *own, env={"LLM_AS_A_JUDGE_BASE": url}
    )
    done = run("", "none")
    assert done.returncode == 1 and "judged.parquet row 0: " in done.stderr and "LLM_AS_A_JUDGE_BASE" in done.stderr
    with FakeJudge(lambda body, n: "10"[n % 2]) as judge:
        done = run(judge.url, "good")
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"judge {judge.url}, model judge-72b: said '1' to a right answer" in done.stdout
    _, steps, _ = read_log(tmp_path / "good")
    assert len(steps) == 2 and len(judge.requests) > 2
    assert all(r["judge/fail_frac"] == 0.0 and r["judge/pairs"] for r in steps)
    assert sum(r["acc/mean"] for r in steps) > 0
    with FakeJudge(lambda body, n: "10"[n] if n < 2 else ("status", 500, {})) as judge:
        done = run(judge.url, "bad")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(r"RolloutError: the judge gave no verdict on \d+% of its questions: \d+ x ", done.stderr)


@pytest.fixture
def endless(toy_data, tmp_path):
    """A run in the middle of its steps, in a session of its own; killed afterwards if it still runs."""
    out = tmp_path / "cut"
    command = [sys.executable, "train.py", *arguments(toy_data, out), "--steps=1000"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        deadline = time.time() + 120
        while time.time() < deadline and (not (out / "log.jsonl").exists() or _lines(out / "log.jsonl") < 4):
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.2)
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _lines(path):
    return path.read_text().count("\n")


def test_interrupt_leaves_no_process_behind(endless):
    session = os.getsid(endless.pid)
    assert len([p.pid for p in psutil.process_iter() if _session(p.pid) == session]) >= 2, "trainer and engine"
    os.killpg(endless.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
    output, _ = endless.communicate(timeout=60)
    assert endless.returncode == 1 and "interrupted" in output, output[-2000:]
    time.sleep(0.5)
    assert [p.pid for p in psutil.process_iter() if _session(p.pid) == session] == []


def test_a_killed_trainer_leaves_no_engine_behind(endless):
    session = os.getsid(endless.pid)
    endless.kill()
    endless.wait()
    deadline = time.time() + 10
    while time.time() < deadline and any(_session(p.pid) == session for p in psutil.process_iter()):
        time.sleep(0.1)
    assert [p.pid for p in psutil.process_iter() if _session(p.pid) == session] == []


def test_sharing_an_engine_and_offload_change_nothing(toy_data, tmp_path, run_script):
    """The same two updates: on one rank; on one that keeps weights and moments on the host and computes layers twice; on two
    ranks (rollout_tp = 2) with one engine of two workers, whose trajectories they share."""
    folder = families.save("qwen2_5_vl", families.make_lm("qwen2_5_vl"), str(tmp_path / "model"))
    more = [f"--model={folder}", "--steps=2", "--show=0", "--advantage=gae", "--kl_coef=0.1"]

    def run(name, *own, ranks=0):
        return run_script(
            "train.py", *arguments(toy_data, tmp_path / name), *more, *own, ranks=ranks, check=True
        ).stdout

    run("one")
    run("host", "--offload=True", "--gradient_checkpointing=True")
    assert f"starting vLLM on {folder}, 1 engine(s)" in run("shared", "--rollout_tp=2", ranks=2)
    # Merging gathers adapters on all ranks, in the same order.
    assert "engine and trainer agree" in run("lora", "--rollout_tp=2", "--lora_rank=4", "--check", ranks=2)
    logs = {name: read_log(tmp_path / name) for name in ("one", "host", "shared")}
    for name in ("host", "shared"):
        for a, b in zip(logs["one"][1], logs[name][1], strict=True):
            for key in (
                "reward/mean",
                "sampled_len/mean",
                "loss",
                "grad_norm",
                "kl",
                "critic/loss",
                "critic/grad_norm",
            ):
                assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-6), (name, key)
            assert b["push/error"] < 1e-4 and b["mismatch/max"] < 1e-4
        assert logs[name][2][-1]["eval/sampled_len/mean"] == logs["one"][2][-1]["eval/sampled_len/mean"]


def test_a_dead_engine_ends_the_run_with_one_sentence(endless):
    (engine,) = [p for p in psutil.Process(endless.pid).children() if "EngineCore" in " ".join(p.cmdline())]
    engine.kill()
    output, _ = endless.communicate(timeout=60)
    assert endless.returncode == 1
    assert output.rstrip().endswith("EngineError: the vLLM engine has died; its own words stand above"), output[-3000:]


def _session(pid):
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def test_readme_file_map_is_true():
    """Every Python file of the root stands in the README's map, with a line count within a tenth."""
    with open(os.path.join(ROOT, "README.md")) as f:
        mapped = {m[1]: int(m[2]) for m in re.finditer(r"^\| (\w+\.py) \| (\d+) \|", f.read(), re.M)}
    files = [name for name in os.listdir(ROOT) if name.endswith(".py")]
    assert sorted(mapped) == sorted(files)
    for name in files:
        with open(os.path.join(ROOT, name)) as f:
            assert mapped[name] == pytest.approx(len(f.readlines()), rel=0.1), name


def test_code_is_formatted_and_linted():
    for command in (["format", "--check"], ["check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
