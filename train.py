"""Agentic multimodal RL: a policy that reasons, calls tools in between, gets images back, and learns from the outcome.

    uv run --extra cpu python train.py configs/toy.py                                # a laptop: two cores, no GPU
    uv run --extra gpu torchrun --nproc-per-node 8 train.py configs/7b.py            # one node
    uv run --extra gpu torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT train.py configs/7b.py
    uv run --extra gpu python train.py --check configs/7b.py       # do engine and trainer agree? nothing is trained
    uv run --extra cpu python train.py --plan configs/7b.py        # batch, tokens, memory per GPU, on paper: see plan.py

One step: 1. roll out  2. reward (inside each rollout)  3. old and reference logprobs, values  4. advantages  5. pack and
count  6. update  7. push the weights to the engine  8. log, and once in a while evaluate and save. Steps 3 to 6 stand in
learner.py under the same numbers; which of them do any work is the objective's affair, and the objective is configuration.
"""

import dataclasses
import fcntl
import inspect
import itertools
import math
import os
import shlex
import subprocess
import sys
import time
from collections import Counter

import dist
from config import Config, ConfigError, load_config

if __name__ == "__main__":  # a misspelt key need not wait for the imports below
    try:
        if "--plan" in sys.argv:  # on paper: no vLLM, no weights, no data
            import plan

            plan.main([a for a in sys.argv[1:] if a != "--plan"])
            sys.exit()
        CONFIG = load_config([a for a in sys.argv[1:] if a != "--check"])
    except ConfigError as e:
        sys.exit(f"ConfigError: {e}")

