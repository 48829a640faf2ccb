"""The policy's forward on packed rows, against plain transformers that runs one trajectory after the other."""

import dataclasses
import os
import random

import families
import psutil
import pytest
import torch
from conftest import ROOT, TOY
from PIL import Image
from transformers import AutoModelForImageTextToText, Qwen2Config

from data import Codec, View, add_blank_image, pack_rows, plan_microbatches, with_pixels
from losses import clipped_policy_loss
from model import Policy, _varlen_attention, hidden_states, load_lm, use_cpu_fast_paths
from toy import Trace, TraceMaker


# ---------------------------------------------------------------------------------------------------- rows
def with_advantage(trace, advantage):
    trace.advantages = [advantage * m for m in trace.response_mask]
    trace.rollout_logprobs = [0.0] * len(trace.tokens)
    return trace


def make_rows(codec, num=10, seed=0):
    """Supervised traces as rows, with one or two images and random advantages."""
    rng = random.Random(seed)
    make = TraceMaker(codec, rng)
    noise = dict(sigma=0.2, max_log_scale=0.5)
    traces = [make.zoom(noise) if i % 3 else make.direct() for i in range(num)]
    return [with_advantage(t, rng.uniform(-1, 1)) for t in traces]


def text_row(codec, times=1):
    tokens = codec.encode("What is the digit") + codec.encode("<answer>7</answer>", tags=True) * times
    return with_advantage(Trace(tokens, [0] + [1] * (len(tokens) - 1), [], []), 0.3)


def odd_rows(codec):
    """No image, one and two of them, and a row that is far longer than the others."""
    return [text_row(codec), *make_rows(codec, 6), text_row(codec, times=100), text_row(codec, times=2)]


# ---------------------------------------------------------------------------------------------------- plain transformers
def plain_toy():
    return AutoModelForImageTextToText.from_pretrained(TOY, dtype=torch.float32, attn_implementation="sdpa").eval()


def plain_logits(lm, codec, row):
    """(n, V) of one trajectory alone: its own pixels, positions made by transformers."""
    ids, images = torch.tensor(row.tokens)[None], {}
    if row.views:
        pixels, grids = codec.pixel_values([v.image for v in row.views])
        types = (ids == codec.image_token_id).long()
        images = dict(pixel_values=pixels, image_grid_thw=grids, mm_token_type_ids=types)
    return lm(input_ids=ids, **images).logits[0]


def plain_gradient(lm, codec, rows):
    """Of -A(t) p(t) / stop_gradient(p(t)), the REINFORCE gradient, summed over sampled tokens and divided by their number."""
    lm.zero_grad()
    num_tokens = sum(sum(r.response_mask) for r in rows)
    for r in rows:
        logits = plain_logits(lm, codec, r)
        logits[:, codec.banned_ids] = float("-inf")
        sampled = [t for t, m in enumerate(r.response_mask) if m]
        p = torch.stack([logits[t - 1].softmax(-1)[r.tokens[t]] for t in sampled])
        a = torch.tensor([r.advantages[t] for t in sampled])
        (-(a * p / p.detach()).sum() / num_tokens).backward()
    return {f"lm.{n}": p.grad.clone() for n, p in lm.named_parameters()}


def gradient(policy, batches, num_tokens):
    policy.zero_grad()
    for b in batches:
        logprobs, _ = policy(b)
        loss, _ = clipped_policy_loss(
            logprobs, logprobs.detach(), b.advantages, b.response_mask, clip_low=0.2, clip_high=0.2
        )
        (loss.sum() / num_tokens).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in policy.named_parameters()}


def relative_error(a, b):
    top = sum(((a[n] - b[n]) ** 2).sum() for n in a) ** 0.5
    return float(top / sum((a[n] ** 2).sum() for n in a) ** 0.5)


# ---------------------------------------------------------------------------------------------------- families
@pytest.fixture(scope="module")
def random_lm(tmp_path_factory):
    """random_lm(family): (tiny random model, its codec)."""
    codecs = {}

    def make(family):
        if family not in codecs:
            codecs[family] = Codec(families.write_folder(family, str(tmp_path_factory.mktemp(family))))
        return families.make_lm(family), codecs[family]

    return make


