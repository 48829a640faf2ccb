"""Log-probabilities, advantages, policy, value and KL losses: pure functions, tensors in and tensors out.

Everything per token is aligned with the tokens: entry t speaks about token t. The shift by one (the hidden state at
t - 1 predicts token t) happens in `_predicting_states` and nowhere else. `mask` (bool) is True on sampled tokens; what
stands elsewhere, NaN included, reaches no result and no gradient.

Losses are per token and know no layout: tensors of any one shape, rows padded or packed. What speaks of whole
trajectories takes `seq_ids`, each token's trajectory as a number below `num_seqs`. The loss of an optimizer step is
sum(loss * weight of the trajectory), over all tokens, micro-batches and ranks, with the weights of `loss_weights`.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BANNED = -1e30  # logit of a banned id: its probability is exactly 0, and 0 x BANNED is 0 where 0 x -inf is not


# ---------------------------------------------------------------------------------------------------- log-probabilities
class _TokenLogprobs(torch.autograd.Function):
    """(logprobs, entropy) of `targets` (N,) under softmax(states @ head.T / temperature), a block of ids at a time.

    Only the log of each token's normaliser and its entropy outlive the forward; backward makes the logits anew. Blocks
    are of ids rather than of tokens, so that each row of the head's gradient is one matrix product over all tokens:
    it is accumulated in float32 inside that product, and written once.
    """

    @staticmethod
    def forward(ctx, states, head, targets, temperature, banned, chunk):
        log_z = states.new_full(targets.shape, -float("inf"), dtype=_softmax_dtype(states))
        mean_logit, picked = torch.zeros_like(log_z), torch.zeros_like(log_z)
        for _, logits, weights, inside, at in _logit_blocks(states, head, targets, temperature, banned, chunk):
            picked.add_(torch.where(inside, logits.gather(1, at)[:, 0], 0.0))
            top = logits.amax(1)
            torch.exp(logits.sub_(top[:, None]), out=weights)
            mass = weights.sum(1)
            own_log_z, own_mean = top + mass.log(), top + weights.mul_(logits).sum(1) / mass
            share = (own_log_z - log_z).sigmoid_()  # of this block in the mass so far
            mean_logit.lerp_(own_mean, share)
            torch.logaddexp(log_z, own_log_z, out=log_z)
        entropy = log_z - mean_logit  # log Z - E[logit]
        ctx.save_for_backward(states, head, targets, banned, log_z, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)  # no entropy bonus: no work for it
        return picked - log_z, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):
        # With p the softmax, z the scaled logits: d logprob / dz_v = 1[v = target] - p_v, d entropy / dz_v = -p_v
        # (log p_v + entropy).
        states, head, targets, banned, log_z, entropy = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_z)
        grad_states = torch.zeros_like(states, dtype=log_z.dtype)
        grad_head = torch.empty_like(head) if ctx.needs_input_grad[1] else None  # a frozen head asks for none
        for start, logits, p, inside, at in _logit_blocks(states, head, targets, ctx.temperature, banned, ctx.chunk):
            logp = logits.sub_(log_z[:, None])
            if grad_entropy is None:
                grad = logp.exp_().mul_(-grad_logprobs[:, None])
            else:
                torch.exp(logp, out=p)
                grad = logp.add_(entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_logprobs[:, None]).mul_(p)
            grad.scatter_add_(1, at, torch.where(inside, grad_logprobs, 0.0)[:, None])
            if ctx.temperature != 1:
                grad.div_(ctx.temperature)
            grad, block = grad.to(head.dtype), slice(start, start + grad.shape[1])
            grad_states += grad @ head[block]
            if grad_head is not None:
                torch.mm(grad.T, states, out=grad_head[block])
        return grad_states.to(states.dtype), grad_head, None, None, None, None


def _softmax_dtype(states):
    return torch.promote_types(states.dtype, torch.float32)


def _logit_blocks(states, head, targets, temperature, banned, chunk):
    """Yields (first id, logits (N, ids), as much room to work in, whether the target is among these ids, its column).

    The memory is the same for all blocks: allocating anew costs time, and fragments.
    """
    N, V = len(targets), len(head)
    width = min(V, max(1, chunk // max(1, N)))
    logits, room = (states.new_empty(N * width, dtype=_softmax_dtype(states)) for _ in range(2))
    product = logits if logits.dtype == states.dtype else states.new_empty(N * width)
    if banned is not None:  # sorted, and cut at the blocks' bounds
        banned = banned.sort().values
        cuts = torch.searchsorted(banned, torch.arange(0, V + width, width, device=banned.device)).tolist()
    for i, start in enumerate(range(0, V, width)):
        n = min(width, V - start)
        z, raw = (x[: N * n].view(N, n) for x in (logits, product))
        torch.mm(states, head[start : start + n].T, out=raw)
        if product is not logits:
            z.copy_(raw)
        if temperature != 1:
            z.div_(temperature)
        if banned is not None:
            z.index_fill_(1, banned[cuts[i] : cuts[i + 1]] - start, BANNED)
        at = targets - start
        yield start, z, room[: N * n].view(N, n), (at >= 0) & (at < n), at.clamp(0, n - 1)[:, None]


def token_logprobs(
    hidden: Tensor,
    tokens: Tensor,
    mask: Tensor,
    head: Tensor,
    *,
    temperature: float = 1.0,
    banned: Tensor | None = None,
    chunk: int = 1 << 24,
) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy) of the sampled tokens, each `(B, L)`, float32, 0 where `mask` is 0; both carry gradients.

    `hidden` (B, L, H) are the last hidden states, `tokens` (B, L), `mask` (B, L) bool with `mask[:, 0]` False, `head`
    (V, H) the output embedding. In a packed row the first token of each segment is masked too, so that no state
    predicts across segments. Logits exist for masked positions only, `chunk` of them at a time, and never all at once.
    Temperature and banned ids are applied as the engine applied them in sampling, so that both sides speak of the same
    distribution.
    """
    states, row, col = _predicting_states(hidden, mask)
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # autocast does not look into an autograd function
        states, head = (x.to(torch.get_autocast_dtype(device)) for x in (states, head))
    with torch.autocast(device, enabled=False):
        picked, entropies = _TokenLogprobs.apply(states, head, tokens[row, col], temperature, banned, chunk)
    zeros = picked.new_zeros(mask.shape)
    return zeros.index_put((row, col), picked), zeros.index_put((row, col), entropies)


