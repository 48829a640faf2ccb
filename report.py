"""What a run tells: the progress display, `log.jsonl`, the curve, and a few trajectories to read. First rank only."""

import contextlib
import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version

import psutil
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import dist
from config import Config

SHOWN = ("reward/mean", "acc/mean", "tool/rate", "iou/mean", "mismatch/max", "time/step")


def _commit() -> str:
    """The commit of this checkout, "+" behind it if files differ from it, "unknown" outside git."""
    here = os.path.dirname(os.path.abspath(__file__))
    run = lambda *args: subprocess.run(["git", "-C", here, *args], capture_output=True, text=True)  # noqa: E731
    head = run("rev-parse", "HEAD")
    if head.returncode:
        return "unknown"
    return head.stdout.strip() + ("+" if run("status", "--porcelain", "--untracked-files=no").stdout.strip() else "")


def _vllm_version() -> str:
    import vllm

    return vllm.__version__


def memory_mb() -> dict[str, float]:
    """Resident memory of this process and of its children (the engine), in MB."""
    me = psutil.Process()
    children = 0
    for child in me.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            children += child.memory_info().rss
    return {"memory/trainer_mb": me.memory_info().rss / 2**20, "memory/engine_mb": children / 2**20}


class Report:
    """One JSON object per line: first the run itself, then one per step and one per evaluation."""

    def __init__(self, cfg: Config, log_position: int = 0):
        """`log_position`: where a run that goes on cuts the log, so that no step stands in it twice; 0 = a new log."""
        self.cfg, self.progress, self.file = cfg, None, None
        if not dist.IS_MAIN:
            return
        os.makedirs(cfg.out_dir, exist_ok=True)
        self.path = os.path.join(cfg.out_dir, "log.jsonl")
        # Cut at the checkpoint. One that another out_dir has written finds no log here, or a shorter one.
        length = os.path.getsize(self.path) if os.path.exists(self.path) else 0
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - for the whole run
        self.file.truncate(min(log_position, length))
        packages = ("torch", "transformers", "accelerate", "pillow", "pyarrow")
        self._write(
            {
                "config": dataclasses.asdict(cfg),
                "commit": _commit(),
                "versions": {
                    "python": platform.python_version(),
                    "vllm": _vllm_version(),
                    **{p: version(p) for p in packages},
                },
                "hardware": {
                    "machine": platform.machine(),
                    "cpu_cores": os.cpu_count(),
                    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
                    "ranks": dist.WORLD_SIZE,
                },
                "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            }
        )
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(),
        )
        self.progress.start()
        self.steps = self.progress.add_task("steps", total=cfg.steps)
        self.running = self.progress.add_task(
            "trajectories of this step", total=cfg.prompts_per_step * cfg.group_size * cfg.rollout_tp // dist.WORLD_SIZE
        )

    def _write(self, record: dict) -> None:
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    @property
    def position(self) -> int:
        return self.file.tell() if self.file else 0

    def note(self, text: str) -> None:
        if self.progress:
            self.progress.console.print(text, highlight=False, soft_wrap=True)

    def tick(self, trajectory) -> None:
        """A trajectory of the running step has ended."""
        if self.progress:
            self.progress.advance(self.running)

    def log(self, record: dict) -> None:
        """A step's metrics or an evaluation: a line on the screen and one in the log."""
        if not self.progress:
            return
        self._write({k: round(v, 9) if isinstance(v, float) else v for k, v in record.items()})
        evaluation = any(k.startswith("eval/") for k in record)
        keys = (
            [k for k in record if k in ("eval/accuracy", "eval/tool_rate", "eval/iou")]
            if evaluation
            else [k for k in SHOWN if k in record]
        )
        text = "  ".join(f"{k} {record[k]:.1e}" if k == "mismatch/max" else f"{k} {record[k]:.3f}" for k in keys)
        self.note(f"step {record['step']:3d}  {text}")
        if not evaluation:
            self.progress.update(self.steps, completed=record["step"])
        self.progress.reset(self.running)

    def finish(self, trajectories: list, codec) -> None:
        """Draws the curve and prints a few trajectories with their masks."""
        if not self.progress:
            return
        self.progress.stop()
        curve = os.path.join(self.cfg.out_dir, "curve.png")
        draw_curve([self.path], curve)
        for t in trajectories:
            show_trajectory(t, codec, self.progress.console)
        self.note(f"log {self.path}\ncurve {curve}\ncheckpoint {os.path.join(self.cfg.out_dir, 'final')}")

    def close(self) -> None:
        if self.progress:
            self.progress.stop()
            self.file.close()


