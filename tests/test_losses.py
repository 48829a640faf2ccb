"""Losses and advantages against numbers worked by hand."""

import math

import pytest
import torch

from losses import clipped_policy_loss, grpo_advantages, token_logprobs


def test_grpo_by_hand():
    # Group 0: rewards 1, 2, 3, 6: mean 3, deviations -2 -1 0 3, sum of squares 14, ddof 1: std sqrt(14/3) = 2.160247.
    # Group 5: all equal. Group 9: alone, keeps its raw reward.
    rewards = torch.tensor([1.0, 2.0, 0.7, 3.0, 6.0, 0.7, -0.2], dtype=torch.float64)
    groups = torch.tensor([0, 0, 5, 0, 0, 5, 9])
    std = math.sqrt(14 / 3) + 1e-6
    expected = torch.tensor([-2 / std, -1 / std, 0.0, 0.0, 3 / std, 0.0, -0.2], dtype=torch.float64)
    assert torch.allclose(grpo_advantages(rewards, groups), expected, atol=1e-12)
    assert grpo_advantages(rewards, groups)[[2, 5]].tolist() == [0.0, 0.0]
    dr = torch.tensor([-2.0, -1.0, 0.0, 0.0, 3.0, 0.0, -0.2], dtype=torch.float64)
    assert torch.allclose(grpo_advantages(rewards, groups, norm_by_std=False), dr, atol=1e-12)


def test_equal_rewards_give_exactly_zero_whatever_their_mean_rounds_to():
    rewards = torch.full((3,), 0.1) + torch.full((3,), 0.2)  # 3 x 0.3 / 3 is not 0.3 in float32
    assert grpo_advantages(rewards, torch.zeros(3, dtype=torch.long)).tolist() == [0.0, 0.0, 0.0]


def test_clipped_loss_by_hand():
    # Ratios 1.5, 0.5, 1.0, 4.0, 1.5 with advantages 1, -1, 2, -1, (masked); bounds 0.2 / 0.28; dual clip 3.
    #   1.5, A = 1: clipped to 1.28                    -> -1.28
    #   0.5, A = -1: max(0.5, clip to 0.8 -> 0.8)      ->  0.8
    #   1.0, A = 2:                                    -> -2.0
    #   4.0, A = -1: max(4, 1.28) = 4, dual bound 3    ->  3.0
    ratios = torch.tensor([[1.5, 0.5, 1.0, 4.0, 1.5]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, -1.0, 2.0, -1.0, 100.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, True, False]])
    old = torch.full_like(ratios, -2.0)
    loss, metrics = clipped_policy_loss(
        old + ratios.log(), old, advantages, mask, clip_low=0.2, clip_high=0.28, clip_dual=3.0
    )
    assert loss.item() == pytest.approx(-1.28 + 0.8 - 2.0 + 3.0, abs=1e-12)
    assert (metrics["clip_frac"].item(), metrics["clip_dual_frac"].item()) == (2, 1)
    expected_kl = sum(r - 1 - math.log(r) for r in (1.5, 0.5, 1.0, 4.0))
    assert metrics["approx_kl"].item() == pytest.approx(expected_kl, abs=1e-12)
    loss, _ = clipped_policy_loss(
        old + ratios.log(), old, advantages, mask, clip_low=0.2, clip_high=0.28, clip_dual=0.0
    )
    assert loss.item() == pytest.approx(-1.28 + 0.8 - 2.0 + 4.0, abs=1e-12)


def test_ratio_one_gives_the_reinforce_gradient_and_masked_tokens_none():
    logprobs = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    advantages = torch.randn(2, 5, dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 1, 1, 0]], dtype=torch.bool)
    loss, _ = clipped_policy_loss(
        logprobs, logprobs.detach(), advantages, mask, clip_low=0.2, clip_high=0.2, clip_dual=3.0
    )
    loss.backward()
    assert torch.equal(logprobs.grad, torch.where(mask, -advantages, 0.0))


def test_token_logprobs_against_float64_brute_force():
    torch.manual_seed(0)
    B, L, H, V, banned, temperature = 2, 6, 4, 9, [1, 7], 0.7
    hidden = torch.randn(B, L, H, dtype=torch.float64, requires_grad=True)
    head = torch.randn(V, H, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(2, 7, (B, L))
    mask = torch.tensor([[0, 0, 1, 1, 0, 1], [0, 1, 0, 0, 0, 1]], dtype=torch.bool)
    logprobs, entropy = token_logprobs(hidden, tokens, mask, head, temperature=temperature, banned=torch.tensor(banned))
    for b in range(B):
        for t in range(L):
            if not mask[b, t]:
                assert logprobs[b, t] == 0 and entropy[b, t] == 0
                continue
            # From the definition: p(v) over the vocabulary without the banned ids, from the state BEFORE the token.
            scores = [
                sum(hidden[b, t - 1, i].item() * head[v, i].item() for i in range(H)) / temperature for v in range(V)
            ]
            z = sum(math.exp(s) for v, s in enumerate(scores) if v not in banned)
            p = [math.exp(s) / z if v not in banned else 0.0 for v, s in enumerate(scores)]
            assert logprobs[b, t].item() == pytest.approx(math.log(p[tokens[b, t]]), abs=1e-5)  # logits are float32
            assert entropy[b, t].item() == pytest.approx(-sum(q * math.log(q) for q in p if q), abs=1e-5)
    logprobs.sum().backward()
    used = torch.zeros(B, L, dtype=torch.bool)
    used[:, :-1] = mask[:, 1:]  # the state before each sampled token, and no other
    assert (hidden.grad.abs().sum(-1) > 0).equal(used)
    with pytest.raises(ValueError, match="first token"):
        token_logprobs(hidden, tokens, torch.ones_like(mask), head)
