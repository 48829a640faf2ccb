"""Checkpoints that survive: sharded, written aside and renamed when whole, the newest whole one found again.

    out_dir/checkpoints/step_000012/
        .metadata, *.distcp     weights and optimizer states, each rank its shards (torch.distributed.checkpoint)
        rank0.pt, rank1.pt ...  random number generators
        meta.json               step, policy_version, data cursor, KL coefficient, log position; size of every other file

    python checkpoint.py export out/7b/checkpoints/step_000080 out/7b/hf     # a folder for transformers and vLLM

Weights and optimizer states can be read by any number of ranks.
"""

import dataclasses
import json
import os
import random
import re
import shutil
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dist
from config import Config


class CheckpointError(Exception):
    """A checkpoint cannot be written or read."""


def _folder(cfg: Config) -> str:
    return os.path.join(cfg.out_dir, "checkpoints")


def _path(cfg: Config, step: int) -> str:
    return os.path.join(_folder(cfg), f"step_{step:06d}")


def _trained(learner) -> dict:
    """name -> (module, optimizer) of what a checkpoint holds; the reference is the model folder itself."""
    pairs = {"policy": (learner.policy, learner.optimizer)}
    if learner.critic:
        pairs["critic"] = (learner.critic, learner.critic_optimizer)
    return {name: (module, getattr(o, "optimizer", o)) for name, (module, o) in pairs.items()}  # accelerate wraps them


def _states(learner) -> dict:
    states = {}
    for name, (module, optimizer) in _trained(learner).items():
        states[name], states[f"{name}_optimizer"] = get_state_dict(module, optimizer)
    return states


def save(cfg: Config, learner, *, step: int, rows_drawn: int, log_position: int) -> str:
    """Writes the checkpoint after `step` steps; all ranks call it together. Returns its folder.

    A failure or a kill at any moment leaves the older ones as they are. Raises CheckpointError, on all ranks.
    """
    whole = _path(cfg, step)
    aside = f"{whole}.tmp"

    def make_folder() -> None:
        if dist.IS_MAIN:
            shutil.rmtree(aside, ignore_errors=True)  # of a run that was killed here
            os.makedirs(aside)

    def write_generators() -> None:
        generators = {"torch": torch.get_rng_state(), "python": random.getstate()}
        torch.save(generators, os.path.join(aside, f"rank{dist.RANK}.pt"))

    def write_states() -> None:
        dcp.save(_states(learner), checkpoint_id=aside, no_dist=dist.WORLD_SIZE == 1)

    # All ranks take each part together and hear of everyone's failure after it: none goes on alone into a collective.
    problems: list[str] = []
    for part in (make_folder, write_generators, write_states):
        problem = ""
        try:
            part()
        except (Exception, dcp.CheckpointException) as e:  # a full disk too; torch's own is not an Exception
            if dist.is_gone(e):  # no one to tell it to
                raise
            problem = _last_line(e)
        problems = [p for p in dist.gather(problem) if p]
        if problems:
            break
    if not problems and dist.IS_MAIN:
        try:
            meta = {
                "step": step,
                "policy_version": step,
                "rows_drawn": rows_drawn,
                "log_position": log_position,
                "kl": learner.kl.state_dict(),
                "skipped_updates": learner.skipped_updates,
                "world_size": dist.WORLD_SIZE,
                "config": dataclasses.asdict(cfg),
                "sizes": {f: os.path.getsize(os.path.join(aside, f)) for f in sorted(os.listdir(aside))},
            }
            with open(os.path.join(aside, "meta.json"), "w", encoding="utf-8") as f:
                json.dump(meta, f, indent=1)
                f.flush()
                os.fsync(f.fileno())
            shutil.rmtree(whole, ignore_errors=True)  # of an earlier run into the same folder
            os.replace(aside, whole)
            kept = [p for p in _all(cfg) if p <= whole][-cfg.keep_checkpoints :]
            for other in set(_all(cfg)) - set(kept):  # old ones; broken ones beyond, which this run has not taken
                shutil.rmtree(other, ignore_errors=True)
        except OSError as e:
            problems = [str(e)]
    problems = [p for ps in dist.gather(problems) for p in ps]
    if problems:
        if dist.IS_MAIN:
            shutil.rmtree(aside, ignore_errors=True)
        free = shutil.disk_usage(cfg.out_dir).free >> 20  # torch's own words seldom say that a disk is full
        raise CheckpointError(f"{whole} cannot be written ({free} MB are free there): {problems[0]}")
    return whole