def random_rows(codec, seed=0):
    """Rows of 5 to 700 tokens with 0 to 3 images, in any place; two rows share an image, one shows the same image twice."""
    rng, views = random.Random(seed), {}
    if codec.has_vision:
        for name, (cols, rows) in {"a": (3, 2), "b": (2, 3), "c": (1, 4), "d": (5, 4)}.items():
            size = (cols * codec.patch_size * 2, rows * codec.patch_size * 2)
            views[name] = View.of(Image.effect_noise(size, 60).convert("RGB"))
    rows = []
    # A number is so many text tokens, a letter an image.
    for parts in [(5,), (10, "a", 30), (10, "a", 30), (4, "b", 4, "c", 1, "d", 2), (700,), (3, "d", 1, "d"), (9,)]:
        tokens = []
        for p in parts:
            if isinstance(p, int):
                tokens += [rng.randrange(90) for _ in range(p)]
            elif codec.has_vision:
                tokens += codec.expand(codec.image_ids(), [views[p].image.size])
        shown = [views[p] for p in parts if p in views]
        rows.append(with_advantage(Trace(tokens, [0] + [1] * (len(tokens) - 1), shown, []), 1.0))
    return rows


# ---------------------------------------------------------------------------------------------------- logits
def check_logits(plain, fast, codec, rows, tolerance):
    """Largest error over the largest logit."""
    batch = pack_rows(rows, codec)
    with torch.no_grad():
        packed = fast.lm.get_output_embeddings()(hidden_states(fast.lm.model, batch))[0].split(batch.lengths)
        for row, ours in zip(rows, packed, strict=True):
            theirs = plain_logits(plain, codec, row)
            assert (ours - theirs).abs().max() < tolerance * theirs.abs().max()


def test_packed_logits_of_the_toy_equal_plain_transformers(codec):
    check_logits(plain_toy(), Policy(load_lm(TOY, torch.float32), codec.banned_ids), codec, odd_rows(codec), 2e-6)


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("attention", ["ours", "sdpa"])
def test_packed_logits_of_every_family_equal_plain_transformers(random_lm, family, attention):
    """With our attention, as on a CPU, and with transformers' own, as on a GPU without flash attention; in float64."""
    (plain, codec), (lm, _) = random_lm(family), random_lm(family)
    if attention == "ours":
        use_cpu_fast_paths(lm)
    check_logits(plain.double(), Policy(lm.double(), codec.banned_ids), codec, random_rows(codec), 1e-12)


