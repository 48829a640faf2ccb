"""The policy's forward: fast paths, shared images, gradients that do not depend on how rows are laid out."""

import copy
import os
import random
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, TOY
from transformers import AutoModelForImageTextToText

from data import add_blank_image, make_microbatches, pad_rows
from losses import clipped_policy_loss
from model import Policy, load_lm
from toy import TraceMaker


def make_rows(codec, num=10, seed=0):
    """Supervised traces as rows, with random advantages."""
    rng = random.Random(seed)
    make = TraceMaker(codec, rng)
    noise = dict(sigma=0.2, max_log_scale=0.5)
    rows = [make.zoom(noise) if i % 3 else make.direct() for i in range(num)]
    for r in rows:
        a = rng.uniform(-1, 1)
        r.__dict__["advantage"] = a
        r.__class__ = type(
            "Row",
            (r.__class__,),
            {"advantages": property(lambda self: [self.advantage * m for m in self.response_mask])},
        )
    return rows


def gradient(policy, batches, num_tokens):
    policy.zero_grad()
    for b in batches:
        logprobs, _ = policy(b)
        loss, _ = clipped_policy_loss(
            logprobs, logprobs.detach(), b.advantages, b.response_mask, clip_low=0.2, clip_high=0.2
        )
        (loss / num_tokens).backward()
    return {n: p.grad.clone() for n, p in policy.named_parameters()}


def relative_error(a, b):
    top = sum(((a[n] - b[n]) ** 2).sum() for n in a) ** 0.5
    return float(top / sum((a[n] ** 2).sum() for n in a) ** 0.5)


def test_fast_paths_equal_plain_transformers(codec):
    """Logits of our forward (shared images, matmul patch embedding, batched vision attention) against the plain model."""
    plain = AutoModelForImageTextToText.from_pretrained(TOY, dtype=torch.float32, attn_implementation="eager").eval()
    policy = Policy(load_lm(TOY, torch.float32), codec.banned_ids)
    rows = make_rows(codec, 6)
    batch = pad_rows(rows, codec)
    with torch.no_grad():
        hidden = policy.hidden(batch)
        for i, r in enumerate(rows):
            ids = torch.tensor(r.tokens)[None]
            pixels, grids = codec.pixel_values([v.image for v in r.views])
            types = (ids == codec.image_token_id).long()
            out = plain.model(
                input_ids=ids, pixel_values=pixels, image_grid_thw=grids, mm_token_type_ids=types
            ).last_hidden_state
            assert torch.allclose(hidden[i, : len(r.tokens)], out[0], atol=2e-4, rtol=1e-4), (
                (hidden[i, : len(r.tokens)] - out[0]).abs().max()
            )


def test_gradient_does_not_depend_on_the_split(codec):
    policy = Policy(load_lm(TOY, torch.float32), codec.banned_ids)
    rows = make_rows(codec)
    n = sum(sum(r.response_mask) for r in rows)
    whole = gradient(policy, [pad_rows(rows, codec)], n)
    assert relative_error(whole, gradient(policy, [pad_rows([r], codec) for r in rows], n)) < 1e-5
    assert relative_error(whole, gradient(policy, make_microbatches(rows[::-1], codec, 300), n)) < 1e-5
    live = [r for r in rows if r.advantage > 0]
    assert relative_error(whole, gradient(policy, [pad_rows(live, codec)], n)) > 1e-2, "the comparison can fail"


def test_rows_with_zero_advantage_can_be_left_out(codec):
    policy = Policy(load_lm(TOY, torch.float32), codec.banned_ids)
    rows = make_rows(codec)
    for r in rows[::2]:
        r.__dict__["advantage"] = 0.0
    n = sum(sum(r.response_mask) for r in rows)
    everything = gradient(policy, [pad_rows(rows, codec)], n)
    assert relative_error(everything, gradient(policy, [pad_rows(rows[1::2], codec)], n)) < 1e-5


def test_a_blank_image_changes_nothing(codec):
    policy = Policy(load_lm(TOY, torch.float32), codec.banned_ids)

    class TextRow:
        tokens, response_mask, rollout_logprobs, advantages, views = (
            [1, 2, 3, 4],
            [0, 0, 1, 1],
            [0.0] * 4,
            [0, 0, 1.0, 1.0],
            [],
        )

    batch = pad_rows([TextRow()], codec)
    without = gradient_or_zero(policy, batch)
    add_blank_image(batch, codec)
    assert batch.pixel_values is not None
    with_blank = gradient_or_zero(policy, batch)
    assert all(torch.equal(without[n], with_blank[n]) for n in without)


def gradient_or_zero(policy, batch):
    policy.zero_grad()
    policy(batch)[0].sum().backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in policy.named_parameters()}


def test_observation_and_prompt_tokens_get_no_gradient_of_their_own(codec):
    """The loss reads logprobs of sampled tokens alone: changing what an observation token would score changes nothing."""
    policy = Policy(load_lm(TOY, torch.float32), codec.banned_ids)
    batch = pad_rows(make_rows(codec, 4), codec)
    logprobs, _ = policy(batch)
    assert (logprobs[~batch.response_mask] == 0).all()
    spoiled = copy.copy(batch)
    spoiled.advantages = torch.where(batch.response_mask, batch.advantages, 1e6)
    spoiled.rollout_logprobs = torch.where(batch.response_mask, batch.rollout_logprobs, 1e6)
    loss = [
        clipped_policy_loss(logprobs, logprobs.detach(), b.advantages, b.response_mask, clip_low=0.2, clip_high=0.2)[0]
        for b in (batch, spoiled)
    ]
    assert loss[0] == loss[1]


@pytest.mark.slow
def test_two_ranks_give_the_gradient_of_one(codec, tmp_path):
    """FSDP2 through accelerate on two gloo ranks, rows split unevenly, one rank with text only: gradients to 1e-5."""
    script = os.path.join(ROOT, "tests", "two_ranks.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        script,
        str(tmp_path),
    ]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.path.join(ROOT, 'tests')}"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    saved = torch.load(tmp_path / "gradients.pt")
    rows = make_rows(codec, 8) + [text_row(codec)]
    policy = Policy(load_lm(TOY, torch.float32), codec.banned_ids)
    one = gradient(policy, [pad_rows(rows, codec)], sum(sum(r.response_mask) for r in rows))
    assert set(saved["gradients"]) == set(one)
    assert relative_error(one, saved["gradients"]) < 1e-5
    norm = sum((g**2).sum() for g in one.values()) ** 0.5
    assert saved["grad_norm"] == pytest.approx(float(norm), rel=1e-5)


def text_row(codec):
    class TextRow:
        views: list = []
        tokens = codec.encode("What is the digit") + codec.encode("<answer>7</answer>", tags=True)
        response_mask = [0] + [1] * (len(tokens) - 1)
        rollout_logprobs = [0.0] * len(tokens)
        advantages = [0.3 * m for m in response_mask]

    return TextRow()