def show_trajectory(t, codec, console: Console) -> None:
    """Text with the mask: sampled tokens (mask 1) are green and stand between ⟦ ⟧, an image is one word."""
    console.rule(f"{t.sample.where}  reward {t.reward:g}  {t.finish_reason}  truth {t.sample.ground_truth}")
    pieces, at, image = [], 0, 0
    while at < len(t.tokens):
        end = at
        if codec.has_vision and t.tokens[at] == codec.image_token_id:
            end += codec.num_image_tokens(t.views[image].image.size)
            width, height = t.views[image].image.size
            pieces.append(f"[blue]\\[image {width}x{height}: {end - at} tokens][/blue]")
            image += 1
        else:
            sampled = t.response_mask[at]
            while (
                end < len(t.tokens)
                and t.response_mask[end] == sampled
                and not (codec.has_vision and t.tokens[end] == codec.image_token_id)
            ):
                end += 1
            text = escape(codec.decode(t.tokens[at:end]))
            pieces.append(f"[bold green]⟦{text}⟧[/bold green]" if sampled else text)
        at = end
    console.print("".join(pieces), highlight=False, soft_wrap=True)


def draw_curve(logs: list[str], path: str) -> None:
    """Accuracy, tool rate and IoU over steps: sampled in training (lines), on held-out rows (dots). One color per run; per
    algorithm if there are several."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {
        "accuracy": ("acc/mean", "eval/accuracy"),
        "tool-call rate": ("tool/rate", "eval/tool_rate"),
        "IoU of called boxes": ("iou/mean", "eval/iou"),
    }
    fig, axes = plt.subplots(1, 3, figsize=(12, 3.4), constrained_layout=True)
    runs = []
    for log in logs:
        with open(log, encoding="utf-8") as f:
            head, *records = map(json.loads, f)
        runs.append((head["config"], records))
    algorithms = sorted({cfg.get("advantage", "grpo") for cfg, _ in runs})
    for cfg, records in runs:
        no_tool, algorithm = cfg["env_name"] == "", cfg.get("advantage", "grpo")
        style = dict(label=f"seed {cfg['seed']}" + (", no tool" if no_tool else ""), ls="--" if no_tool else "-")
        if len(algorithms) > 1:
            style |= dict(label=f"{algorithm} {style['label']}", color=f"C{algorithms.index(algorithm)}")
        for ax, (title, (train_key, eval_key)) in zip(axes, panels.items(), strict=True):
            train = [(r["step"], r[train_key]) for r in records if train_key in r]
            held_out = [(r["step"], r[eval_key]) for r in records if eval_key in r]
            color = None
            if train:
                color = ax.plot(*zip(*train, strict=True), lw=1, **style)[0].get_color()
            if held_out:
                ax.plot(*zip(*held_out, strict=True), "o", color=color, ms=6)
            ax.set(title=title, xlabel="step", ylim=(0, 1))
            ax.grid(alpha=0.3)
    axes[0].axhline(0.1, color="grey", ls="--", lw=1)
    axes[0].annotate("guessing", (0, 0.11), color="grey", fontsize=8)
    axes[0].legend(fontsize=8)
    fig.savefig(path, dpi=130)
    plt.close(fig)


if __name__ == "__main__":  # python report.py LOG.jsonl ... CURVE.png
    draw_curve(sys.argv[1:-1], sys.argv[-1])
