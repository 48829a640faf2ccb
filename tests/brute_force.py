"""Estimators and losses once more, straight from their definitions: Python lists, loops and math, for test_losses.py.

A trajectory is a list per quantity and a list of 0 and 1, its mask. Nothing is shared with losses.py.
"""

import math


def steps(mask):
    """Positions of the sampled tokens: what the estimators call time."""
    return [t for t, m in enumerate(mask) if m]


def mean(xs):
    return sum(xs) / len(xs)


def sample_variance(xs):
    return sum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - 1)


def score(rewards, mask):
    """Sum of the sampled tokens' rewards; None if one is missing."""
    own = [rewards[t] for t in steps(mask)]
    return None if any(r is None for r in own) else sum(own)


def spread(per_step, mask):
    """A list with one number per sampled token, laid out over the trajectory."""
    rest = iter(per_step)
    return [next(rest) if m else 0.0 for m in mask]


# ---------------------------------------------------------------------------------------------------- advantages
def gae(rewards, values, mask, gamma, lam):
    """(advantages, returns) per sampled token: A_k = sum_j (gamma lam)^(j - k) delta_j."""
    at = steps(mask)
    v = [values[t] for t in at] + [0.0]
    delta = [rewards[t] + gamma * v[k + 1] - v[k] for k, t in enumerate(at)]
    advantages = [sum((gamma * lam) ** (j - k) * delta[j] for j in range(k, len(at))) for k in range(len(at))]
    return advantages, [a + v[k] for k, a in enumerate(advantages)]


def discounted(rewards, mask, gamma):
    at = steps(mask)
    return [sum(gamma ** (j - k) * rewards[at[j]] for j in range(k, len(at))) for k in range(len(at))]


def whiten(lists):
    """Every number of a list of lists (None = left out), less the mean of all, over their standard deviation."""
    everything = [x for xs in lists if xs is not None for x in xs]
    if not everything:
        return lists
    m = mean(everything)
    variance = sample_variance(everything) if len(everything) > 1 else 0.0
    return [None if xs is None else [(x - m) / math.sqrt(variance + 1e-8) for x in xs] for xs in lists]


def group_rule(scores, groups, rule):
    """`rule(own, others)` where a score and a comparison exist."""
    out = []
    for i, own in enumerate(scores):
        group = [j for j in range(len(scores)) if groups[j] == groups[i]]
        rewarded = [j for j in group if scores[j] is not None]
        if own is None:
            out.append(0.0)
        elif len(group) == 1:
            out.append(own)
        elif len(rewarded) == 1 or len({scores[j] for j in rewarded}) == 1:
            out.append(0.0)
        else:
            out.append(rule(own, [scores[j] for j in rewarded if j != i]))
    return out


def grpo(scores, groups, norm_by_std):
    def rule(own, others):
        everyone = [own, *others]
        std = math.sqrt(sample_variance(everyone)) + 1e-6
        return (own - mean(everyone)) / (std if norm_by_std else 1.0)

    return group_rule(scores, groups, rule)


def rloo(scores, groups):
    return group_rule(scores, groups, lambda own, others: own - mean(others))


def minus_group_mean(scores, groups):
    return group_rule(scores, groups, lambda own, others: own - mean([own, *others]))


# ---------------------------------------------------------------------------------------------------- losses, one token
def clip(x, low, high):
    return low if x < low else high if x > high else x


def clipped_loss(ratio, advantage, low, high, dual):
    objective = min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)
    if dual and advantage < 0:
        objective = max(objective, dual * advantage)
    return -objective


def gspo_ratio(logprobs, old_logprobs):
    """Of one trajectory's sampled tokens: (product of ratios) to the power of 1 / length."""
    product = 1.0
    for new, old in zip(logprobs, old_logprobs, strict=True):
        product *= math.exp(new) / math.exp(old)
    return product ** (1 / len(logprobs))


def kl(logprob, ref, kind):
    p, q = math.exp(ref), math.exp(logprob)  # names of Schulman's note: the samples come from q
    r = p / q
    return {
        "k1": -math.log(r),
        "k2": math.log(r) ** 2 / 2,
        "mse": math.log(r) ** 2 / 2,
        "k3": min(10.0, (r - 1) - math.log(r)),
        "abs": abs(math.log(r)),
    }[kind]


def value_loss(value, old, target, bound):
    return max((value - target) ** 2, (clip(value, old - bound, old + bound) - target) ** 2) / 2


def weight(how, n, num_tokens, num_seqs, max_len):
    return {
        "token": 1 / num_tokens,
        "seq-mean-token-mean": 1 / num_seqs / n if n else 0.0,
        "seq-mean-token-sum": 1 / num_seqs,
        "dr-grpo": 1 / num_seqs / max_len,
    }[how]


def mismatch(old_logprobs, rollout_logprobs, kind, cap):
    """(weights, number beyond the bound, bounded ratios) of one trajectory's sampled tokens."""
    ratios = [math.exp(a) / math.exp(b) for a, b in zip(old_logprobs, rollout_logprobs, strict=True)]
    if kind == "sequence":
        ratios = [math.prod(ratios)] * len(ratios)
    if kind == "none":
        return [1.0] * len(ratios), 0, ratios
    if kind == "mask":
        inside = [1 / cap <= r <= cap for r in ratios]
        return [r if ok else 0.0 for r, ok in zip(ratios, inside, strict=True)], inside.count(False), ratios
    return [min(r, cap) for r in ratios], sum(r > cap for r in ratios), ratios


# ---------------------------------------------------------------------------------------------------- log-probabilities
def distribution(state, head, temperature, banned):
    """Probabilities of the vocabulary given one hidden state."""
    logits = [sum(h * w for h, w in zip(state, row, strict=True)) / temperature for row in head]
    z = sum(math.exp(x) for v, x in enumerate(logits) if v not in banned)
    return [0.0 if v in banned else math.exp(x) / z for v, x in enumerate(logits)]


def entropy(p):
    return -sum(x * math.log(x) for x in p if x > 0)