def test_attention_equals_a_softmax_written_out():
    """Segments of mixed length, two query heads per key-value head, causal and not, against loops."""
    torch.manual_seed(0)
    lengths = [3, 3, 1, 5, 3]
    q, k, v = (torch.randn(1, heads, sum(lengths), 8, dtype=torch.float64) for heads in (4, 2, 2))
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    for causal in (True, False):
        ours, _ = _varlen_attention(None, q, k, v, None, scaling=0.3, is_causal=causal, cu_seq_lens_q=bounds)
        for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            for h in range(4):
                for t in range(start, end):
                    seen = slice(start, t + 1 if causal else end)
                    weights = (0.3 * k[0, h // 2, seen] @ q[0, h, t]).softmax(0)
                    assert torch.allclose(ours[0, t, h], weights @ v[0, h // 2, seen], atol=1e-12)
    with pytest.raises(NotImplementedError, match="segment bounds"):
        _varlen_attention(None, q, k, v, None, scaling=0.3, is_causal=True)


def test_a_trajectory_never_sees_another(codec):
    policy = Policy(load_lm(TOY, torch.float32), codec.banned_ids)
    rows = odd_rows(codec)
    changed = dataclasses.replace(rows[7], tokens=[rows[7].tokens[0], *rows[7].tokens[:0:-1]])
    batches = [pack_rows(r, codec) for r in (rows, [*rows[:7], with_advantage(changed, 0.5), *rows[8:]])]
    with torch.no_grad():
        (before, _), (after, _) = (policy(b) for b in batches)
    others = batches[0].seq_ids != 7
    assert (before - after)[others].abs().max() < 1e-6
    assert (before - after)[~others].abs().max() > 1e-1, "the comparison can fail"


def test_a_model_without_weights_takes_no_memory_until_they_come(tmp_path):
    """What all ranks but the first start from: 470 MB of parameters that are not there yet; ties and buffers are."""
    tokens = dict(vocab_size=2000, tie_word_embeddings=True)
    Qwen2Config(**tokens, hidden_size=1024, intermediate_size=4096, num_hidden_layers=7).save_pretrained(tmp_path)
    before = psutil.Process().memory_info().rss
    lm = load_lm(str(tmp_path), torch.float32, weights=False)
    grown = psutil.Process().memory_info().rss - before
    assert sum(p.nbytes for p in lm.parameters()) > 400e6 and grown < 40e6
    assert lm.lm_head.weight is lm.model.embed_tokens.weight and not lm.training
    assert all(p.device.type == "cpu" and p.requires_grad for p in lm.parameters())
    frequencies = lm.model.rotary_emb.inv_freq
    assert torch.equal(frequencies, 1 / 10000 ** (torch.arange(0, 32, 2) / 32)), "64 heads of 16 pairs"


# ---------------------------------------------------------------------------------------------------- gradients
def test_gradient_does_not_depend_on_the_split(codec):
    """All in one, one by one, packed by plan, shuffled packs, a long row alone: that of plain transformers, to 1e-5."""
    policy, rows = Policy(load_lm(TOY, torch.float32), codec.banned_ids), odd_rows(codec)
    n = sum(sum(r.response_mask) for r in rows)
    expected = plain_gradient(plain_toy(), codec, rows)
    plan = plan_microbatches([len(r.tokens) for r in rows], 1, 200)[0]
    assert [len(chunk) for chunk in plan][0] == 1 and len(rows[plan[0][0]].tokens) > 200, "the long row is alone"
    assert 2 < len(plan) < len(rows)
    shuffled = random.Random(1).sample(range(len(rows)), len(rows))
    for split in [[range(len(rows))], [[i] for i in range(len(rows))], plan, [shuffled[:4], shuffled[4:]]]:
        batches = [pack_rows([rows[i] for i in chunk], codec) for chunk in split]
        assert relative_error(expected, gradient(policy, batches, n)) < 1e-5
    wrong = gradient(policy, [pack_rows(rows[1:], codec)], n)
    assert relative_error(expected, wrong) > 1e-2, "the comparison can fail"


def test_rows_with_zero_advantage_can_be_left_out(codec):
    policy, rows = Policy(load_lm(TOY, torch.float32), codec.banned_ids), make_rows(codec)
    for r in rows[::2]:
        with_advantage(r, 0.0)
    n = sum(sum(r.response_mask) for r in rows)
    everything = gradient(policy, [pack_rows(rows, codec)], n)
    assert relative_error(everything, gradient(policy, [pack_rows(rows[1::2], codec)], n)) < 1e-5


@pytest.mark.parametrize("family", ["toy", "qwen3_vl"])
def test_a_blank_image_changes_nothing_but_reaches_every_parameter(codec, random_lm, family):
    """A parameter of the vision tower without a gradient would leave its rank out of a collective."""
    lm = load_lm(TOY, torch.float32)
    if family != "toy":
        lm, codec = random_lm(family)
    policy = Policy(lm, codec.banned_ids)
    row = with_advantage(Trace([1, 2, 3, 4], [0, 0, 1, 1], [], []), 1.0)
    batch = pack_rows([row], codec)
    without = gradient(policy, [batch], 1)
    add_blank_image(batch, codec)
    with pytest.raises(ValueError, match="pixels are not made"):
        policy(batch)
    batch = with_pixels(batch, codec)
    with_blank = gradient(policy, [batch], 1)
    assert all(torch.equal(without[n], with_blank[n]) for n in without)
    assert all(p.grad is not None for p in policy.parameters())


def test_observation_and_prompt_tokens_get_no_gradient_of_their_own(codec):
    """The loss reads logprobs of sampled tokens alone: changing what an observation token would score changes nothing."""
    policy = Policy(load_lm(TOY, torch.float32), codec.banned_ids)
    batch = pack_rows(make_rows(codec, 4), codec)
    logprobs, _ = policy(batch)
    assert (logprobs[~batch.response_mask] == 0).all()
    spoiled = dataclasses.replace(
        batch,
        advantages=torch.where(batch.response_mask, batch.advantages, 1e6),
        rollout_logprobs=torch.where(batch.response_mask, batch.rollout_logprobs, 1e6),
    )
    loss = [
        clipped_policy_loss(logprobs, logprobs.detach(), b.advantages, b.response_mask, clip_low=0.2, clip_high=0.2)[0]
        for b in (batch, spoiled)
    ]
    assert torch.equal(loss[0], loss[1])


@pytest.mark.slow
def test_two_ranks_give_the_gradient_of_one(codec, tmp_path, run_script):
    """Two gloo ranks with unequal work: rows change ranks; the gradient under FSDP2 is plain transformers' to 1e-5."""
    script = os.path.join(ROOT, "tests", "two_ranks.py")
    run_script(script, str(tmp_path), ranks=2, check=True)
    saved = torch.load(tmp_path / "gradients.pt")
    for case, rows in {"many": odd_rows(codec), "one": make_rows(codec, 2)[1:], "offload": odd_rows(codec)}.items():
        expected = plain_gradient(plain_toy(), codec, rows)
        assert set(saved[case]["gradients"]) == set(expected)
        assert relative_error(expected, saved[case]["gradients"]) < 1e-5
        norm = sum((g**2).sum() for g in expected.values()) ** 0.5
        assert saved[case]["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
