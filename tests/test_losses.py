"""Losses and advantages against numbers worked by hand, and against brute_force.py on 1,000 random cases each."""

import math
import random
import threading

import brute_force as brute
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from losses import (
    POLICY_LOSSES,
    AdaptiveKL,
    cispo_policy_loss,
    clipped_policy_loss,
    gae_advantages,
    grpo_advantages,
    gspo_policy_loss,
    kl_estimate,
    kl_penalized_rewards,
    loss_weights,
    mismatch_weights,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    remax_advantages,
    rloo_advantages,
    token_logprobs,
    value_loss,
    whiten,
)

CASES = 1000
NAN = float("nan")
GARBAGE = (NAN, float("inf"), float("-inf"), 1e30)  # what may stand where the mask is 0
AGGREGATIONS = ("token", "seq-mean-token-mean", "seq-mean-token-sum", "dr-grpo")

# The two-turn trajectory of the hand-worked examples: a prompt, a turn of two tokens, an observation, a turn of one.
MASK = torch.tensor([[0, 0, 1, 1, 0, 0, 1]], dtype=torch.bool)
REWARDS = torch.tensor([[NAN, 0, 0, 0.5, 7, NAN, 1]], dtype=torch.float64)  # a tool's reward, then the outcome's
VALUES = torch.tensor([[NAN, 9, 1, 2, 9, -9, 3]], dtype=torch.float64)


def row(*numbers):
    return torch.tensor([numbers], dtype=torch.float64)


def close(a, b, tol=1e-10):
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    return a.shape == b.shape and bool(((a - b).abs() <= tol * (1 + b.abs())).all())


# ---------------------------------------------------------------------------------------------------- random cases
def random_mask(rng):
    """A prompt, then turns (many of a single token) with observations between; ends on a sampled token."""
    mask = [0] * rng.randint(1, 3)
    for turn in range(rng.randint(1, 3)):
        mask += [0] * (rng.randint(1, 3) if turn else 0) + [1] * rng.choice((1, 1, 2, 4))
    return mask


def random_batch(seed):
    """Masks, None rewards and group numbers of a rank's trajectories; now and then a group without any reward."""
    rng = random.Random(seed)
    masks = [random_mask(rng) for _ in range(rng.randint(1, 6))]
    groups = [rng.choice((3, 5, 8)) for _ in masks]
    lost = rng.choice((None, None, *groups))
    rewards = []
    for mask, group in zip(masks, groups, strict=True):
        own = [rng.choice((0.0, 0.0, 0.5, 1.0)) for _ in mask]
        if group == lost or rng.random() < 0.15:
            own[rng.choice(brute.steps(mask))] = None
        rewards.append(own)
    return rng, masks, groups, rewards


def padded(rng, lists, masks, extra=2):
    """(N, L) float64; None becomes NaN; garbage off the mask and in the padding."""
    length = max(map(len, masks)) + extra
    rows = []
    for xs, mask in zip(lists, masks, strict=True):
        own = [(NAN if x is None else x) if m else rng.choice(GARBAGE) for x, m in zip(xs, mask, strict=True)]
        rows.append(own + [rng.choice(GARBAGE) for _ in range(length - len(own))])
    return torch.tensor(rows, dtype=torch.float64)


def padded_mask(masks, extra=2):
    length = max(map(len, masks)) + extra
    return torch.tensor([m + [0] * (length - len(m)) for m in masks], dtype=torch.bool)


def expected_rows(per_step, masks, extra=2):
    """(N, L) from one list per trajectory with a number per sampled token (None = zeros)."""
    length = max(map(len, masks)) + extra
    rows = [brute.spread([0.0] * sum(m) if xs is None else xs, m) for xs, m in zip(per_step, masks, strict=True)]
    return torch.tensor([r + [0.0] * (length - len(r)) for r in rows], dtype=torch.float64)


def random_numbers(rng, masks, sigma=1.0):
    return [[rng.gauss(0, sigma) for _ in mask] for mask in masks]


def packed(rng, tensors, mask):
    """The trajectories of (N, L) tensors in one row, in random order, with their numbers: (1, T) each."""
    order = list(range(len(mask)))
    rng.shuffle(order)
    order = torch.tensor(order)
    ids = order[:, None].expand(mask.shape)
    return [x[order].reshape(1, -1) for x in tensors], mask[order].reshape(1, -1), ids.reshape(1, -1)


# ---------------------------------------------------------------------------------------------------- advantages
def test_gae_by_hand():
    # gamma = lam = 1/2, over the three sampled tokens; the observation between the second and third does not count.
    #   third:  delta = 1 - 3 = -2                A = -2
    #   second: delta = 0.5 + 3/2 - 2 = 0         A = 0 + -2/4 = -0.5
    #   first:  delta = 0 + 2/2 - 1 = 0           A = 0 + -0.5/4 = -0.125
    # Returns A + V: 0.875, 1.5, 1. Mean of A -0.875, deviations 0.75 0.375 -1.125, squares' sum 1.96875, variance / 2.
    advantages, returns = gae_advantages(REWARDS, VALUES, MASK, gamma=0.5, lam=0.5)
    std = math.sqrt(1.96875 / 2 + 1e-8)
    assert close(advantages, row(0, 0, 0.75 / std, 0.375 / std, 0, 0, -1.125 / std))
    assert close(returns, row(0, 0, 0.875, 1.5, 0, 0, 1))


