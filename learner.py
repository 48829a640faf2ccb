"""What learns: the policy, and beside it a critic and a reference where the objective asks for them.

The steps of train.py that touch a model, under the same numbers: 3. what the models say of the batch (old and reference
logprobs, values)  4. advantages  5. pack into mini-batches and micro-batches  6. update. Every one of them is skipped
where it is not needed: GRPO with one update per batch runs none of step 3, and only trajectories whose advantage is not
exactly 0 take a forward pass.

A *mini-batch* is one optimizer update, a *micro-batch* one backward. Sums over tokens are divided once, by counts over
all micro-batches of all ranks.
"""

import copy
import os
import random
from collections.abc import Iterator

import torch

import dist
from config import Config
from data import TOKEN_FIELDS, Codec, MicroBatch, add_blank_image, load_pixels, pack_rows, plan_microbatches
from losses import (
    POLICY_LOSSES,
    AdaptiveKL,
    gae_advantages,
    grpo_advantages,
    kl_estimate,
    kl_penalized_rewards,
    loss_weights,
    mismatch_weights,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    remax_advantages,
    rloo_advantages,
    value_loss,
)
from model import Critic, Policy, add_lora, checkpoint_layers, clip_grad_norm, load_lm, make_accelerator, shard
from rollout import Trajectory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ParityError(Exception):
    """Engine and trainer do not compute the same probabilities."""