def _predicting_states(hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(states (N, H), rows, columns) for the N sampled tokens: the state at t - 1 predicts token t, and its value."""
    if mask[:, 0].any():
        raise ValueError("the first token of a sequence cannot be a response token: nothing predicts it")
    row, col = mask.nonzero(as_tuple=True)
    return hidden[row, col - 1], row, col


def token_values(hidden: Tensor, mask: Tensor, head: Callable) -> Tensor:
    """The critic's value of each sampled token, `(B, L)` float32, 0 where `mask` is 0: what it expects of the rewards
    from this token on, said before it was sampled. `head` maps (N, H) to (N, 1).
    """
    states, row, col = _predicting_states(hidden, mask)
    values = head(states)[:, 0].float()
    return values.new_zeros(mask.shape).index_put((row, col), values)


# ---------------------------------------------------------------------------------------------------- advantages
# Of the N trajectories of one rank. Where a whole trajectory shares its advantage: (N,), to be spread over its sampled
# tokens; where tokens differ: (N, L), right-padded, 0 off the mask. A trajectory without a reward (score NaN, or a
# NaN among its token rewards) gets 0 and is left out of every statistic. `total` sums a number over all ranks; every
# rank calls it equally often, with trajectories or without.
Total = Callable[[float], float]


def _per_group(scores: Tensor, group_ids: Tensor, rule: Callable) -> Tensor:
    """`rule` on the scores of each group, (N,), with what all group baselines share.

    A group of one has nobody to compare with and keeps its raw score (DeepEyes' and VeRL's rule). A larger group with
    one reward left has lost its baseline: 0. Equal scores give exactly 0, by comparing them and not a rounded std.
    """
    advantages = torch.zeros_like(scores)
    for g in group_ids.unique():
        group = group_ids == g
        members = (group & ~scores.isnan()).nonzero()[:, 0]
        r = scores[members]
        if group.sum() == 1:
            advantages[members] = r
        elif len(r) > 1 and (r != r[0]).any():
            advantages[members] = rule(r)
    return advantages


def grpo_advantages(scores: Tensor, group_ids: Tensor, *, norm_by_std: bool = True) -> Tensor:
    """(score - group mean) / (group std + 1e-6), `(N,)` (GRPO, arXiv:2402.03300, 4.1.2).

    The standard deviation has ddof 1, as in VeRL and DeepEyes. `norm_by_std=False` leaves the division out (Dr. GRPO,
    arXiv:2503.20783).

    >>> grpo_advantages(torch.tensor([2., 0., 1., 5., 5.]), torch.tensor([0, 0, 0, 1, 1])).round(decimals=4).tolist()
    [1.0, -1.0, 0.0, 0.0, 0.0]
    """
    return _per_group(
        scores, group_ids, lambda r: (r - r.mean()) / (r.std(correction=1) + 1e-6 if norm_by_std else 1.0)
    )


def rloo_advantages(scores: Tensor, group_ids: Tensor) -> Tensor:
    """Score minus the mean score of the group's others, `(N,)` (RLOO, arXiv:2402.14740).

    >>> rloo_advantages(torch.tensor([3., 0., 0.]), torch.tensor([0, 0, 0])).tolist()
    [3.0, -1.5, -1.5]
    """
    return _per_group(scores, group_ids, lambda r: r - (r.sum() - r) / (len(r) - 1))


def remax_advantages(scores: Tensor, baselines: Tensor) -> Tensor:
    """Score minus that of the greedy trajectory of the same prompt, `(N,)` (ReMax, arXiv:2310.10505)."""
    return (scores - baselines).nan_to_num(0.0)


def gae_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float, total: Total = float
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), each `(N, L)` (GAE, arXiv:1506.02438, eq. 16), over sampled tokens as if alone:

    delta_t = r_t + gamma V(next sampled token) - V_t,  A_t = delta_t + gamma lam A(next sampled token), so that across
    an observation gamma and lambda count as 1. Advantages are whitened over all ranks; returns, A + V before that, are
    not. A trajectory without a reward has its values as returns: it asks nothing of the critic.
    """
    sampled, known = _sampled_rewards(rewards, mask)
    values = torch.where(mask, values, 0.0)
    advantages = _backward_sums(sampled, values, known, gamma, lam)
    returns = advantages + values
    return whiten(advantages, known, total=total), returns


def reinforce_pp_advantages(rewards: Tensor, mask: Tensor, *, gamma: float, total: Total = float) -> Tensor:
    """Discounted sum of the rewards to come, whitened over all ranks, `(N, L)` (REINFORCE++, arXiv:2501.03262).

    As in GAE only sampled tokens count as steps: a return passes an observation undiscounted.
    """
    sampled, known = _sampled_rewards(rewards, mask)
    return whiten(_backward_sums(sampled, torch.zeros_like(sampled), known, gamma, 1.0), known, total=total)


def reinforce_pp_baseline_advantages(
    scores: Tensor, group_ids: Tensor, mask: Tensor, *, total: Total = float
) -> Tensor:
    """Score minus group mean, then whitened over the sampled tokens of all ranks, `(N, L)` (arXiv:2501.03262).

    Whitening shifts by the batch's mean: a group of equal scores ends near 0, not at it.
    """
    centred = _per_group(scores, group_ids, lambda r: r - r.mean())
    return whiten(centred[:, None].expand(mask.shape), mask & ~scores.isnan()[:, None], total=total)


def _sampled_rewards(rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards of sampled tokens, 0 elsewhere, and the mask without the trajectories that have no reward."""
    known = mask & ~torch.where(mask, rewards, 0.0).sum(1, keepdim=True).isnan()
    return torch.where(known, rewards, 0.0), known


def _backward_sums(rewards, values, mask, gamma: float, lam: float) -> Tensor:
    """GAE's recursion from the last token to the first; a token off the mask hands on what it was given."""
    sums, ahead, next_value = torch.zeros_like(rewards), rewards.new_zeros(len(rewards)), values.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        ahead = torch.where(mask[:, t], delta + gamma * lam * ahead, ahead)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        sums[:, t] = torch.where(mask[:, t], ahead, 0.0)
    return sums


def whiten(x: Tensor, mask: Tensor, *, total: Total = float) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over the masked tokens of all ranks, 0 elsewhere; ddof 1 as in VeRL.

    >>> whiten(torch.tensor([1., 3., 9.], dtype=torch.float64), torch.tensor([True, True, False])).round(decimals=4).tolist()
    [-0.7071, 0.7071, 0.0]
    """
    inside = x[mask].double()
    count = total(float(len(inside)))
    mean = total(float(inside.sum())) / max(count, 1.0)
    variance = total(float(((inside - mean) ** 2).sum())) / max(count - 1.0, 1.0)
    return torch.where(mask, ((x - mean) / (variance + 1e-8) ** 0.5), 0.0)


# ---------------------------------------------------------------------------------------------------- KL
def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from the policy's own samples (J. Schulman, "Approximating KL
    divergence", joschu.net/blog/kl-approx.html). With r = reference / policy probability of the sampled token:

    k1 = -log r      unbiased, of both signs; as a loss its gradient is 0 in the mean: use it in rewards
    k2 = log(r)^2/2  biased; its gradient is, on policy, that of the true KL. Also known as "mse"
    k3 = r-1-log r   unbiased, never negative. At most 10, as in VeRL and DeepEyes; beyond that it has no gradient
    abs = |log r|
    """
    log_r = torch.where(mask, ref_logprobs - logprobs, 0.0)
    if kind == "k1":
        return -log_r
    if kind == "abs":
        return log_r.abs()
    if kind in ("k2", "mse"):
        return 0.5 * log_r**2
    if kind == "k3":
        log_r = log_r.clamp(-20.0, 20.0)  # exp stays finite
        return (log_r.exp() - 1 - log_r).clamp(max=10.0)
    raise ValueError(f"kl estimate {kind!r} is none of k1, k2, k3, abs, mse")


def kl_penalized_rewards(
    rewards: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, coef: float, kind: str
) -> Tensor:
    """Rewards minus coef x KL estimate on each sampled token (arXiv:1909.08593, 2.2), 0 off the mask."""
    return torch.where(mask, rewards - coef * kl_estimate(logprobs, ref_logprobs, mask, kind), 0.0).detach()


class AdaptiveKL:
    """A KL coefficient that holds the KL near a target (arXiv:1909.08593, 2.2):
    error = clip((KL - target) / target, -0.2, 0.2),  coef <- coef (1 + rate error), once a step, rate 0.1 there.

    >>> kl = AdaptiveKL(coef=0.5, target=2.0)
    >>> kl.update(2.2); kl.coef
    0.505
    """

    def __init__(self, coef: float, target: float, rate: float = 0.1):
        self.coef, self.target, self.rate = coef, target, rate

    def update(self, kl: float) -> None:
        """`kl` is the step's mean over the batch, in the unit of `target`."""
        self.coef *= 1 + self.rate * max(-0.2, min(0.2, kl / self.target - 1))

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]


# ---------------------------------------------------------------------------------------------------- policy losses
# One signature, (loss per token, sums for the log): a variant is a function here and a line in POLICY_LOSSES. The sums
# are over sampled tokens, to be divided by the global count of them.
def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float = 0.0,
    seq_ids: Tensor | None = None,
    num_seqs: int = 0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv:1707.06347, eq. 7; separate bounds: DAPO,
    arXiv:2503.14476, eq. 10). With `clip_dual` = c > 1 the loss of a negative advantage is at most -c A (dual clip,
    arXiv:1912.09729, eq. 5); 0 = off. It needs no `seq_ids`.
    """
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    loss, metrics = _clip(log_ratio, advantages, mask, clip_low, clip_high, clip_dual)
    return loss, metrics | {"approx_kl": kl_estimate(old_logprobs, logprobs, mask, "k3").sum().detach()}


def gspo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float = 0.0,
    seq_ids: Tensor | None = None,
    num_seqs: int = 0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's loss with the ratio of the whole trajectory, s = exp(mean over its sampled tokens of log ratio) (GSPO,
    arXiv:2507.18071), in the form of its GSPO-token, sg(s) pi / sg(pi), where sg stops the gradient: the value is s,
    the gradient flows by tokens. Made for "seq-mean-token-mean"; the paper's bounds are 3e-4 and 4e-4, and it has no dual clip.
    """
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    count = _trajectory_sum(torch.ones_like(log_ratio), mask, seq_ids, num_seqs)
    mean = _trajectory_sum(log_ratio.detach(), mask, seq_ids, num_seqs) / count.clamp(min=1.0)
    own = torch.where(mask, logprobs - logprobs.detach(), 0.0)  # 0, with a gradient of 1
    loss, metrics = _clip(mean + own, advantages, mask, clip_low, clip_high, clip_dual)
    return loss, metrics | {"approx_kl": kl_estimate(old_logprobs, logprobs, mask, "k3").sum().detach()}