# Before torch: idle OpenMP threads must leave the cores to whoever works, trainer or engine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
CORES = max(1, (os.cpu_count() or 1) // dist.LOCAL_WORLD_SIZE)

import torch

import checkpoint
from data import Codec, DataError, ImageRules, ParquetData
from engine import EngineError, VLLMEngine
from judge import Judge, JudgeError
from learner import Learner, ParityError, filler
from model import save_hf
from report import Report, memory_mb
from reward import overlong, reward_function
from rollout import Rollout, RolloutLimits, Trajectory, reasons_left, rollout_metrics
from tools import ToolBase


def prepare_data(cfg: Config) -> None:
    """Runs `cfg.prepare` if a data file is missing. One rank does it, the others wait at the lock and find the files."""
    files = cfg.train_files + cfg.eval_files
    if cfg.prepare and not all(os.path.exists(f) for f in files):
        os.makedirs(cfg.out_dir, exist_ok=True)
        with open(os.path.join(cfg.out_dir, ".prepare.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not all(os.path.exists(f) for f in files):
                print(f"making the data: python {cfg.prepare}", flush=True)
                subprocess.run([sys.executable, *shlex.split(cfg.prepare)], check=True)


def find_rewards(cfg: Config, files: list[ParquetData], judge: Judge | None) -> dict:
    """{data_source: reward function} of every row. A tool or reward that does not exist would stop the run in the middle:
    raises DataError naming a row instead."""
    found = {}

    def find_tool(name: str) -> None:
        if name:
            ToolBase.create(name)

    def find_reward(source: str) -> None:
        found[source] = reward_function(source, cfg.reward_fn, cfg.reward_kwargs.get(source), judge)

    for data in files:
        for column, find in (("env_name", find_tool), ("data_source", find_reward)):
            for value, where in data.first_rows(column).items():
                try:
                    find(data.env_name if column == "env_name" and data.env_name is not None else value)
                except ValueError as e:
                    raise DataError(f"{where}: {e}") from None
    return found


class RolloutError(Exception):
    """Too many trajectories of a step cannot be used."""


def run_engine(
    cfg: Config, rollout: Rollout, engine: VLLMEngine, samples, group_size: int, temperature: float, name: str, **more
) -> list[Trajectory]:
    """The trajectories of those of the samples that this rank's engine takes. `name` is the counter's, a new one each time.

    A rank that has a part in another one's engine waits till that has ended: not in a collective, where it would have to
    give up after `comm_timeout`.
    """
    ended = f"{name}: ended on {dist.first_of(cfg.rollout_tp)}"
    if not engine.leads:
        dist.wait(ended)
        return []
    trajectories = engine.run(rollout.run(samples, group_size, temperature, take=lambda: dist.take(name), **more))
    if cfg.rollout_tp > 1:
        dist.tell(ended)
    return trajectories


def evaluate(cfg: Config, rollout: Rollout, engine: VLLMEngine, data: ParquetData, step: int) -> dict[str, float]:
    """One trajectory per row, through the very code that training uses, after `step` steps."""
    trajectories = run_engine(cfg, rollout, engine, data, 1, cfg.eval_temperature, f"evaluation after {step}")
    means = dist.merge_means(rollout_metrics(trajectories))
    names = {"acc/mean": "eval/accuracy", "tool/rate": "eval/tool_rate", "iou/mean": "eval/iou"}
    return {names.get(k, f"eval/{k}"): v for k, v in means.items()}


def roll_out(
    cfg: Config, rollout: Rollout, engine: VLLMEngine, data: ParquetData, step: int, rows_drawn: int, report: Report
):
    """Steps 1 and 2: (all trajectories, those to learn from, greedy baselines, rows drawn so far).

    With `refill_rounds` groups whose rewards are all equal, which teach nothing, are drawn anew; the last round stays as
    it is. ReMax takes one greedy trajectory per prompt as well.
    """
    everything, kept, baselines = [], [], {}
    for round_ in range(1 + cfg.refill_rounds):
        missing = cfg.prompts_per_step - int(dist.total(len({t.group_id for t in kept})))
        if missing <= 0:
            break
        samples = data.shuffled(cfg.seed, rows_drawn, missing)  # the same on every rank, which takes of them
        name, first = f"step {step} round {round_}", dict(first_group=rows_drawn)
        shown = dict(on_end=report.tick, heartbeat=report.note)
        new = run_engine(cfg, rollout, engine, samples, cfg.group_size, cfg.temperature, name, **first, **shown)
        if cfg.advantage == "remax":
            greedy = run_engine(cfg, rollout, engine, samples, 1, 0.0, f"{name} greedy", **first)
            scores = {t.group_id: math.nan if t.reward_parts["score"] is None else t.reward for t in greedy}
            baselines = {group: score for part in dist.gather(scores) for group, score in part.items()}
        rows_drawn += missing
        everything += new
        if round_ < cfg.refill_rounds:
            rewards: dict[int, set] = {}
            for t in new:
                if t.reward_parts["score"] is not None:
                    rewards.setdefault(t.group_id, set()).add(t.reward)
            new = [t for t in new if len(rewards.get(t.group_id, ())) > 1]
        kept += new
    return everything, kept, baselines, rows_drawn


def judge_metrics(cfg: Config, judge: Judge | None) -> dict:
    """What the judge did since the last call, with a sample of the pairs it judged. Too many failures stop the run."""
    if judge is None:
        return {}
    tally = judge.take()
    metrics = dist.merge_means(tally.sums())
    if metrics.get("judge/fail_frac", 0.0) > cfg.max_judge_fail_frac:
        errors = sum(dist.gather(tally.errors), Counter())
        told = "; ".join(f"{n} x {error}" for error, n in errors.most_common(3))
        raise RolloutError(f"the judge gave no verdict on {metrics['judge/fail_frac']:.0%} of its questions: {told}")
    pairs = [dataclasses.asdict(p) for p in tally.pairs]
    return metrics | ({"judge/pairs": pairs} if pairs else {})


def max_inflight(cfg: Config) -> int:
    """Trajectories that an engine runs at a time."""
    return cfg.max_inflight or -(-cfg.prompts_per_step * cfg.group_size * cfg.rollout_tp // dist.WORLD_SIZE)


def start_engine(cfg: Config, codec: Codec) -> VLLMEngine:
    """This rank's engine, or its part in one. It comes before torch.distributed, whose state forked processes must not
    inherit."""
    if dist.LOCAL_WORLD_SIZE % cfg.rollout_tp:
        raise ConfigError(
            f"rollout_tp {cfg.rollout_tp} must divide the ranks of a host, {dist.LOCAL_WORLD_SIZE}: they share an engine"
        )
    if dist.IS_MAIN:
        print(f"starting vLLM on {cfg.model}, {dist.WORLD_SIZE // cfg.rollout_tp} engine(s)", flush=True)
    return VLLMEngine(
        cfg.model,
        codec,
        max_len=cfg.max_prompt_len + cfg.max_response_len,
        max_images=cfg.max_images,
        max_num_seqs=min(256, max_inflight(cfg)),
        dtype=cfg.engine_dtype,
        seed=cfg.seed * 1000 + dist.RANK,
        block_size=cfg.engine_block_size,
        kv_cache_mb=cfg.engine_kv_cache_mb,
        gpu_frac=cfg.engine_gpu_frac,
        tensor_parallel=cfg.rollout_tp,
        first_device=dist.LOCAL_RANK,
        leads=dist.first_of(cfg.rollout_tp) == dist.RANK,
        threads=cfg.engine_threads,
        stop=tuple(cfg.stop),
        timeout=cfg.engine_timeout,
    )


def make_rollout(cfg: Config, codec: Codec, engine: VLLMEngine, rewards: dict) -> Rollout:
    """The multi-turn loop with its image rules, limits, tools and reward, as the config says."""
    factor = codec.patch_size * codec.merge_size if codec.has_vision else 1
    limits = RolloutLimits(
        max_prompt_len=cfg.max_prompt_len,
        max_response_len=cfg.max_response_len,
        max_turn_len=cfg.max_turn_len,
        max_turns=cfg.max_turns,
        max_images=cfg.max_images,
        max_tool_errors=cfg.max_tool_errors,
        tool_timeout=cfg.tool_timeout,
        trajectory_timeout=cfg.trajectory_timeout,
    )
    frame = codec.box_frame if cfg.box_frame == "auto" else cfg.box_frame

    def reward(t: Trajectory):
        found = rewards[t.sample.data_source](t)
        return with_length(t, found) if cfg.overlong_buffer else found

    async def with_length(t: Trajectory, found) -> dict:
        parts = dict(await found if inspect.isawaitable(found) else found)
        parts["overlong"] = overlong(t.response_len, cfg.max_response_len, cfg.overlong_buffer)
        return parts | ({} if parts["score"] is None else {"score": parts["score"] + parts["overlong"]})

    return Rollout(
        engine,
        codec,
        ImageRules(factor, cfg.min_pixels, cfg.max_pixels, cfg.resampling),
        limits,
        reward=reward,
        tool_kwargs={name: {"box_frame": frame} | cfg.tool_kwargs.get(name, {}) for name in ToolBase.registry},
        seed=cfg.seed << 20,
        max_inflight=max_inflight(cfg),
        tool_threads=cfg.tool_threads,
    )


def valid_rows(cfg: Config, trajectories: list[Trajectory]) -> tuple[list[Trajectory], dict[str, int]]:
    """(rows, reasons): those that hold all invariants and have a reward, and why others, on all ranks, do not.

    Too many others stop the run.
    """
    reasons = sum(dist.gather(reasons_left(trajectories)), Counter())
    if reasons.total() > cfg.max_invalid_frac * cfg.prompts_per_step * cfg.group_size:
        told = "; ".join(f"{n} x {reason}" for reason, n in reasons.most_common(3))
        raise RolloutError(
            f"{reasons.total()} of {cfg.prompts_per_step * cfg.group_size} trajectories left the batch: {told}"
        )
    return [t for t in trajectories if t.reward_parts["score"] is not None], dict(reasons)


def train(cfg: Config, *, check_only: bool = False) -> None:
    """The whole run; `check_only` ends after the first comparison of engine and trainer."""
    torch.manual_seed(cfg.seed)
    torch.set_num_threads(CORES)
    prepare_data(cfg)
    codec = Codec(cfg.model)
    data = ParquetData(cfg.train_files, cfg.env_name)
    eval_data = ParquetData(cfg.eval_files, cfg.env_name) if cfg.eval_files else None
    judge = Judge.from_env(
        model=cfg.judge_model,
        max_concurrency=cfg.judge_concurrency,
        timeout=cfg.judge_timeout,
        tries=cfg.judge_tries,
        extra_body=cfg.judge_extra_body,
    )
    rewards = find_rewards(cfg, [data, eval_data] if eval_data else [data], judge)
    if not any(f.needs_judge for f in rewards.values()):
        judge = None
    engine, report = start_engine(cfg, codec), None
    try:
        dist.init(cfg.comm_timeout)
        learner, rollout = Learner(cfg, codec), make_rollout(cfg, codec, engine, rewards)
        path = checkpoint.find(cfg)
        start = checkpoint.load(path, learner) if path else {"step": 0, "rows_drawn": 0, "log_position": 0}
        if judge:
            told = engine.run(judge.check())  # on the loop of the rollout: its connections live there
            if dist.IS_MAIN:
                print(told, flush=True)
        first_rows = list(itertools.islice(data, 64))
        probe_prompt = rollout.prepare(next((s for s in first_rows if s.images), first_rows[0]))
        engine.push(learner.policy.weights(), start["step"])
        error = learner.probe(engine, probe_prompt)
        agree = f"engine and trainer agree on a fixed prompt within {error:.1e}"
        if check_only:
            if dist.IS_MAIN:
                print(agree)
            return
        checkpoint.refuse_newer(cfg, start["step"])
        report = Report(cfg, start["log_position"])
        for size, file in (d.largest for d in (data, eval_data) if d):
            if size > 1 << 28:
                report.note(
                    f"{file}: row groups of {size >> 20} MB, and every rank holds one; see python data.py regroup"
                )
        report.note(f"going on from {path}\n{agree}" if path else agree)
        if eval_data and not path:
            report.log({"step": 0, **evaluate(cfg, rollout, engine, eval_data, 0)})

        rows_drawn = start["rows_drawn"]
        trajectories = []
        for step in range(start["step"], cfg.steps):
            clock, busy = Clock(), engine.busy

            # 1. roll out, 2. reward
            trajectories, kept, baselines, rows_drawn = roll_out(cfg, rollout, engine, data, step, rows_drawn, report)
            judged = judge_metrics(cfg, judge)
            rows, left = valid_rows(cfg, kept)
            engine.sleep()  # until the weights are pushed
            rows = learner.share_out(rows)
            clock.lap("time/rollout")
            clock.laps["time/engine"] = engine.busy - busy

            # 3. what the models say of the batch: old and reference logprobs, values; nothing where none is needed
            spare = filler(probe_prompt)
            learner.annotate(rows, spare)
            clock.lap("time/annotate")

            # 4. advantages
            metrics = judged | learner.advantages(rows, baselines)

            # 5. pack into mini-batches and micro-batches, count response tokens over all ranks
            minibatches = learner.minibatches(rows, spare, step)
            clock.lap("time/pack")

            # 6. update
            metrics |= learner.update(minibatches, step)
            clock.lap("time/update")

            # 7. push the weights, reset the engine's caches
            engine.push(learner.policy.weights(), step + 1)
            clock.lap("time/push")
            metrics["push/error"] = learner.probe(engine, probe_prompt)
            clock.lap("time/probe")

            # 8. log
            metrics |= dist.merge_means(rollout_metrics(trajectories))
            live = sum(any(t.advantages) for t in rows)
            metrics["live_frac"] = dist.total(live) / dist.total(len(trajectories))
            metrics |= memory_mb()
            metrics |= {"num_tokens": sum(n for _, n in minibatches), "policy_version": step + 1, "left": left}
            report.log({"step": step + 1, **metrics, **clock.laps, "time/step": clock.total()})

            # once in a while: evaluate and save
            last = step + 1 == cfg.steps
            if eval_data and (last or (cfg.eval_every and (step + 1) % cfg.eval_every == 0)):
                report.log({"step": step + 1, **evaluate(cfg, rollout, engine, eval_data, step + 1)})
                judge_metrics(cfg, judge)  # the evaluation's own; a judge that fails stops here too
            if cfg.save_every and (last or (step + 1) % cfg.save_every == 0):
                position = report.position
                checkpoint.save(cfg, learner, step=step + 1, rows_drawn=rows_drawn, log_position=position)
        save_hf(learner.policy, learner.accelerator, cfg.model, os.path.join(cfg.out_dir, "final"))
        report.finish(trajectories[:: cfg.group_size][: cfg.show], codec)
    finally:
        if report:
            report.close()
        if judge:
            engine.run(judge.close())
        engine.close()
        dist.finish()


class Clock:
    """Wall seconds of the phases of one step."""

    def __init__(self):
        self.start = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self.last = now - self.last, now

    def total(self) -> float:
        return time.perf_counter() - self.start


if __name__ == "__main__":
    try:
        train(CONFIG, check_only="--check" in sys.argv)
    except (
        ConfigError,
        DataError,
        EngineError,
        RolloutError,
        ParityError,
        JudgeError,
        checkpoint.CheckpointError,
    ) as e:
        sys.exit(f"{type(e).__name__}: {e}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except RuntimeError as e:
        if not dist.is_gone(e):
            raise
        sys.exit(f"another rank is gone, this one cannot go on ({str(e).splitlines()[0]}). --resume=auto continues")
