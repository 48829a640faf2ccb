"""Run by test_model.py under torchrun: the gradient of one batch, split unevenly over two FSDP2 ranks."""

import sys

import torch
from conftest import TOY
from test_model import make_rows, text_row
from torch.distributed.tensor import DTensor

import dist
from data import Codec, add_blank_image, pad_rows
from losses import clipped_policy_loss
from model import Policy, clip_grad_norm, load_lm, prepare


def main():
    dist.init()
    taken = dist.gather([dist.take("work") for _ in range(50 if dist.IS_MAIN else 20)])
    assert sorted(taken[0] + taken[1]) == list(range(70)), "each number once"
    codec = Codec(TOY)
    rows = make_rows(codec, 8)
    num_tokens = sum(sum(r.response_mask) for r in [*rows, text_row(codec)])
    own = (
        [rows[:3], rows[3:]] if dist.RANK == 0 else [rows[:0], [text_row(codec)]]
    )  # rank 1: a filler and a text-only batch
    policy = Policy(load_lm(TOY, torch.float32), codec.banned_ids)
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3)
    accelerator, policy, optimizer = prepare(policy, optimizer, world_size=dist.WORLD_SIZE, dtype=torch.float32)
    assert all(isinstance(p, DTensor) for p in policy.parameters())
    for part in own:
        batch = pad_rows(part or rows[:1], codec)
        if not part:
            batch.response_mask[:] = False
        add_blank_image(batch, codec)
        logprobs, _ = policy(batch)
        loss, _ = clipped_policy_loss(
            logprobs, logprobs.detach(), batch.advantages, batch.response_mask, clip_low=0.2, clip_high=0.2
        )
        accelerator.backward(loss * dist.WORLD_SIZE / num_tokens)
    gradients = {n: p.grad.full_tensor().clone() for n, p in policy.named_parameters()}
    norm = clip_grad_norm(policy, 0.0)
    if dist.IS_MAIN:
        torch.save({"gradients": gradients, "grad_norm": norm}, f"{sys.argv[1]}/gradients.pt")
    dist.finish()


if __name__ == "__main__":
    main()