def cispo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float = 0.0,
    seq_ids: Tensor | None = None,
    num_seqs: int = 0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(clip(ratio, 1 - clip_low, 1 + clip_high)) A logprob (CISPO, MiniMax-M1, arXiv:2506.13585): a
    clipped token keeps its gradient. The paper tunes the upper bound alone: `clip_low` >= 1 is no lower bound. It
    needs neither `clip_dual` nor `seq_ids`.
    """
    ratio = torch.where(mask, logprobs - old_logprobs, 0.0).exp().detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -weight * torch.where(mask, advantages, 0.0) * torch.where(mask, logprobs, 0.0)
    metrics = {
        "clip_frac": ((weight != ratio) & mask).sum(),
        "approx_kl": kl_estimate(old_logprobs, logprobs, mask, "k3").sum().detach(),
    }
    return loss, metrics


POLICY_LOSSES = {"clip": clipped_policy_loss, "gspo": gspo_policy_loss, "cispo": cispo_policy_loss}


def _clip(log_ratio, advantages, mask, clip_low: float, clip_high: float, clip_dual: float):
    ratio = log_ratio.clamp(-20.0, 20.0).exp()  # exp stays finite: inf x 0 would be NaN
    advantages = torch.where(mask, advantages, 0.0)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    metrics = {"clip_frac": (clipped > plain).sum()}
    if clip_dual:
        bound = -advantages * clip_dual
        use = (advantages < 0) & (bound < loss)
        metrics["clip_dual_frac"] = use.sum()
        loss = torch.where(use, bound, loss)
    return loss, metrics


def _trajectory_sum(x, mask, seq_ids, num_seqs: int) -> Tensor:
    """Sum of `x` over the sampled tokens of each trajectory, given to each of them; 0 off the mask."""
    ids = torch.where(mask, seq_ids, 0).flatten()
    sums = x.new_zeros(num_seqs).index_add(0, ids, torch.where(mask, x, 0.0).flatten())
    return torch.where(mask, sums[ids].view(mask.shape), 0.0)


def loss_weights(num_sampled: Tensor, how: str, *, num_tokens: int, num_seqs: int, max_response_len: int) -> Tensor:
    """The factor of each token's loss, `(N,)` float64, one per trajectory with `num_sampled` (N,) sampled tokens.

    `num_tokens` and `num_seqs` count the whole optimizer step: all micro-batches of all ranks. With n the trajectory's
    own number of sampled tokens, the step's loss is the

    token                1 / num_tokens                      mean over all tokens (DAPO, arXiv:2503.14476)
    seq-mean-token-mean  1 / (num_seqs n)                    mean over trajectories of their means (GRPO, GSPO)
    seq-mean-token-sum   1 / num_seqs                        mean over trajectories of their sums
    dr-grpo              1 / (num_seqs max_response_len)     the same over a constant length (arXiv:2503.20783)
    """
    n = num_sampled.double()
    if how == "token":
        return torch.full_like(n, 1 / num_tokens)
    if how == "seq-mean-token-mean":
        return 1 / (num_seqs * n.clamp(min=1.0))  # without a token there is nothing to weigh
    if how == "seq-mean-token-sum":
        return torch.full_like(n, 1 / num_seqs)
    if how == "dr-grpo":
        return torch.full_like(n, 1 / (num_seqs * max_response_len))
    raise ValueError(f"aggregation {how!r} is none of token, seq-mean-token-mean, seq-mean-token-sum, dr-grpo")


# ---------------------------------------------------------------------------------------------------- value loss
def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss per token, sums for the log): max((V - R)^2, (clip(V, old - clip, old + clip) - R)^2) / 2 (the clipped
    value loss of OpenAI's baselines, ppo2, as in VeRL)."""
    values, old_values, returns = (torch.where(mask, x, 0.0) for x in (values, old_values, returns))
    plain = (values - returns) ** 2
    clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns) ** 2
    return 0.5 * torch.maximum(plain, clipped), {"value_clip_frac": (clipped > plain).sum()}