def test_reinforce_pp_by_hand():
    # Returns with gamma = 1/2: 1; 0.5 + 1/2 = 1; 1/2. Mean 5/6, deviations 1/6 1/6 -1/3, squares' sum 1/6, variance 1/12.
    std = math.sqrt(1 / 12 + 1e-8)
    expected = row(0, 0, -1 / 3 / std, 1 / 6 / std, 0, 0, 1 / 6 / std)
    assert close(reinforce_pp_advantages(REWARDS, MASK, gamma=0.5), expected)


def test_reinforce_pp_baseline_by_hand():
    # Scores 1.5 and 0.5 of one group: 0.5 on three tokens, -0.5 on one. Token mean 1/4, variance (3/16 + 9/16) / 3 = 1/4.
    # A third trajectory has no reward and no part in it.
    mask = torch.cat([MASK, torch.tensor([[0, 1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0, 0]], dtype=torch.bool)])
    std = math.sqrt(1 / 4 + 1e-8)
    expected = torch.zeros(3, 7, dtype=torch.float64)
    expected[0, [2, 3, 6]], expected[1, 1] = 0.25 / std, -0.75 / std
    scores = torch.tensor([1.5, 0.5, NAN], dtype=torch.float64)
    assert close(reinforce_pp_baseline_advantages(scores, torch.tensor([4, 4, 4]), mask), expected)


def test_grpo_by_hand():
    # Group 0: scores 1, 2, 3, 6: mean 3, deviations -2 -1 0 3, sum of squares 14, ddof 1: std sqrt(14/3) = 2.160247.
    # Group 5: all equal. Group 9: alone, keeps its raw score. Group 7: one of two has a score, nothing to compare it with.
    scores = torch.tensor([1.0, 2.0, 0.7, 3.0, 6.0, 0.7, -0.2, NAN, 4.0, NAN], dtype=torch.float64)
    groups = torch.tensor([0, 0, 5, 0, 0, 5, 9, 7, 7, 0])
    std = math.sqrt(14 / 3) + 1e-6
    assert close(grpo_advantages(scores, groups), [-2 / std, -1 / std, 0, 0, 3 / std, 0, -0.2, 0, 0, 0])
    assert close(grpo_advantages(scores, groups, norm_by_std=False), [-2, -1, 0, 0, 3, 0, -0.2, 0, 0, 0])


def test_rloo_and_remax_by_hand():
    # 1 against the mean of 2 and 6; 2 against that of 1 and 6; 6 against that of 1 and 2.
    scores = torch.tensor([1.0, 2.0, NAN, 6.0, 5.0], dtype=torch.float64)
    assert close(rloo_advantages(scores, torch.tensor([0, 0, 0, 0, 2])), [-3, -1.5, 0, 4.5, 5])
    greedy = torch.tensor([0.25, 3.0, 1.0, NAN, 5.0], dtype=torch.float64)
    assert close(remax_advantages(scores, greedy), [0.75, -1, 0, 0, 0])


@pytest.mark.parametrize("estimator", [grpo_advantages, rloo_advantages])
def test_equal_scores_give_exactly_zero_whatever_their_mean_rounds_to(estimator):
    scores = torch.full((3,), 0.9)  # 3 x 0.9 / 3 is not 0.9 in float32
    assert (scores - scores.mean() != 0).any(), "the comparison can fail"
    assert estimator(scores, torch.zeros(3, dtype=torch.long)).tolist() == [0.0, 0.0, 0.0]


def test_gae_and_reinforce_pp_against_brute_force():
    for seed in range(CASES):
        rng, masks, _, rewards = random_batch(seed)
        values, gamma, lam = random_numbers(rng, masks), rng.choice((1.0, 0.9, 0.3)), rng.choice((1.0, 0.8, 0.0))
        mask, r, v = padded_mask(masks), padded(rng, rewards, masks), padded(rng, values, masks)
        known = [brute.score(x, m) is not None for x, m in zip(rewards, masks, strict=True)]
        raw, returns, sums = [], [], []
        for x, value, m, ok in zip(rewards, values, masks, known, strict=True):
            a, b = brute.gae(x, value, m, gamma, lam) if ok else (None, [value[t] for t in brute.steps(m)])
            raw.append(a)
            returns.append(b)
            sums.append(brute.discounted(x, m, gamma) if ok else None)
        got, got_returns = gae_advantages(r, v, mask, gamma=gamma, lam=lam)
        assert close(got, expected_rows(brute.whiten(raw), masks), 1e-9), seed
        assert close(got_returns, expected_rows(returns, masks)), seed
        got = reinforce_pp_advantages(r, mask, gamma=gamma)
        assert close(got, expected_rows(brute.whiten(sums), masks), 1e-9), seed


def test_group_baselines_against_brute_force():
    for seed in range(CASES):
        rng, masks, groups, rewards = random_batch(seed)
        scores = [brute.score(x, m) for x, m in zip(rewards, masks, strict=True)]
        s = torch.tensor([NAN if x is None else x for x in scores], dtype=torch.float64)
        g, mask = torch.tensor(groups), padded_mask(masks)
        for norm_by_std in (True, False):
            assert close(grpo_advantages(s, g, norm_by_std=norm_by_std), brute.grpo(scores, groups, norm_by_std)), seed
        assert close(rloo_advantages(s, g), brute.rloo(scores, groups)), seed
        baselines = [None if rng.random() < 0.1 else rng.random() for _ in scores]
        b = torch.tensor([NAN if x is None else x for x in baselines], dtype=torch.float64)
        remax = [0.0 if None in (x, y) else x - y for x, y in zip(scores, baselines, strict=True)]
        assert close(remax_advantages(s, b), remax), seed
        centred = zip(brute.minus_group_mean(scores, groups), scores, masks, strict=True)
        lists = brute.whiten([None if x is None else [c] * sum(m) for c, x, m in centred])
        assert close(reinforce_pp_baseline_advantages(s, g, mask), expected_rows(lists, masks), 1e-9), seed


