"""Run by test_rollout.py under torchrun: two ranks take groups from one counter; the trajectories of rank 1 take longer."""

import asyncio
import sys

from conftest import TOY
from fake_engine import ScriptedEngine
from test_rollout import LIMITS, RULES, sample

import dist
from data import Codec
from rollout import Rollout


class Timed(ScriptedEngine):
    async def generate(self, ids, views, **kwargs):
        await asyncio.sleep(0.02 if dist.RANK == 0 else 0.4)
        return await super().generate(ids, views, **kwargs)


def main():
    dist.init()
    codec = Codec(TOY)
    rollout = Rollout(
        Timed(codec, ["a"] * 100), codec, RULES, LIMITS, lambda t: {"score": 0.0}, {}, seed=0, max_inflight=4
    )
    samples = [sample(env="") for _ in range(12)]
    dist.gather(None)  # both are here
    trajectories = asyncio.run(rollout.run(samples, 2, 1.0, take=lambda: dist.take("step 0"), first_group=40))
    taken = dist.gather([t.group_id for t in trajectories])
    if dist.IS_MAIN:
        with open(sys.argv[1], "w") as f:
            f.write(repr(taken))
    dist.finish()


if __name__ == "__main__":
    main()