class Learner:
    """Holds policy, critic and reference with their optimizers, under one accelerator."""

    def __init__(self, cfg: Config, codec: Codec):
        self.cfg, self.codec = cfg, codec
        self.num_updates = cfg.num_epochs * cfg.num_minibatches  # of the policy, per step
        lm = self._load()
        self.accelerator = make_accelerator(
            lm, world_size=dist.WORLD_SIZE, dtype=DTYPES[cfg.dtype], offload=cfg.offload
        )
        if cfg.lora_rank:
            add_lora(lm, cfg.lora_rank, cfg.lora_alpha)
        policy = Policy(lm, codec.banned_ids)
        self.policy, self.optimizer = shard(self.accelerator, policy, self._adamw(policy, cfg.lr))
        self.critic = self.critic_optimizer = self.reference = None
        if cfg.advantage == "gae":
            critic = Critic(self._load())
            self.critic, self.critic_optimizer = shard(self.accelerator, critic, self._adamw(critic, cfg.critic_lr))
        self.needs_reference = bool(cfg.kl_coef or cfg.kl_reward_coef)
        if self.needs_reference and not cfg.lora_rank:  # with LoRA the reference is the policy without its adapters
            frozen = Policy(self._load(), codec.banned_ids).requires_grad_(False)
            # accelerate shards a model only together with an optimizer; this one never steps and holds no state.
            self.reference, _ = shard(self.accelerator, frozen, torch.optim.SGD(frozen.parameters(), lr=0.0))
        self.kl = AdaptiveKL(cfg.kl_reward_coef, cfg.kl_target)
        self.skipped_updates = 0

    def _load(self):
        lm = load_lm(self.cfg.model, torch.float32, weights=dist.IS_MAIN)  # master weights; see model.shard
        if self.cfg.freeze_vision and self.codec.has_vision:
            lm.model.visual.requires_grad_(False)
        if self.cfg.gradient_checkpointing:
            checkpoint_layers(lm)
        return lm

    def _adamw(self, module, lr: float) -> torch.optim.AdamW:
        trained = [p for p in module.parameters() if p.requires_grad]
        options = dict(betas=tuple(self.cfg.adam_betas), weight_decay=self.cfg.weight_decay)
        return torch.optim.AdamW(trained, lr, fused=self.cfg.offload or None, **options)

    # ------------------------------------------------------------------------------------------------ 3. annotate
    def share_out(self, rows: list[Trajectory]) -> list[Trajectory]:
        """The ranks that share an engine share what it rolled out: whole groups, about as many tokens each."""
        num, groups = self.cfg.rollout_tp, {}
        if num == 1:
            return rows
        for t in rows:
            groups.setdefault(t.group_id, []).append(t)
        tokens = [sum(len(t.tokens) for t in group) for group in groups.values()]
        plan = plan_microbatches(tokens, num, max(1, sum(tokens)))
        outgoing: list[list[Trajectory]] = [[] for _ in range(dist.WORLD_SIZE)]
        for rank, chunks in enumerate(plan, dist.first_of(num)):  # one chunk each, none without rows
            outgoing[rank] = [_leaving(t) for chunk in chunks for i in chunk for t in list(groups.values())[i]]
        return dist.exchange(outgoing)

    @torch.no_grad()
    def annotate(self, rows: list[Trajectory], spare: Trajectory) -> None:
        """Step 3: writes `old_logprobs`, `ref_logprobs` and `values` into the rows, those that the objective asks for.

        Rows stay on the rank that rolled them out, where their group is: advantages come next.
        """
        cfg = self.cfg
        if cfg.old_logprobs == "rollout":
            for t in rows:
                t.old_logprobs = t.rollout_logprobs
        # With one update per batch the current logprobs are the old ones, detached, unless rewards need them before.
        old = cfg.old_logprobs == "trainer" and (self.num_updates > 1 or cfg.kl_reward_coef)
        if not (old or self.needs_reference or self.critic):
            return
        for batch in self._ready(self._microbatches(rows, spare, balance=False)):
            if old:
                batch.write("old_logprobs", self.policy(batch, cfg.temperature)[0])
            if self.needs_reference:
                batch.write("ref_logprobs", self._reference_logprobs(batch))
            if self.critic:
                batch.write("values", self.critic(batch))

    def _reference_logprobs(self, batch: MicroBatch) -> torch.Tensor:
        if self.reference is not None:
            return self.reference(batch, self.cfg.temperature)[0]
        with self.policy.without_lora():
            return self.policy(batch, self.cfg.temperature)[0]

    # ------------------------------------------------------------------------------------------------ 4. advantages
    def advantages(self, rows: list[Trajectory], baselines: dict[int, float] | None = None) -> dict[str, float]:
        """Step 4: writes `advantages` (and the critic's `returns`) into the rows; returns what to log.

        `baselines`, for ReMax, are the greedy scores by group. A whole group is on one rank; statistics over the batch
        are over all ranks.
        """
        cfg, log = self.cfg, {}
        mask = _padded([t.response_mask for t in rows]).bool()
        rewards = _padded([t.rewards for t in rows])
        if cfg.kl_reward_coef:
            old, ref = _padded([t.old_logprobs for t in rows]), _padded([t.ref_logprobs for t in rows])
            count = max(1.0, dist.total(float(mask.sum())))
            log["kl"] = dist.total(float(kl_estimate(old, ref, mask, cfg.kl_estimator)[mask].sum())) / count
            log["kl_reward_coef"] = self.kl.coef
            rewards = kl_penalized_rewards(rewards, old, ref, mask, self.kl.coef, cfg.kl_estimator)
            if cfg.kl_target:
                self.kl.update(log["kl"])
        scores, groups = rewards.sum(1), torch.tensor([t.group_id for t in rows], dtype=torch.long)
        if cfg.advantage == "gae":
            values = _padded([t.values for t in rows])
            a, returns = gae_advantages(rewards, values, mask, gamma=cfg.gamma, lam=cfg.lam, total=dist.total)
            for t, row in zip(rows, returns.tolist(), strict=True):
                t.returns = row[: len(t.tokens)]
            log |= _explained(values[mask], returns[mask])
        elif cfg.advantage == "reinforce_pp":
            a = reinforce_pp_advantages(rewards, mask, gamma=cfg.gamma, total=dist.total)
        elif cfg.advantage == "reinforce_pp_baseline":
            a = reinforce_pp_baseline_advantages(scores, groups, mask, total=dist.total)
        else:
            if cfg.advantage == "remax":
                a = remax_advantages(scores, scores.new_tensor([baselines[t.group_id] for t in rows]))
            elif cfg.advantage == "rloo":
                a = rloo_advantages(scores, groups)
            else:
                a = grpo_advantages(scores, groups, norm_by_std=cfg.norm_by_std)
            a = a[:, None] * mask
        for t, row in zip(rows, a.tolist(), strict=True):
            t.advantages = row[: len(t.tokens)]
        return log

    # ------------------------------------------------------------------------------------------------ 5. pack
    def minibatches(self, rows: list[Trajectory], spare: Trajectory, step: int) -> list[tuple[list[MicroBatch], int]]:
        """Step 5: (micro-batches, response tokens over all ranks) of each of the step's mini-batches."""
        cfg, out = self.cfg, []
        rows = list(rows)
        if cfg.num_minibatches > 1:
            random.Random(f"{cfg.seed} {step} {dist.RANK}").shuffle(rows)
        # A trajectory whose advantage is 0 everywhere has no gradient, unless another term of the loss gives it one.
        everyone = bool(cfg.kl_coef or cfg.entropy_coef or self.critic)
        for k in range(cfg.num_minibatches):
            part = rows[k :: cfg.num_minibatches]
            sampled = torch.tensor([t.num_sampled for t in part], dtype=torch.long)
            num_tokens, num_seqs = (int(dist.total(float(n))) for n in (sampled.sum(), len(part)))
            if num_tokens == 0:
                continue
            weights = loss_weights(
                sampled,
                cfg.aggregation,
                num_tokens=num_tokens,
                num_seqs=num_seqs,
                max_response_len=cfg.max_response_len,
            )
            for t, weight in zip(part, weights.tolist(), strict=True):
                t.weights = [weight * m for m in t.response_mask]
            live = [t for t in part if everyone or any(t.advantages)]
            out.append((self._microbatches(live, spare, balance=True), num_tokens))
        return out

    def _microbatches(self, rows: list[Trajectory], spare: Trajectory, *, balance: bool) -> list[MicroBatch]:
        """This rank's micro-batches, as many as on every other rank; `balance` moves rows between ranks, so that they
        are about as full. `spare`, without a response token, stands in where a rank has nothing to do. They have no pixels
        until they are due.
        """
        lengths, most = [len(t.tokens) for t in rows], self.cfg.microbatch_tokens
        if balance:
            everywhere = dist.gather(lengths)
            plan = plan_microbatches([n for own in everywhere for n in own], dist.WORLD_SIZE, most)
            own = dict(enumerate(rows, start=sum(map(len, everywhere[: dist.RANK]))))  # number among all ranks' rows
            outgoing = [[(i, _leaving(own[i])) for chunk in chunks for i in chunk if i in own] for chunks in plan]
            mine, chunks = dict(dist.exchange(outgoing)), plan[dist.RANK]
        else:
            mine, chunks = dict(enumerate(rows)), plan_microbatches(lengths, 1, most)[0]
            chunks += [[]] * (int(dist.largest(len(chunks))) - len(chunks))
        packed = [[mine[i] for i in chunk] or [spare] for chunk in chunks]
        batches = [pack_rows(rows, self.codec, pixels=False) for rows in packed]
        if dist.largest(any(b.views for b in batches)):
            for b in batches:
                add_blank_image(b, self.codec)
        return batches

    def _ready(self, batches: list[MicroBatch]) -> Iterator[MicroBatch]:
        """Each micro-batch with its pixels, on the device, when it is due."""
        return (batch.to(self.accelerator.device) for batch in load_pixels(batches, self.codec))

    # ------------------------------------------------------------------------------------------------ 6. update
    def update(self, minibatches: list[tuple[list[MicroBatch], int]], step: int) -> dict[str, float]:
        """Step 6: `num_epochs` passes over the mini-batches, one optimizer update each; returns what to log."""
        cfg, sums, tops, by_images, log = self.cfg, {}, {}, {}, {}
        warm = min(1.0, (step + 1) / max(1, cfg.warmup_steps))
        tokens = cfg.num_epochs * max(1, sum(n for _, n in minibatches))
        for epoch in range(cfg.num_epochs):
            for k, (batches, num_tokens) in enumerate(minibatches):
                name = f"step{step + 1}_update{epoch * len(minibatches) + k}"
                if self.critic:
                    for batch in self._ready(batches):
                        self._backward_critic(batch, num_tokens, sums)
                    log["critic/grad_norm"] = self._optimize(
                        self.critic, self.critic_optimizer, cfg.critic_lr * warm, batches, f"critic_{name}"
                    )
                if not self.critic or step >= cfg.critic_warmup_steps:
                    for batch in self._ready(batches):
                        self._backward_policy(batch, sums, tops, by_images)
                    log["grad_norm"] = self._optimize(self.policy, self.optimizer, cfg.lr * warm, batches, name)
        everyones = dist.gather((sums, tops))
        for name in sums:  # the loss has been divided already, once per update
            log[name] = sum(s[name] for s, _ in everyones) / (self.num_updates if name == "loss" else tokens)
        for name in {name for _, t in everyones for name in t}:
            log[name] = max(t[name] for _, t in everyones if name in t)
        return log | dist.merge_means(by_images) | {"lr": cfg.lr * warm, "skipped_updates": self.skipped_updates}

    def _backward_policy(self, batch: MicroBatch, sums: dict, tops: dict, by_images: dict) -> None:
        cfg, mask = self.cfg, batch.response_mask
        seqs = {"seq_ids": batch.seq_ids, "num_seqs": len(batch.rows)}
        logprobs, entropy = self.policy(batch, cfg.temperature)
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        clip = {"clip_low": cfg.clip_low, "clip_high": cfg.clip_high, "clip_dual": cfg.clip_dual}
        loss, metrics = POLICY_LOSSES[cfg.policy_loss](logprobs, old, batch.advantages, mask, **clip, **seqs)
        # Sampled by the engine, judged by the trainer: where the two differ, the token's weight says by how much. With
        # old_logprobs = "rollout" the ratio itself is against the engine, and there is nothing left to correct.
        kind = cfg.mismatch if cfg.old_logprobs == "trainer" else "none"
        weights, mismatch = mismatch_weights(old, batch.rollout_logprobs, mask, kind=kind, cap=cfg.mismatch_cap, **seqs)
        loss = loss * weights
        if cfg.kl_coef:
            kl = kl_estimate(logprobs, batch.ref_logprobs, mask, cfg.kl_estimator)
            loss = loss + cfg.kl_coef * kl
            metrics["kl"] = kl.detach().sum()
        if cfg.entropy_coef:
            loss = loss - cfg.entropy_coef * entropy
        loss = (loss * batch.weights).sum()  # the weights are 0 off the mask
        # FSDP averages gradients over ranks; the loss is a sum over ranks.
        self.accelerator.backward(loss * dist.WORLD_SIZE)
        gap = torch.where(mask, old - batch.rollout_logprobs, 0.0).abs()
        kl_to_engine = kl_estimate(batch.rollout_logprobs, old, mask, "k3").detach()
        metrics |= mismatch | {"loss": loss.detach(), "entropy": entropy.detach().sum(), "mismatch/mean": gap.sum()}
        largest = {"mismatch/max": gap.max(), "mismatch_ratio_max": metrics.pop("mismatch_ratio_max")}
        split = (x[0].split(batch.lengths) for x in (gap, kl_to_engine, mask))
        for row, row_gap, row_kl, row_mask in zip(batch.rows, *split, strict=True):
            images = f"{len(row.views)}_images"
            largest[f"mismatch/max_{images}"] = max(largest.get(f"mismatch/max_{images}", 0.0), row_gap.max())
            for name, value in {"mismatch/mean": row_gap.sum(), "mismatch_kl": row_kl.sum()}.items():
                s, n = by_images.get(f"{name}_{images}", (0.0, 0.0))
                by_images[f"{name}_{images}"] = (s + float(value), n + float(row_mask.sum()))
        for name, value in largest.items():
            tops[name] = max(tops.get(name, 0.0), float(value))
        _add(sums, metrics)

    def _backward_critic(self, batch: MicroBatch, num_tokens: int, sums: dict) -> None:
        values = self.critic(batch)
        loss, metrics = value_loss(values, batch.values, batch.returns, batch.response_mask, clip=self.cfg.value_clip)
        loss = loss.sum()
        self.accelerator.backward(loss * dist.WORLD_SIZE / num_tokens)
        _add(sums, {"critic/loss": loss.detach(), "critic/clip_frac": metrics["value_clip_frac"]})

    def _optimize(self, module, optimizer, lr: float, batches: list[MicroBatch], name: str) -> float:
        """Clips and applies the gradient; returns its norm. One that is not finite is skipped, counted, and its batch saved."""
        for group in optimizer.param_groups:
            group["lr"] = lr
        norm = clip_grad_norm(module, self.cfg.max_grad_norm)
        if norm < float("inf"):  # NaN is not
            optimizer.step()
        else:
            self.skipped_updates += 1
            path = os.path.join(self.cfg.out_dir, f"nonfinite_{name}_rank{dist.RANK}.pt")
            os.makedirs(self.cfg.out_dir, exist_ok=True)
            # With the images, not their pixels: those of a mini-batch may be more than there is memory.
            kept = (torch.Tensor, list)
            torch.save(
                [{k: v for k, v in vars(b).items() if isinstance(v, kept) and k != "rows"} for b in batches], path
            )
            print(f"the gradient norm is {norm}: no update; its micro-batches are in {path}", flush=True)
        optimizer.zero_grad(set_to_none=True)
        return norm

    # ------------------------------------------------------------------------------------------------ 7. after a push
    @torch.no_grad()
    def probe(self, engine, prompt) -> float:
        """Largest |logprob(trainer) - logprob(engine)| on a few tokens after one fixed prompt, over all ranks.

        Raises ParityError where that is no rounding any more: 1e-3 in float32 on both sides, 0.1 otherwise. Training on
        would be training on another policy's samples.
        """
        t, sampled = Trajectory.start(prompt, 0), None
        if engine.leads:
            turn = engine.generate(t.engine_ids, t.views, max_tokens=4, temperature=self.cfg.temperature, seed=0)
            g = engine.run(turn)
            sampled = g.ids, g.logprobs, g.version
        t.append_sampled(*dist.gather(sampled)[dist.first_of(self.cfg.rollout_tp)])
        batch = pack_rows([t], self.codec).to(self.accelerator.device)
        logprobs, _ = self.policy(batch, self.cfg.temperature)
        error = dist.largest(float((logprobs - batch.rollout_logprobs)[batch.response_mask].abs().max()))
        most = 1e-3 if self.cfg.dtype == self.cfg.engine_dtype == "float32" else 0.1
        if not error <= most:
            raise ParityError(
                f"engine and trainer differ by {error:.1e} on a fixed prompt, more than {most:g}. Likely: a weight that did"
                " not arrive or is held twice, caches of old weights, other image sizes, positions, temperature or banned"
                " tokens on one side, or an attention kernel that ignores the packing"
            )
        return error