def test_whitened_advantages_have_mean_0_and_variance_1_over_sampled_tokens():
    x, mask = torch.randn(4, 9, dtype=torch.float64) * 3 + 5, torch.rand(4, 9) < 0.5
    inside = whiten(torch.where(mask, x, NAN), mask)[mask]
    assert abs(inside.mean()) < 1e-12 and abs(inside.var(correction=1) - 1) < 1e-7


def on_two_ranks(work):
    """[work(0, total), work(1, total)] in two threads whose `total` adds their numbers; a lone call runs into time-out."""
    meet, numbers, results = threading.Barrier(2, timeout=20), [0.0, 0.0], [None, None]

    def run(rank):
        def total(x):
            assert isinstance(x, float)
            numbers[rank] = x
            meet.wait()
            both = sum(numbers)
            meet.wait()
            return both

        results[rank] = work(rank, total)

    threads = [threading.Thread(target=run, args=(r,)) for r in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results


@pytest.mark.parametrize("first", [0, 2, 5, 6])
def test_statistics_are_over_all_ranks(first):
    """Rows split over two ranks, all of them on one, or only lost ones on one: the advantages of the whole batch."""
    torch.manual_seed(1)
    N, L, groups = 6, 8, torch.tensor([0, 0, 1, 1, 1, 2])
    mask = torch.rand(N, L) < 0.6
    mask[:, 1] = True
    rewards, values = torch.randn(2, N, L, dtype=torch.float64)
    rewards[5, 1] = NAN
    scores = torch.where(mask, rewards, 0.0).sum(1)

    def all_of(part, total):
        r, v, m = rewards[part], values[part], mask[part]
        return [
            *gae_advantages(r, v, m, gamma=0.9, lam=0.8, total=total),
            reinforce_pp_advantages(r, m, gamma=0.9, total=total),
            reinforce_pp_baseline_advantages(scores[part], groups[part], m, total=total),
            whiten(v, m, total=total),
        ]

    whole = all_of(slice(None), float)
    halves = on_two_ranks(lambda rank, total: all_of(slice(first) if rank == 0 else slice(first, None), total))
    alone = all_of(slice(first or None), float)
    for both, a, b in zip(whole, *halves, strict=True):
        assert close(torch.cat([a, b]), both, 1e-12)
    if first == 2:
        assert not close(alone[0], halves[0][0], 1e-3), "the comparison can fail"


# ---------------------------------------------------------------------------------------------------- KL
def test_kl_by_hand():
    # The policy gives 1/2, the reference 1/4: r = 1/2. Then 1/8 and 1/4: r = 2. Off the mask garbage.
    logprobs, ref = row(math.log(0.5), NAN, math.log(0.125)), row(math.log(0.25), 3.0, math.log(0.25))
    mask, ln2 = torch.tensor([[True, False, True]]), math.log(2)
    hand = {
        "k1": (ln2, -ln2),
        "k2": (ln2**2 / 2, ln2**2 / 2),
        "mse": (ln2**2 / 2, ln2**2 / 2),
        "k3": (ln2 - 0.5, 1 - ln2),
        "abs": (ln2, ln2),
    }
    for kind, (a, b) in hand.items():
        assert close(kl_estimate(logprobs, ref, mask, kind), row(a, 0, b)), kind
    rewards = kl_penalized_rewards(row(0, 9, 1), logprobs, ref, mask, 0.1, "k1")
    assert close(rewards, row(-0.1 * ln2, 0, 1 + 0.1 * ln2))
    rewards = kl_penalized_rewards(row(0, 9, 1), logprobs.requires_grad_(), ref, mask, 0.1, "k2")
    assert not rewards.requires_grad
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(logprobs, ref, mask, "k4")


def test_k3_is_bounded_and_its_gradient_finite():
    logprobs = row(-200.0, -1.0).float().requires_grad_()  # e^199 is inf in float32
    k3 = kl_estimate(logprobs, row(-1.0, -200.0).float(), torch.tensor([[True, True]]), "k3")
    assert k3.tolist() == [[10.0, 10.0]]
    k3.sum().backward()
    assert logprobs.grad.tolist() == [[0.0, 0.0]]


def test_kl_against_brute_force_and_in_the_mean():
    for seed in range(CASES):
        rng, masks, _, _ = random_batch(seed)
        a, b, r = (random_numbers(rng, masks, s) for s in (1, 1, 2))
        mask, logprobs, ref, rewards = padded_mask(masks), *(padded(rng, x, masks) for x in (a, b, r))
        for kind in ("k1", "k2", "k3", "abs", "mse"):
            kl = [[brute.kl(x[t], y[t], kind) for t in brute.steps(m)] for x, y, m in zip(a, b, masks, strict=True)]
            assert close(kl_estimate(logprobs, ref, mask, kind), expected_rows(kl, masks)), (seed, kind)
            left = [
                [x[t] - 0.3 * k for t, k in zip(brute.steps(m), ks, strict=True)]
                for x, ks, m in zip(r, kl, masks, strict=True)
            ]
            got = kl_penalized_rewards(rewards, logprobs, ref, mask, 0.3, kind)
            assert close(got, expected_rows(left, masks)), (seed, kind)
    # Over the whole distribution k1 and k3 average to the KL, and k2's gradient to the KL's gradient.
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    q, p = logits.log_softmax(0), torch.randn(7, dtype=torch.float64).log_softmax(0)
    true = (q.exp() * (q - p)).sum()
    every = torch.ones(7, dtype=torch.bool)
    for kind in ("k1", "k3"):
        assert (q.exp() * kl_estimate(q, p, every, kind)).sum().item() == pytest.approx(true.item(), abs=1e-12)
    (gradient,) = torch.autograd.grad(true, logits, retain_graph=True)
    (got,) = torch.autograd.grad((q.exp().detach() * kl_estimate(q, p, every, "k2")).sum(), logits)
    assert close(got, gradient)


def test_adaptive_kl_by_hand():
    # 2.2 against a target of 2: error 0.1, factor 1.01. 8: error 3, clipped to 0.2, factor 1.02. 0: -0.2, factor 0.98.
    kl = AdaptiveKL(coef=0.5, target=2.0)
    for observed, coef in ((2.2, 0.505), (8.0, 0.5151), (0.0, 0.504798)):
        kl.update(observed)
        assert kl.coef == pytest.approx(coef, abs=1e-12)
    again = AdaptiveKL(coef=9.0, target=2.0)
    again.load_state_dict(kl.state_dict())
    again.update(2.0)
    assert again.coef == kl.coef


# ---------------------------------------------------------------------------------------------------- policy losses
def test_clipped_loss_by_hand():
    # Two turns around an observation, ratios 1.5, 0.5, (masked), 1.0, 4.0, advantages 1, -1, -, 2, -1; bounds 0.2 / 0.28.
    #   1.5, A = 1: clipped to 1.28                    -> -1.28
    #   0.5, A = -1: max(0.5, clip to 0.8 -> 0.8)      ->  0.8
    #   1.0, A = 2:                                    -> -2.0
    #   4.0, A = -1: max(4, 1.28) = 4, dual bound 3    ->  3.0
    ratios = row(1.5, 0.5, NAN, 1.0, 4.0)
    advantages = row(1.0, -1.0, 100.0, 2.0, -1.0)
    mask = torch.tensor([[True, True, False, True, True]])
    old = torch.full_like(ratios, -2.0)
    loss, metrics = clipped_policy_loss(
        old + ratios.log(), old, advantages, mask, clip_low=0.2, clip_high=0.28, clip_dual=3.0
    )
    assert close(loss, row(-1.28, 0.8, 0, -2.0, 3.0), 1e-12)
    assert (metrics["clip_frac"].item(), metrics["clip_dual_frac"].item()) == (2, 1)
    expected_kl = sum(r - 1 - math.log(r) for r in (1.5, 0.5, 1.0, 4.0))
    assert metrics["approx_kl"].item() == pytest.approx(expected_kl, abs=1e-12)
    loss, _ = clipped_policy_loss(old + ratios.log(), old, advantages, mask, clip_low=0.2, clip_high=0.28)
    assert close(loss, row(-1.28, 0.8, 0, -2.0, 4.0), 1e-12)


def test_gspo_by_hand():
    # One row, three trajectories, an observation inside the first. Ratios of the first 4 and 1: s = sqrt(4) = 2 (the
    # observation counts neither in the sum nor in the length). Second 1.1, third 2 and 1/8: s = 1/2. Bounds 0.2, 0.3.
    #   first, A = 1: clipped to 1.3, no gradient   second, A = -2: 2.2, gradient 2.2   third, A = 1: 0.5, gradient -0.5
    ratios, ids = row(4, NAN, 1, 1.1, 2, 0.125), torch.tensor([[0, -1, 0, 1, 2, 2]])
    advantages, mask = row(1, NAN, 1, -2, 1, 1), ratios == ratios
    logprobs = (ratios.log() - 3).requires_grad_()
    kwargs = dict(clip_low=0.2, clip_high=0.3, seq_ids=ids, num_seqs=3)
    loss, metrics = gspo_policy_loss(logprobs, torch.full_like(ratios, -3.0), advantages, mask, **kwargs)
    assert close(loss, row(-1.3, 0, -1.3, 2.2, -0.5, -0.5), 1e-12)
    assert metrics["clip_frac"].item() == 2
    loss.sum().backward()
    assert close(logprobs.grad, row(0, 0, 0, 2.2, -0.5, -0.5), 1e-12)


def test_cispo_by_hand():
    # Ratios 1.5, 0.5, (masked), 1.1 with weights 1.3, 0.8, -, 1.1; logprobs ln of 0.3, 0.2, -, 0.11; A = 2, -1, -, 1.
    mask = torch.tensor([[True, True, False, True]])
    logprobs, old = row(0.3, 0.2, NAN, 0.11).log().requires_grad_(), row(0.2, 0.4, 1.0, 0.1).log()
    loss, metrics = cispo_policy_loss(logprobs, old, row(2, -1, NAN, 1), mask, clip_low=0.2, clip_high=0.3)
    assert close(loss, row(-1.3 * 2 * math.log(0.3), 0.8 * math.log(0.2), 0, -1.1 * math.log(0.11)), 1e-12)
    assert metrics["clip_frac"].item() == 2
    loss.sum().backward()
    assert close(logprobs.grad, row(-2.6, 0.8, 0, -1.1), 1e-12)  # the clipped ones included


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_ratio_one_gives_the_reinforce_gradient_and_masked_tokens_exactly_none(name):
    torch.manual_seed(0)
    mask = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 1, 1, 0]], dtype=torch.bool)
    kwargs = dict(clip_low=0.2, clip_high=0.2, clip_dual=3.0, seq_ids=torch.tensor([[0] * 5, [1] * 5]), num_seqs=2)
    advantages = torch.randn(2, 5, dtype=torch.float64)
    clean = torch.randn(2, 5, dtype=torch.float64)
    losses = []
    for garbage in (0.0, *GARBAGE):
        logprobs = torch.where(mask, clean, garbage).requires_grad_()
        spoiled = torch.where(mask, advantages, garbage)
        loss, metrics = POLICY_LOSSES[name](logprobs, logprobs.detach(), spoiled, mask, **kwargs)
        loss.sum().backward()
        assert close(logprobs.grad, torch.where(mask, -advantages, 0.0), 1e-12)
        assert (logprobs.grad[~mask] == 0).all() and (loss[~mask] == 0).all()
        losses.append((loss.tolist(), {k: v.item() for k, v in metrics.items()}))
    assert all(x == losses[0] for x in losses), "what an observation token would score, and its advantage, say nothing"


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_ratio_beyond_float32_gives_no_nan(name):
    logprobs = torch.zeros(1, 2).requires_grad_()
    old, advantages, mask = torch.full((1, 2), -200.0), torch.tensor([[0.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    kwargs = dict(clip_low=0.2, clip_high=0.2, seq_ids=torch.tensor([[0, 1]]), num_seqs=2)
    loss, metrics = POLICY_LOSSES[name](logprobs, old, advantages, mask, **kwargs)
    loss.sum().backward()
    assert loss[0, 0] == 0 and all(x.isfinite().all() for x in (loss, logprobs.grad, *metrics.values()))
    weights, metrics = mismatch_weights(logprobs, old, mask, kind="none", cap=2.0)
    assert weights.tolist() == [[1.0, 1.0]] and all(x.isfinite() for x in metrics.values())


def central_difference(function, xs, eps=1e-6):
    """Gradient of a scalar function of a list of lists."""
    out = []
    for own in xs:
        out.append([])
        for t, x in enumerate(own):
            own[t] = x + eps
            up = function(xs)
            own[t] = x - eps
            out[-1].append((up - function(xs)) / (2 * eps))
            own[t] = x
    return out


def random_losses(seed):
    """A random batch of logprobs per sampled token, in lists and as (N, L) tensors with garbage off the mask."""
    rng, masks, _, _ = random_batch(seed)
    numbers = {k: random_numbers(rng, masks, s) for k, s in (("old", 1), ("change", 0.5), ("advantages", 1))}
    numbers["new"] = [
        [a + b for a, b in zip(x, y, strict=True)] for x, y in zip(numbers["old"], numbers["change"], strict=True)
    ]
    tensors = {k: padded(rng, numbers[k], masks) for k in ("new", "old", "advantages")}
    lists = {k: [[x[t] for t in brute.steps(m)] for x, m in zip(v, masks, strict=True)] for k, v in numbers.items()}
    return rng, masks, lists, tensors


def step_loss(name, lists, weights, low, high, dual):
    """The loss of the optimizer step from the definitions; for GSPO with the ratio of the sequence itself."""
    out = 0.0
    for new, old, advantages, w in zip(lists["new"], lists["old"], lists["advantages"], weights, strict=True):
        s = brute.gspo_ratio(new, old)
        for x, y, a in zip(new, old, advantages, strict=True):
            ratio = math.exp(x) / math.exp(y)
            if name == "cispo":
                out += w * -brute.clip(ratio, 1 - low, 1 + high) * a * x
            else:
                out += w * brute.clipped_loss(s if name == "gspo" else ratio, a, low, high, dual)
    return out


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_losses_against_brute_force(name):
    """Loss of the step and its gradient, padded and packed in random order, under every aggregation.

    The gradient is a finite difference of the definition: for GSPO of the sequence objective with one advantage per
    trajectory, which its token form must reproduce; for CISPO with the weight held fast, as stop-gradient says.
    """
    for seed in range(CASES):
        rng, masks, lists, tensors = random_losses(seed)
        low, high, dual = rng.choice((0.1, 0.3)), rng.choice((0.2, 0.4)), rng.choice((0.0, 1.7))
        if name == "gspo":
            for own in lists["advantages"]:
                own[:] = [own[0]] * len(own)
            rows = [brute.spread(a, m) for a, m in zip(lists["advantages"], masks, strict=True)]
            tensors["advantages"] = padded(rng, rows, masks)
        mask, sampled = padded_mask(masks), [sum(m) for m in masks]
        how, N = AGGREGATIONS[seed % 4], len(masks)
        counts = (sum(sampled) + 7, N + 2, 50)  # the step has more tokens and trajectories elsewhere
        weights = [brute.weight(how, n, *counts) for n in sampled]
        w = loss_weights(
            torch.tensor(sampled), how, num_tokens=counts[0], num_seqs=counts[1], max_response_len=counts[2]
        )
        assert close(w, weights)
        expected = step_loss(name, lists, weights, low, high, dual)

        kwargs = dict(clip_low=low, clip_high=high, clip_dual=dual, num_seqs=N)
        new = tensors["new"].requires_grad_()
        ids = torch.arange(N)[:, None].expand(mask.shape)
        args = (new, tensors["old"], tensors["advantages"])
        loss, _ = POLICY_LOSSES[name](*args, mask, seq_ids=ids, **kwargs)
        total = (loss * w[ids]).sum()
        assert close(total.detach(), expected), seed
        one_row, row_mask, row_ids = packed(rng, args, mask)
        loss, _ = POLICY_LOSSES[name](*one_row, row_mask, seq_ids=row_ids, **kwargs)
        assert close((loss * w[row_ids]).sum().detach(), expected), seed

        (gradient,) = torch.autograd.grad(total, new)
        if name == "cispo":
            slope = [
                [-u * brute.clip(math.exp(d), 1 - low, 1 + high) * a for d, a in zip(change, own, strict=True)]
                for u, change, own in zip(weights, lists["change"], lists["advantages"], strict=True)
            ]
        else:
            slope = central_difference(
                lambda xs: step_loss(name, {**lists, "new": xs}, weights, low, high, dual),  # noqa: B023
                lists["new"],
            )
        assert close(gradient, expected_rows(slope, masks), 1e-7), seed
        assert (gradient[~mask] == 0).all()


def test_loss_weights_by_hand():
    # Trajectories of 1 and 3 tokens among 8 tokens and 4 trajectories over all ranks; at most 10 tokens.
    n, counts = torch.tensor([1, 3]), dict(num_tokens=8, num_seqs=4, max_response_len=10)
    hand = ([1 / 8, 1 / 8], [1 / 4, 1 / 12], [1 / 4, 1 / 4], [1 / 40, 1 / 40])
    for how, expected in zip(AGGREGATIONS, hand, strict=True):
        assert close(loss_weights(n, how, **counts), expected)
    assert loss_weights(torch.tensor([0]), "seq-mean-token-mean", **counts).isfinite().all()
    with pytest.raises(ValueError, match="mean of means"):
        loss_weights(n, "mean of means", **counts)


# ---------------------------------------------------------------------------------------------------- value loss
def test_value_loss_by_hand():
    # Old value 0, bound 0.5. V = 2, R = 1: max(1, (0.5 - 1)^2) / 2 = 0.5. V = 1, R = 2: max(1, 1.5^2) / 2 = 1.125, clipped.
    # V = -0.25, R = 1: inside the bound, 1.25^2 / 2.
    values = row(2, NAN, 1, -0.25).requires_grad_()
    mask = torch.tensor([[True, False, True, True]])
    loss, metrics = value_loss(values, row(0, 1, 0, 0), row(1, NAN, 2, 1), mask, clip=0.5)
    assert close(loss, row(0.5, 0, 1.125, 0.78125), 1e-12)
    assert metrics["value_clip_frac"].item() == 1
    loss.sum().backward()
    assert close(values.grad, row(1, 0, 0, -1.25), 1e-12) and values.grad[0, 1] == 0


def test_value_loss_against_brute_force():
    for seed in range(CASES):
        rng, masks, lists, tensors = random_losses(seed)
        bound = rng.choice((0.2, 1.0, math.inf))
        mask, values = padded_mask(masks), tensors["new"].requires_grad_()
        loss, _ = value_loss(values, tensors["old"], tensors["advantages"], mask, clip=bound)
        expected = [
            [brute.value_loss(v, old, r, bound) for v, old, r in zip(*each, strict=True)]
            for each in zip(lists["new"], lists["old"], lists["advantages"], strict=True)
        ]
        assert close(loss.detach(), expected_rows(expected, masks)), seed
        (gradient,) = torch.autograd.grad(loss.sum(), values)

        def everything(xs):
            each = zip(xs, lists["old"], lists["advantages"], strict=True)  # noqa: B023
            return sum(brute.value_loss(*vor, bound) for x in each for vor in zip(*x, strict=True))  # noqa: B023

        slope = central_difference(everything, lists["new"])
        assert close(gradient, expected_rows(slope, masks), 1e-7), seed
        assert (gradient[~mask] == 0).all()


# ---------------------------------------------------------------------------------------------------- engine and trainer
def test_mismatch_by_hand():
    # Ratios trainer / engine 4, 0.25, (masked) for trajectory 0 and 1.5, 2 for trajectory 1; cap 2.
    ratios, ids = row(4, 0.25, NAN, 1.5, 2), torch.tensor([[0, 0, 0, 1, 1]])
    mask, rollout = ratios == ratios, torch.full_like(ratios, -5.0)
    hand = {
        "token": (row(2, 0.25, 0, 1.5, 2), 1, 7.75, 4),
        "mask": (row(0, 0, 0, 1.5, 2), 2, 7.75, 4),
        "sequence": (row(1, 1, 0, 2, 2), 2, 8, 3),
        "none": (row(1, 1, 0, 1, 1), 0, 7.75, 4),
    }
    k3 = sum(r - 1 - math.log(r) for r in (4, 0.25, 1.5, 2))
    for kind, (weights, beyond, ratio_sum, largest) in hand.items():
        old = (ratios.log() - 5).requires_grad_()
        got, m = mismatch_weights(old, rollout, mask, kind=kind, cap=2 + 1e-12, seq_ids=ids, num_seqs=2)
        assert close(got, weights), kind
        assert not got.requires_grad
        assert m["mismatch_cap_frac"].item() == beyond
        assert close([m["mismatch_ratio"], m["mismatch_ratio_max"], m["mismatch_kl"]], [ratio_sum, largest, k3]), kind
    with pytest.raises(ValueError, match="tis"):
        mismatch_weights(old, rollout, mask, kind="tis", cap=2.0)


def test_mismatch_against_brute_force():
    for seed in range(CASES):
        rng, masks, lists, tensors = random_losses(seed)
        mask, cap = padded_mask(masks), rng.choice((1.2, 2.0))
        for kind in ("token", "mask", "sequence", "none"):
            each = [brute.mismatch(a, b, kind, cap) for a, b in zip(lists["new"], lists["old"], strict=True)]
            (new, old), row_mask, ids = packed(rng, (tensors["new"], tensors["old"]), mask)
            got, m = mismatch_weights(new, old, row_mask, kind=kind, cap=cap, seq_ids=ids, num_seqs=len(masks))
            back = torch.zeros(mask.shape, dtype=torch.float64)
            back[ids.view(mask.shape)[:, 0]] = got.view(mask.shape)
            assert close(back, expected_rows([w for w, _, _ in each], masks)), (seed, kind)
            assert m["mismatch_cap_frac"].item() == sum(n for _, n, _ in each), (seed, kind)
            ratios = [r for _, _, rs in each for r in rs]
            kl = sum(
                brute.kl(b, a, "k3")
                for x, y in zip(lists["new"], lists["old"], strict=True)
                for a, b in zip(x, y, strict=True)
            )
            logged = [m["mismatch_ratio"], m["mismatch_ratio_max"], m["mismatch_kl"]]
            assert close(logged, [sum(ratios), max(ratios), kl]), (seed, kind)


# ---------------------------------------------------------------------------------------------------- log-probabilities
def naive_token_logprobs(hidden, tokens, mask, head, *, temperature=1.0, banned=None):
    """The same with all logits at once and autograd's own gradient."""
    at, col = mask.nonzero(as_tuple=True)
    logits = (hidden[at, col - 1] @ head.T).to(torch.promote_types(hidden.dtype, torch.float32)) / temperature
    if banned is not None:
        logits = logits.index_fill(1, banned, -math.inf)
    p = logits.softmax(-1)
    logprobs = logits.log_softmax(-1).gather(1, tokens[at, col][:, None])[:, 0]
    entropy = -(p * p.clamp(min=1e-300).log()).sum(-1)
    zeros = logprobs.new_zeros(mask.shape)
    return zeros.index_put((at, col), logprobs), zeros.index_put((at, col), entropy)


def random_logprob_case(seed):
    """Hidden states (garbage where nothing is predicted), tokens, mask, head and settings, float64."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    B, L, H, V = rng.randint(1, 3), rng.randint(2, 5), rng.randint(1, 3), rng.randint(3, 8)
    mask = torch.rand(B, L) < rng.choice((0.3, 0.7))
    mask[:, 0] = False
    used = torch.zeros_like(mask)
    used[:, :-1] = mask[:, 1:]  # the state before each sampled token, and no other
    hidden = torch.where(used[..., None], torch.randn(B, L, H, dtype=torch.float64) * 2, rng.choice(GARBAGE))
    head = torch.randn(V, H, dtype=torch.float64)
    banned = rng.sample(range(V), rng.randint(0, V - 2))
    allowed = [v for v in range(V) if v not in banned]
    tokens = torch.tensor([[rng.choice(allowed) for _ in range(L)] for _ in range(B)])
    settings = dict(
        temperature=rng.choice((1.0, 0.6, 1.7)),
        banned=torch.tensor(banned, dtype=torch.long) if banned or rng.random() < 0.5 else None,
    )
    return hidden, tokens, mask, head, settings, used, rng.choice((1, 5, 11, 1 << 20))


def test_token_logprobs_against_brute_force_and_naive_gradient():
    for seed in range(CASES):
        hidden, tokens, mask, head, settings, used, chunk = random_logprob_case(seed)
        hidden, head = hidden.requires_grad_(), head.requires_grad_()
        logprobs, entropy = token_logprobs(hidden, tokens, mask, head, chunk=chunk, **settings)
        banned = [] if settings["banned"] is None else settings["banned"].tolist()
        states, rows = hidden.tolist(), head.tolist()
        expected = torch.zeros(2, *mask.shape, dtype=torch.float64)
        for b, t in mask.nonzero().tolist():
            p = brute.distribution(states[b][t - 1], rows, settings["temperature"], banned)
            expected[0, b, t], expected[1, b, t] = math.log(p[tokens[b, t]]), brute.entropy(p)
        assert close(logprobs.detach(), expected[0]) and close(entropy.detach(), expected[1]), seed

        w = torch.randn(2, *mask.shape, dtype=torch.float64)
        with_bonus = seed % 2  # half of the cases leave the entropy out of the loss
        got = torch.autograd.grad((w[0] * logprobs).sum() + with_bonus * (w[1] * entropy).sum(), (hidden, head))
        if not with_bonus:
            again, _ = token_logprobs(hidden, tokens, mask, head, chunk=chunk, **settings)
            for a, b in zip(torch.autograd.grad((w[0] * again).sum(), (hidden, head)), got, strict=True):
                assert close(a, b, 1e-12), seed
        logprobs, entropy = naive_token_logprobs(hidden, tokens, mask, head, **settings)
        naive = torch.autograd.grad((w[0] * logprobs).sum() + with_bonus * (w[1] * entropy).sum(), (hidden, head))
        for a, b in zip(got, naive, strict=True):
            assert close(a, b, 1e-10), seed
        assert (got[0][~used] == 0).all() and got[0].isfinite().all()


@pytest.mark.parametrize("chunk", [1, 12, 1000])
def test_token_logprobs_gradient_agrees_with_finite_differences(chunk):
    torch.manual_seed(0)
    hidden = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    head = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1]], dtype=torch.bool)
    tokens = torch.tensor([[0, 3, 0, 1], [2, 2, 6, 4]])
    kwargs = dict(temperature=0.7, banned=torch.tensor([1, 5]), chunk=chunk)
    assert torch.autograd.gradcheck(lambda h, w: token_logprobs(h, tokens, mask, w, **kwargs), (hidden, head))
    (only_entropy,) = torch.autograd.grad(token_logprobs(hidden, tokens, mask, head, **kwargs)[1].sum(), head)
    assert only_entropy.abs().max() > 0.01 and (only_entropy[[1, 5]] == 0).all()


def test_uniform_logits_by_hand():
    # No preference among 8 ids, 3 of them banned: probability 1/5 and entropy ln 5 each, at any temperature.
    hidden, head = torch.zeros(1, 3, 2), torch.randn(8, 2)
    mask, tokens = torch.tensor([[False, True, True]]), torch.tensor([[0, 1, 2]])
    for chunk in (2, 100):
        banned = torch.tensor([7, 0, 4])
        logprobs, entropy = token_logprobs(hidden, tokens, mask, head, temperature=0.5, banned=banned, chunk=chunk)
        assert close(logprobs, row(0, -math.log(5), -math.log(5)), 1e-6)
        assert close(entropy, row(0, math.log(5), math.log(5)), 1e-6)


def test_a_likely_banned_id_leaves_the_others_their_probability():
    # The banned id's logit is 500 above the others': were it only subtracted, nothing would be left of them.
    head = torch.tensor([[500.0], [0.0], [math.log(3)]])
    args = torch.ones(1, 2, 1), torch.tensor([[0, 2]]), torch.tensor([[False, True]]), head
    for chunk in (1, 100):
        assert token_logprobs(*args, banned=torch.tensor([0]), chunk=chunk)[0][0, 1].exp().item() == pytest.approx(0.75)


def test_token_logprobs_in_bfloat16_and_under_autocast():
    """Softmax in float32 on bfloat16 logits; gradients within bfloat16's 2^-8 of those in float32; autocast alike."""
    torch.manual_seed(0)
    hidden, head = torch.randn(1, 65, 32), torch.randn(300, 32) * 0.3
    mask, tokens = torch.ones(1, 65, dtype=torch.bool), torch.randint(0, 300, (1, 65))
    mask[:, 0] = False

    def gradients(h, w, autocast=False, function=token_logprobs, **kwargs):
        h, w = h.clone().requires_grad_(), w.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logprobs, entropy = function(h, tokens, mask, w, **kwargs)
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
        assert logprobs.dtype == entropy.dtype == torch.float32 and w.grad.dtype == w.dtype
        return logprobs.detach(), h.grad.float(), w.grad.float()

    half = gradients(hidden.bfloat16(), head.bfloat16(), chunk=64 * 50)
    exact = gradients(hidden.bfloat16().float(), head.bfloat16().float(), function=naive_token_logprobs)
    cast = gradients(hidden, head, autocast=True, chunk=64 * 50)
    assert (half[0] - exact[0]).abs().max() < 0.05
    for a, b, c in zip(half, exact, cast, strict=True):
        assert (a - b).norm() < 2**-7 * b.norm()
        assert (a - c).norm() < 2**-8 * c.norm()  # the same products; only the gradient's last cast differs


def test_logits_never_exist_at_once():
    """No tensor that is made on the way, forward or backward, is larger than a chunk or the head, and a frozen head's
    gradient is not made at all."""
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, (tuple, list)) else [out]) if torch.is_tensor(x))
            return out

    N, V, H, chunk = 50, 400, 4, 1000
    hidden, head = torch.randn(1, N + 1, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    mask, tokens = torch.ones(1, N + 1, dtype=torch.bool), torch.randint(0, V, (1, N + 1))
    mask[:, 0] = False

    def largest(function, head):
        sizes.clear()
        with Sizes():
            logprobs, entropy = function(hidden, tokens, mask, head)
            (logprobs.sum() + entropy.sum()).backward()
        gradient, hidden.grad = hidden.grad, None
        return max(sizes), gradient

    def chunked(*args):
        return token_logprobs(*args, chunk=chunk)

    assert largest(naive_token_logprobs, head)[0] == N * V
    size, gradient = largest(chunked, head)
    assert size == V * H
    size, same = largest(chunked, head.detach())
    assert size == chunk and torch.equal(gradient, same)


def test_a_batch_without_response_tokens_has_zero_gradients():
    hidden, head = torch.randn(1, 3, 2, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    tokens = torch.zeros(1, 3, dtype=torch.long)
    logprobs, entropy = token_logprobs(hidden, tokens, tokens.bool(), head)
    (logprobs.sum() + entropy.sum()).backward()
    assert head.grad.tolist() == torch.zeros(4, 2).tolist() and hidden.grad.tolist() == torch.zeros(1, 3, 2).tolist()


def test_the_first_token_cannot_be_sampled():
    tokens = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="first token"):
        token_logprobs(torch.randn(1, 3, 2), tokens, ~tokens.bool(), torch.randn(4, 2))
