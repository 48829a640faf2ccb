"""Speed, as ratios measured side by side; every command prints a table and, as its last line, one JSON object.

python bench.py step out/toy/log.jsonl     # where the seconds of a run's steps went
"""

import json
import statistics
import sys

from rich.console import Console
from rich.table import Table

PHASES = {
    "time/rollout": "rollout: engine, tools, images, rewards",
    "time/pack": "micro-batches: pixels, positions, padding",
    "time/update": "forward, backward, optimizer",
    "time/push": "weights to the engine, caches reset",
    "time/probe": "parity check on a fixed prompt",
}


def step(log: str, skip: int = 3) -> dict:
    """Median seconds of each phase over a run's steps, the first `skip` left out (warm-up)."""
    with open(log, encoding="utf-8") as f:
        records = [r for r in map(json.loads, f) if "time/step" in r][skip:]
    if not records:
        sys.exit(f"{log}: no step after the first {skip}")
    total = statistics.median(r["time/step"] for r in records)
    table = Table("phase", "seconds", "share", title=f"{len(records)} steps of {log}")
    result = {"step_s": round(total, 3), "sampled_tokens": statistics.median(r["num_tokens"] for r in records)}
    rest = total
    for key, text in PHASES.items():
        seconds = statistics.median(r[key] for r in records)
        rest -= seconds
        table.add_row(text, f"{seconds:.3f}", f"{seconds / total:.0%}")
        result[key.removeprefix("time/") + "_s"] = round(seconds, 3)
    table.add_row("metrics, log and what is left", f"{rest:.3f}", f"{rest / total:.0%}")
    Console().print(table)
    return result


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "step":
        sys.exit(__doc__)
    print(json.dumps(step(sys.argv[2])))
