"""Run by test_model.py under torchrun: what ranks exchange, and the gradient of one batch over two FSDP2 ranks."""

import sys
import time

import torch
from conftest import TOY
from PIL import Image
from test_model import make_rows, odd_rows, text_row
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

import dist
from config import load_config
from data import Codec, View
from learner import Learner
from losses import clipped_policy_loss
from model import clip_grad_norm


def check_exchange():
    """Everything arrives once, in order; what a message shares stays shared; nothing of one's own is copied."""
    me, other = dist.RANK, 1 - dist.RANK
    view = View.of(Image.new("RGB", (56, 28), (me, 9, 9)))
    outgoing = [[], []]
    outgoing[me] = [("kept", me, view)]
    outgoing[other] = [("sent", me, view), ("sent again", me, view)]
    got = dist.exchange(outgoing)
    kept = [item for item in got if item[0] == "kept"]
    sent = [item for item in got if item[0] != "kept"]
    assert [item[:2] for item in kept] == [("kept", me)] and kept[0][2] is view
    assert [item[:2] for item in sent] == [("sent", other), ("sent again", other)]
    assert sent[0][2] is sent[1][2], "one image for the whole group"
    assert sent[0][2].image.getpixel((3, 3)) == (other, 9, 9) and sent[0][2].uuid != view.uuid
    assert [item[1] for item in got] == sorted(item[1] for item in got), "in rank order"
    assert dist.exchange([[], ["x"]] if me == 0 else [[], []]) == ([] if me == 0 else ["x"])


def check_share_out(learner, codec):
    """Two ranks share an engine: what rank 0 rolled out is dealt to both by whole groups, about as many tokens each."""
    rows = [text_row(codec, times) for times in (3, 9, 2, 3, 9, 2)]
    for t, group in zip(rows, (1, 0, 2, 1, 0, 2), strict=True):
        t.group_id, t.sample = group, "encoded images"
    learner.cfg.rollout_tp = 2
    mine = learner.share_out(rows if dist.IS_MAIN else [])
    groups = dist.gather([t.group_id for t in mine])
    assert sorted(groups) == [[0, 0], [1, 1, 2, 2]], "the long group alone, the two short ones together"
    everyone = [t for part in dist.gather([(t.tokens, t.sample) for t in mine]) for t in part]
    assert sorted(everyone) == sorted((t.tokens, None) for t in rows), "each row once, its sample left behind"
    assert all(t.sample for t in rows), "and still there"
    learner.cfg.rollout_tp = 1
    assert learner.share_out(rows) is rows


def check_wait():
    """A rank without an engine waits for its neighbour's rollout longer than for an answer of the store."""
    bound, dist._seconds, begin = dist._seconds, 0.5, time.perf_counter()
    if dist.IS_MAIN:
        time.sleep(2)
        dist.tell("rollout ended")
    dist.wait("rollout ended")
    assert dist.IS_MAIN or time.perf_counter() - begin > 1
    dist._seconds = bound


def backward(learner, rows, num_tokens, spare):
    """Gradient and norm after one pass over `rows`, the first three on rank 1; also what each micro-batch holds."""
    batches = learner._microbatches(rows[3:] if dist.IS_MAIN else rows[:3], spare, balance=True)
    for batch in learner._ready(batches):
        logprobs, _ = learner.policy(batch)
        loss, _ = clipped_policy_loss(
            logprobs, logprobs.detach(), batch.advantages, batch.response_mask, clip_low=0.2, clip_high=0.2
        )
        learner.accelerator.backward(loss.sum() * dist.WORLD_SIZE / num_tokens)
    gradients = {n: p.grad.full_tensor().clone() for n, p in learner.policy.named_parameters()}
    norm = clip_grad_norm(learner.policy, 0.0)
    clip_grad_norm(learner.policy, 0.1)  # by the norm over all ranks, not by each rank's own
    clipped = {n: p.grad.full_tensor() for n, p in learner.policy.named_parameters()}
    assert norm > 0.1 and all(torch.allclose(g * 0.1 / norm, clipped[n], rtol=1e-4) for n, g in gradients.items())
    learner.optimizer.zero_grad(set_to_none=True)
    held = [[(r.tokens, r.advantages) for r in b.rows if any(r.response_mask)] for b in batches]
    return {"gradients": gradients, "grad_norm": norm}, dist.gather(held)


def main():
    dist.init()
    taken = dist.gather([dist.take("work") for _ in range(50 if dist.IS_MAIN else 20)])
    assert sorted(taken[0] + taken[1]) == list(range(70)), "each number once"
    check_exchange()
    check_wait()
    codec, config = Codec(TOY), ["configs/toy.py", "--microbatch_tokens=250"]
    learner = Learner(load_config(config), codec)
    assert all(isinstance(p, DTensor) for p in learner.policy.parameters())
    units = [m for m in learner.policy.modules() if isinstance(m, FSDPModule)]
    assert len(units) == 1 + 4 + 2, "the root, decoder layers and vision blocks"
    check_share_out(learner, codec)
    spare = text_row(codec)
    spare.response_mask = [0] * len(spare.tokens)
    saved = {}
    # One row alone leaves the other rank a text-only micro-batch beside one with images.
    for case, rows in {"many": odd_rows(codec), "one": make_rows(codec, 2)[1:]}.items():
        saved[case], held = backward(learner, rows, sum(sum(r.response_mask) for r in rows), spare)
        assert len(held[0]) == len(held[1]) == (2 if case == "many" else 1)
        everyone = [row for ranks in held for chunk in ranks for row in chunk]
        assert sorted(everyone) == sorted((r.tokens, r.advantages) for r in rows), "each row once"
        if case == "many":
            assert all(chunk for ranks in held for chunk in ranks), "both ranks have work"
        else:
            assert held[1] == [[]]
    on_host, rows = Learner(load_config([*config, "--offload=True"]), codec), odd_rows(codec)
    policy = on_host.policy._get_fsdp_state()._fsdp_param_group.offload_policy
    assert isinstance(policy, CPUOffloadPolicy), "FSDP2 itself must know of it"
    half = (
        Learner(load_config([*config, "--dtype=bfloat16"]), codec).policy._get_fsdp_state()._fsdp_param_group.mp_policy
    )
    assert (half.param_dtype, half.reduce_dtype) == (torch.bfloat16, torch.float32)
    saved["offload"], _ = backward(on_host, rows, sum(sum(r.response_mask) for r in rows), spare)
    if dist.IS_MAIN:
        torch.save(saved, f"{sys.argv[1]}/gradients.pt")
    dist.finish()


if __name__ == "__main__":
    main()