def _last_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[-1]


def _all(cfg: Config) -> list[str]:
    """Whole and broken checkpoints, oldest first; what was being written when a run was killed is none."""
    folder = _folder(cfg)
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [os.path.join(folder, n) for n in sorted(names) if re.fullmatch(r"step_\d+", n)]


def read_meta(path: str) -> dict:
    """meta.json of a checkpoint whose every file is there in its full size. Raises CheckpointError otherwise."""
    try:
        with open(os.path.join(path, "meta.json"), encoding="utf-8") as f:
            meta = json.load(f)
        for name, size in meta["sizes"].items():
            if os.path.getsize(os.path.join(path, name)) != size:
                raise CheckpointError(f"checkpoint {path!r}: {name} is not whole")
    except (OSError, ValueError, KeyError) as e:
        raise CheckpointError(f"checkpoint {path!r} is not whole: {e}") from None
    return meta


def find(cfg: Config) -> str:
    """What `resume` names: a folder, or with "auto" the newest whole checkpoint of out_dir; "" = begin anew.

    A run that torchrun has started again after a failure goes on from its newest whole checkpoint, if it has one. All
    ranks call it together; raises CheckpointError where they do not see the same.
    """
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    path = _newest(cfg) if restarted or cfg.resume == "auto" else ""
    if not path and cfg.resume and cfg.resume != "auto":
        path = cfg.resume
        read_meta(path)
    seen = set(dist.gather(path))
    if len(seen) > 1:
        raise CheckpointError(
            f"the ranks see different checkpoints ({', '.join(map(repr, sorted(seen)))}): share out_dir"
        )
    return path


def _newest(cfg: Config) -> str:
    for path in reversed(_all(cfg)):
        if not (why := _broken(path)):
            return path
        if dist.IS_MAIN:
            print(f"{why}; taking the one before", flush=True)
    return ""


def _broken(path: str) -> str:
    """Why a checkpoint is not whole, "" if it is."""
    try:
        read_meta(path)
        return ""
    except CheckpointError as e:
        return str(e)


def refuse_newer(cfg: Config, step: int) -> None:
    """Raises CheckpointError if out_dir holds a whole checkpoint beyond `step`, where this run begins: it is another run's,
    and a restart would go on from it."""
    newer = [path for path in _all(cfg) if path > _path(cfg, step) and not _broken(path)]
    if newer:
        raise CheckpointError(
            f"{newer[-1]!r} is of an earlier run, and this one begins at step {step}: --resume=auto goes on from it; to begin"
            " there all the same, choose another --out_dir or move it away"
        )


def load(path: str, learner) -> dict:
    """Puts a checkpoint's states into the learner, in place, and returns its meta.json."""
    meta, states = read_meta(path), _states(learner)
    try:
        dcp.load(states, checkpoint_id=path, no_dist=dist.WORLD_SIZE == 1)
    except (Exception, dcp.CheckpointException) as e:  # other shapes or names than this run's: torch says which
        if dist.is_gone(e):
            raise
        raise CheckpointError(f"checkpoint {path!r} does not fit this run: {_last_line(e)}") from None
    for name, (module, optimizer) in _trained(learner).items():
        set_state_dict(module, optimizer, model_state_dict=states[name], optim_state_dict=states[f"{name}_optimizer"])
    learner.kl.load_state_dict(meta["kl"])
    learner.skipped_updates = meta["skipped_updates"]
    if meta["world_size"] == dist.WORLD_SIZE:
        rng = torch.load(os.path.join(path, f"rank{dist.RANK}.pt"), weights_only=False)
        torch.set_rng_state(rng["torch"])
        random.setstate(rng["python"])
    return meta


def export(path: str, folder: str) -> None:
    """Writes a checkpoint's policy as a Hugging Face folder, in one process."""
    from data import Codec
    from learner import Learner
    from model import save_hf

    cfg = dataclasses.replace(Config(**read_meta(path)["config"]), offload=False)
    learner = Learner(cfg, Codec(cfg.model))
    load(path, learner)
    save_hf(learner.policy, learner.accelerator, cfg.model, folder)


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] != "export":
        sys.exit("python checkpoint.py export CHECKPOINT FOLDER")
    from data import DataError

    try:
        export(*sys.argv[2:])
    except (CheckpointError, DataError, OSError) as e:
        sys.exit(f"{type(e).__name__}: {e}")
