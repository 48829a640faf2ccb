"""Log-probabilities, advantages and policy losses: pure functions, tensors in and tensors out.

Everything per token is aligned with the tokens: entry t speaks about token t. The shift by one (the hidden state at
t - 1 predicts token t) happens in `token_logprobs` and nowhere else. Losses are sums over response tokens; they are
divided once, by the global count of response tokens of the optimizer step.
"""

import torch


# ---------------------------------------------------------------------------------------------------- log-probabilities
def token_logprobs(
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    head: torch.Tensor,
    *,
    temperature: float = 1.0,
    banned: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs, entropy) of the sampled tokens, each `(B, L)`, 0 where `mask` is 0; entropy carries no gradient.

    `hidden` (B, L, H) are the last hidden states, `tokens` (B, L), `mask` (B, L) bool with `mask[:, 0]` False, `head`
    (V, H) the output embedding. Logits exist for masked positions only. Temperature and banned ids are applied as the
    engine applied them in sampling, so that both sides speak of the same distribution.
    """
    if mask[:, 0].any():
        raise ValueError("the first token of a sequence cannot be a response token: nothing predicts it")
    row, col = mask.nonzero(as_tuple=True)
    logits = (hidden[row, col - 1] @ head.T).float() / temperature  # (N, V); position t - 1 predicts token t
    if banned is not None:
        logits = logits.index_fill(-1, banned, float("-inf"))
    chosen = torch.log_softmax(logits, -1)
    picked = chosen.gather(-1, tokens[row, col][:, None])[:, 0]
    with torch.no_grad():
        entropies = torch.special.entr(chosen.exp()).sum(-1)  # -p log p, 0 at p = 0
    logprobs = torch.zeros(mask.shape, device=hidden.device).index_put((row, col), picked)
    entropy = torch.zeros(mask.shape, device=hidden.device).index_put((row, col), entropies)
    return logprobs, entropy


# ---------------------------------------------------------------------------------------------------- advantages
def grpo_advantages(rewards: torch.Tensor, group_ids: torch.Tensor, *, norm_by_std: bool = True) -> torch.Tensor:
    """One advantage per trajectory, `(N,)`: (reward - group mean) / (group std + 1e-6) (GRPO, arXiv:2402.03300, 4.1.2).

    The standard deviation has ddof 1, as in VeRL and DeepEyes. `norm_by_std=False` leaves the division out (Dr. GRPO,
    arXiv:2503.20783). A group whose rewards are all equal gives exactly 0, by comparing rewards and not a rounded std;
    a group of one keeps its raw reward (DeepEyes' rule).

    >>> grpo_advantages(torch.tensor([2., 0., 1., 5., 5.]), torch.tensor([0, 0, 0, 1, 1])).round(decimals=4).tolist()
    [1.0, -1.0, 0.0, 0.0, 0.0]
    """
    advantages = torch.zeros_like(rewards)
    for g in group_ids.unique():
        members = (group_ids == g).nonzero()[:, 0]
        r = rewards[members]
        if len(r) == 1:
            advantages[members] = r
        elif not (r == r[0]).all():
            centred = r - r.mean()
            advantages[members] = centred / (r.std(correction=1) + 1e-6) if norm_by_std else centred
    return advantages


# ---------------------------------------------------------------------------------------------------- policy loss
def clipped_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float = 0.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(sum over response tokens, metric sums) of PPO's clipped loss; all inputs `(B, L)`.

    -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv:1707.06347, eq. 7; separate bounds: DAPO,
    arXiv:2503.14476, eq. 10). With `clip_dual` = c > 1 the loss of a negative advantage is at most -c A (dual clip,
    arXiv:1912.09729, eq. 5). Metrics are sums over response tokens, to be divided by the same global count.
    """
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    metrics = {"clip_frac": ((clipped > plain) & mask).sum()}
    if clip_dual:
        bound = -advantages * clip_dual
        use = (advantages < 0) & (bound < loss)
        metrics["clip_dual_frac"] = (use & mask).sum()
        loss = torch.where(use, bound, loss)
    metrics["approx_kl"] = torch.where(mask, ratio - 1 - log_ratio, 0.0).sum().detach()  # k3 against old_logprobs
    return torch.where(mask, loss, 0.0).sum(), metrics
