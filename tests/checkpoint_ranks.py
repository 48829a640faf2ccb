"""Run by test_checkpoint.py under torchrun or alone: one update, a checkpoint, the next update on the same trajectories.

With a second argument it goes on from there instead, with as many ranks as there are.
"""

import sys

import torch
from conftest import TOY
from test_learner import BASE, spare_row, trajectories

import checkpoint
import dist
from data import Codec
from learner import Learner
from model import _whole


def update(learner, codec, step):
    rows, spare = trajectories(codec), spare_row(codec)
    rows = [t for t in rows if t.group_id % dist.WORLD_SIZE == dist.RANK]  # a group is on one rank
    learner.annotate(rows, spare)
    log = learner.advantages(rows)
    return log | learner.update(learner.minibatches(rows, spare, step), step)


def main(folder, path=None):
    dist.init()
    codec = Codec(TOY)
    cfg = BASE.__class__(**{**vars(BASE), "out_dir": folder, "advantage": "gae", "kl_reward_coef": 0.1})
    learner = Learner(cfg, codec)
    if path:
        meta = checkpoint.load(path, learner)
        assert meta["step"] == 1 and meta["rows_drawn"] == 6 and meta["log_position"] == 7
    else:
        update(learner, codec, 0)
        try:
            checkpoint.save(cfg, learner, step=1, rows_drawn=6, log_position=7)
        except checkpoint.CheckpointError as e:  # for the test: what each rank is told
            with open(f"{folder}/told{dist.RANK}", "w") as f:
                f.write(str(e))
    log = update(learner, codec, 1)
    parameters = {
        f"{name}.{n}": _whole(p)
        for name, module in (("policy", learner.policy), ("critic", learner.critic))
        for n, p in module.named_parameters()
    }
    if dist.IS_MAIN:
        torch.save({"log": log, "parameters": parameters}, f"{folder}/{'resumed' if path else 'whole'}.pt")
    dist.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