def _leaving(t: Trajectory) -> Trajectory:
    """A trajectory for another rank: what it learns from; the sample's encoded images stay."""
    t = copy.copy(t)
    t.sample = None
    return t


def filler(prompt) -> Trajectory:
    """A trajectory that is all prompt: it takes part in forward and backward, and in no sum."""
    t = Trajectory.start(prompt, -1)
    for name in TOKEN_FIELDS:
        setattr(t, name, [0.0] * len(t.tokens))
    return t


def _padded(lists: list[list]) -> torch.Tensor:
    """Rows of numbers -> (N, L) float64, padded with 0 on the right."""
    if not lists:
        return torch.zeros(0, 1, dtype=torch.float64)
    rows = [torch.tensor(values, dtype=torch.float64) for values in lists]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _add(sums: dict, values: dict) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + float(value)


def _explained(values: torch.Tensor, returns: torch.Tensor) -> dict[str, float]:
    """Means of values and returns, and 1 - E[(R - V)^2] / Var[R] over the sampled tokens of all ranks."""
    parts = (torch.ones_like(values), values, returns, returns**2, (returns - values) ** 2)
    n, v, r, rr, error = (dist.total(float(x.sum())) for x in parts)
    variance = rr / n - (r / n) ** 2
    explained = 1 - error / n / variance if variance > 0 else 0.0
    return {"critic/value": v / n, "critic/return": r / n, "critic/explained": explained}