# ---------------------------------------------------------------------------------------------------- engine and trainer
def mismatch_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    kind: str,
    cap: float,
    seq_ids: Tensor | None = None,
    num_seqs: int = 0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(factor of each token's loss, 0 off the mask and without gradient, what to log) for tokens that the engine's
    probabilities sampled and the trainer's judge. With ratio = trainer / engine:

    token     min(ratio, cap): truncated importance sampling (F. Yao et al. 2025, fengyao.notion.site/off-policy-rl)
    mask      ratio, but 0 outside [1 / cap, cap]: IcePop (arXiv:2510.18855) with alpha = 1 / beta
    sequence  min(product of the trajectory's ratios, cap), for all its tokens; needs `seq_ids`
    none      1

    Logged: sums over sampled tokens of the ratio that was bounded, of tokens beyond the bound, and of k3 for
    KL(engine || trainer); "mismatch_ratio_max" is a maximum.
    """
    log_ratio = torch.where(mask, old_logprobs - rollout_logprobs, 0.0).detach()
    if kind == "sequence":
        log_ratio = _trajectory_sum(log_ratio, mask, seq_ids, num_seqs)
    ratio = log_ratio.clamp(-20.0, 20.0).exp()
    beyond = ratio > cap
    if kind in ("token", "sequence"):
        weights = ratio.clamp(max=cap)
    elif kind == "mask":
        beyond = beyond | (ratio < 1 / cap)
        weights = torch.where(beyond, 0.0, ratio)
    elif kind == "none":
        beyond, weights = torch.zeros_like(mask), torch.ones_like(ratio)
    else:
        raise ValueError(f"mismatch correction {kind!r} is none of token, mask, sequence, none")
    metrics = {
        "mismatch_ratio": torch.where(mask, ratio, 0.0).sum(),
        "mismatch_ratio_max": torch.where(mask, ratio, 0.0).max(),
        "mismatch_cap_frac": (beyond & mask).sum(),
        "mismatch_kl": kl_estimate(rollout_logprobs, old_logprobs, mask, "k3").sum().detach(),
    }
    return torch.where(mask, weights, 0.0), metrics
