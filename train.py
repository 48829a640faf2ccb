"""Agentic multimodal RL: a policy that reasons, calls tools in between, gets images back, and learns from the outcome.

    uv run --extra cpu python train.py configs/toy.py                                # a laptop: two cores, no GPU
    uv run --extra gpu torchrun --nproc-per-node 8 train.py configs/7b.py            # one node
    uv run --extra gpu torchrun --nnodes 4 --nproc-per-node 8 --rdzv-endpoint HOST:PORT train.py configs/7b.py

One step: 1. roll out  2. reward (inside each rollout)  3. advantages  4. pack and count  5. old and reference logprobs
6. update  7. push the weights to the engine  8. log, and once in a while evaluate and save.

Departures from the textbook: GRPO without KL term and with one update per batch, so that the old logprobs are the current
ones, detached, and step 5 costs nothing; the loss is a sum over all sampled tokens of the step, over all ranks, divided
once by their number; trajectories whose advantage is exactly 0 count in that number, but take no forward pass.
"""

import fcntl
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
        CONFIG = load_config(sys.argv[1:])
    except ConfigError as e:
        sys.exit(f"ConfigError: {e}")

# Before torch: idle OpenMP threads must leave the cores to whoever works, trainer or engine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
CORES = max(1, (os.cpu_count() or 1) // dist.LOCAL_WORLD_SIZE)

import torch

from data import (
    Codec,
    DataError,
    ImageRules,
    ParquetData,
    add_blank_image,
    make_microbatches,
    pack_rows,
    plan_microbatches,
)
from engine import EngineError, VLLMEngine
from losses import clipped_policy_loss, grpo_advantages
from model import Policy, clip_grad_norm, load_lm, prepare, save_hf
from report import Report, memory_mb
from reward import reward_function
from rollout import Rollout, RolloutLimits, Trajectory, reasons_left, rollout_metrics
from tools import ToolBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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


def check_data(data: ParquetData) -> None:
    """Every row's tool and reward must exist, or the run would stop in the middle. Raises DataError naming a row."""
    for column, find in (("env_name", lambda name: name and ToolBase.create(name)), ("data_source", reward_function)):
        for value, where in data.first_rows(column).items():
            try:
                find(data.env_name if column == "env_name" and data.env_name is not None else value)
            except ValueError as e:
                raise DataError(f"{where}: {e}") from None


class RolloutError(Exception):
    """Too many trajectories of a step cannot be used."""


class Learner:
    """What the step works on: the policy with its optimizer, and the probe that watches the engine's copy of it."""

    def __init__(self, cfg: Config, codec: Codec):
        self.cfg, self.codec = cfg, codec
        lm = load_lm(cfg.model, torch.float32)  # master weights
        if cfg.freeze_vision and codec.has_vision:
            lm.model.visual.requires_grad_(False)
        if cfg.gradient_checkpointing:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
        policy = Policy(lm, codec.banned_ids)
        optimizer = torch.optim.AdamW(
            (p for p in policy.parameters() if p.requires_grad),
            cfg.lr,
            betas=tuple(cfg.adam_betas),
            weight_decay=cfg.weight_decay,
        )
        self.accelerator, self.policy, self.optimizer = prepare(
            policy, optimizer, world_size=dist.WORLD_SIZE, dtype=DTYPES[cfg.dtype]
        )

    def microbatches(self, rows: list[Trajectory], spare: Trajectory) -> list:
        """This rank's micro-batches, as many as on every other rank and about as full: rows move between ranks.

        `spare`, without a response token, stands in where a rank has nothing to do.
        """
        lengths = dist.gather([len(t.tokens) for t in rows])
        plan = plan_microbatches([n for own in lengths for n in own], dist.WORLD_SIZE, self.cfg.microbatch_tokens)
        own = dict(enumerate(rows, start=sum(map(len, lengths[: dist.RANK]))))  # number among the rows of all ranks
        outgoing = [[(i, own[i]) for chunk in chunks for i in chunk if i in own] for chunks in plan]
        mine = dict(dist.exchange(outgoing))
        chunks = [[mine[i] for i in chunk] or [spare] for chunk in plan[dist.RANK]]
        batches = make_microbatches(chunks, self.codec)
        if dist.largest(any(b.pixel_values is not None for b in batches)):
            for b in batches:
                add_blank_image(b, self.codec)
        return [b.to(self.accelerator.device) for b in batches]

    def update(self, batches: list, num_tokens: int, step: int) -> dict[str, float]:
        """One optimizer step on the sum of the micro-batches' losses over `num_tokens`, the global count."""
        cfg, sums, worst = self.cfg, {}, 0.0
        for group in self.optimizer.param_groups:
            group["lr"] = cfg.lr * min(1.0, (step + 1) / max(1, cfg.warmup_steps))
        for batch in batches:
            mask = batch.response_mask
            logprobs, entropy = self.policy(batch, cfg.temperature)
            old_logprobs = logprobs.detach()  # one update per batch: the policy that sampled is this one
            loss, metrics = clipped_policy_loss(
                logprobs,
                old_logprobs,
                batch.advantages,
                mask,
                clip_low=cfg.clip_low,
                clip_high=cfg.clip_high,
                clip_dual=cfg.clip_dual,
            )
            # FSDP averages gradients over ranks; the loss is a sum over ranks.
            self.accelerator.backward(loss.sum() * dist.WORLD_SIZE / num_tokens)
            gap = torch.where(mask, old_logprobs - batch.rollout_logprobs, 0.0).abs()
            worst = max(worst, float(gap.max()))
            metrics |= {"loss": loss.sum().detach(), "entropy": entropy.sum().detach(), "mismatch/mean": gap.sum()}
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        grad_norm = clip_grad_norm(self.policy, cfg.max_grad_norm)
        if not torch.isfinite(torch.tensor(grad_norm)):
            raise FloatingPointError(f"the gradient norm of step {step} is {grad_norm}")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        totals = {name: dist.total(value) / num_tokens for name, value in sums.items()}
        return totals | {
            "mismatch/max": dist.largest(worst),
            "grad_norm": grad_norm,
            "lr": self.optimizer.param_groups[0]["lr"],
        }

    @torch.no_grad()
    def probe(self, engine: VLLMEngine, prompt) -> float:
        """Largest |logprob(trainer) - logprob(engine)| on a few tokens after one fixed prompt, over all ranks.

        In float32 on both sides a gap of 1e-3 is no rounding any more: a weight did not arrive, or the two sides see
        different images, positions or temperatures. Training on would be training on another policy's samples.
        """
        t = Trajectory.start(prompt, 0)
        g = engine.run(engine.generate(t.engine_ids, t.views, max_tokens=4, temperature=self.cfg.temperature, seed=0))
        t.append_sampled(g.ids, g.logprobs, g.version)
        batch = pack_rows([t], self.codec).to(self.accelerator.device)
        logprobs, _ = self.policy(batch, self.cfg.temperature)
        error = dist.largest(float((logprobs - batch.rollout_logprobs)[batch.response_mask].abs().max()))
        if error > 1e-3 and self.cfg.dtype == self.cfg.engine_dtype == "float32":
            raise RuntimeError(f"after a weight push engine and trainer differ by {error:.1e} on a fixed prompt")
        return error


def evaluate(
    rollout: Rollout, engine: VLLMEngine, data: ParquetData, temperature: float, step: int
) -> dict[str, float]:
    """One trajectory per row, through the very code that training uses, after `step` steps."""
    episode = rollout.run(list(data), 1, temperature, take=lambda: dist.take(f"evaluation after {step}"))
    trajectories = engine.run(episode)
    means = dist.merge_means(rollout_metrics(trajectories))
    names = {"acc/mean": "eval/accuracy", "tool/rate": "eval/tool_rate", "iou/mean": "eval/iou"}
    return {names.get(k, f"eval/{k}"): v for k, v in means.items()}


def max_inflight(cfg: Config) -> int:
    """Trajectories that a rank runs at a time."""
    return cfg.max_inflight or -(-cfg.prompts_per_step * cfg.group_size // dist.WORLD_SIZE)


def start_engine(cfg: Config, codec: Codec) -> VLLMEngine:
    """This rank's engine. It comes before torch.distributed, whose state its forked processes must not inherit."""
    if dist.IS_MAIN:
        print(f"starting vLLM on {cfg.model}, {dist.WORLD_SIZE} engine(s)", flush=True)
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
        threads=cfg.engine_threads,
        stop=tuple(cfg.stop),
        timeout=cfg.engine_timeout,
    )


def make_rollout(cfg: Config, codec: Codec, engine: VLLMEngine) -> Rollout:
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
    weights = dict(acc_weight=cfg.acc_weight, format_weight=cfg.format_weight, tool_weight=cfg.tool_weight)
    return Rollout(
        engine,
        codec,
        ImageRules(factor, cfg.min_pixels, cfg.max_pixels, cfg.resampling),
        limits,
        reward=lambda t: reward_function(t.sample.data_source)(t, **weights),
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


def train(cfg: Config) -> None:
    torch.manual_seed(cfg.seed)
    torch.set_num_threads(CORES)
    prepare_data(cfg)
    codec = Codec(cfg.model)
    data = ParquetData(cfg.train_files, cfg.env_name)
    eval_data = ParquetData(cfg.eval_files, cfg.env_name) if cfg.eval_files else None
    check_data(data)
    if eval_data:
        check_data(eval_data)
    engine, report = start_engine(cfg, codec), None
    try:
        dist.init()
        learner, rollout, report = Learner(cfg, codec), make_rollout(cfg, codec, engine), Report(cfg)
        probe_prompt = rollout.prepare(next(iter(data)))
        engine.push(learner.policy.lm, 0)
        error = learner.probe(engine, probe_prompt)
        report.note(f"engine and trainer agree on a fixed prompt within {error:.1e}")
        if eval_data:
            report.log({"step": 0, **evaluate(rollout, engine, eval_data, cfg.eval_temperature, 0)})

        stream = data.shuffled(cfg.seed)
        for step in range(cfg.steps):
            clock = Clock()

            # 1. roll out, 2. reward
            samples = [next(stream) for _ in range(cfg.prompts_per_step)]  # the same on every rank, which takes of them
            trajectories = engine.run(
                rollout.run(
                    samples,
                    cfg.group_size,
                    cfg.temperature,
                    take=lambda: dist.take(f"step {step}"),  # noqa: B023 - used within this very step
                    first_group=step * cfg.prompts_per_step,
                    on_end=report.tick,
                    heartbeat=report.note,
                )
            )
            rows, left = valid_rows(cfg, trajectories)
            clock.lap("time/rollout")

            # 3. advantages
            rewards = torch.tensor([t.reward for t in rows], dtype=torch.float64)
            groups = torch.tensor([t.group_id for t in rows])
            advantages = grpo_advantages(rewards, groups, norm_by_std=cfg.norm_by_std)
            for t, advantage in zip(rows, advantages.tolist(), strict=True):
                t.advantage = advantage

            # 4. pack into micro-batches, count response tokens over all ranks
            live = [t for t in rows if t.advantage != 0.0]
            num_tokens = int(dist.total(sum(t.num_sampled for t in rows)))
            batches = learner.microbatches(live, spare=Trajectory.start(probe_prompt, 0))
            clock.lap("time/pack")

            # 5. old and reference logprobs: none needed with one update per batch and no KL term
            # 6. update
            metrics = learner.update(batches, num_tokens, step)
            clock.lap("time/update")

            # 7. push the weights, reset the engine's caches
            engine.push(learner.policy.lm, step + 1)
            clock.lap("time/push")
            metrics["push/error"] = learner.probe(engine, probe_prompt)
            clock.lap("time/probe")

            # 8. log
            metrics |= dist.merge_means(rollout_metrics(trajectories))
            metrics["live_frac"] = dist.total(len(live)) / dist.total(len(trajectories))
            metrics |= memory_mb()
            metrics |= {"num_tokens": num_tokens, "policy_version": step + 1, "left": left}
            report.log({"step": step + 1, **metrics, **clock.laps, "time/step": clock.total()})

            # once in a while: evaluate and save
            last = step + 1 == cfg.steps
            if eval_data and (last or (cfg.eval_every and (step + 1) % cfg.eval_every == 0)):
                report.log({"step": step + 1, **evaluate(rollout, engine, eval_data, cfg.eval_temperature, step + 1)})
            if last or (cfg.save_every and (step + 1) % cfg.save_every == 0):
                folder = os.path.join(cfg.out_dir, "final" if last else f"step_{step + 1}")
                save_hf(learner.policy, learner.accelerator, cfg.model, folder)
        report.finish(trajectories[:: cfg.group_size][: cfg.show], codec)
    finally:
        if report:
            report.close()
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
        train(CONFIG)
    except (ConfigError, DataError, EngineError, RolloutError) as e:
        sys.exit(f"{type(e).__name__}: {e}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
