"""Speed, as ratios measured side by side in one run; every command prints a table and, as its last line, a JSON object.

python bench.py step out/toy/log.jsonl     # where the seconds of a run's steps went
python bench.py rollout --inflight 64      # trajectories per second: this loop against turn-lockstep and the limit
python bench.py train                      # forward and backward: packed rows against padded ones
python bench.py mrope                      # rotary positions: ours against transformers' get_rope_index
python bench.py turns                      # tokens prefilled and images encoded over the least possible, 1 to 16 turns
python bench.py ram --gb 5                 # growth of memory while a large image parquet is read as the rollout reads it
python bench.py push --mb 2.5 250          # a weight push to the engine against a plain copy of the same bytes
"""

import argparse
import asyncio
import collections
import concurrent.futures
import copy
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time

import psutil
from rich.console import Console
from rich.table import Table

PHASES = {
    "time/engine": "rollout: something for the engine to do",
    "time/waiting": "rollout: tools, images or rewards alone",
    "time/annotate": "model: old and reference logprobs, values",
    "time/pack": "micro-batches: balance, positions",
    "time/update": "model: forward, backward, optimizer",
    "time/push": "weights to the engine, caches reset",
    "time/probe": "parity check on a fixed prompt",
}
TURNS, TOKENS_PER_TURN, TOOL_SECONDS = 3, 24, 0.2


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
    for r in records:
        r.setdefault("time/engine", r["time/rollout"])  # logs from before it was measured
        r["time/waiting"] = r["time/rollout"] - r["time/engine"]
    for key, text in PHASES.items():
        seconds = statistics.median(r.get(key, 0.0) for r in records)
        rest -= seconds
        table.add_row(text, f"{seconds:.3f}", f"{seconds / total:.0%}")
        result[key.removeprefix("time/") + "_s"] = round(seconds, 3)
    table.add_row("metrics, log and what is left", f"{rest:.3f}", f"{rest / total:.0%}")
    Console().print(table)
    useful = sum(r.get(f"time/{phase}", 0.0) for r in records for phase in ("engine", "annotate", "update"))
    return result | {"neither_engine_nor_model": round(1 - useful / sum(r["time/step"] for r in records), 3)}


# ---------------------------------------------------------------------------------------------------- rollout
class Profile:
    """Samples where this process's threads are, 200 times a second: shares of the wall time, by whose code runs.

    Threads overlap: the shares are those of samples in which some thread was there, and need not add up to 1.
    """

    OWNERS = (  # the first that fits, from the innermost frame outwards
        ("PIL: decoding, cropping, resizing", "/PIL/"),
        ("tokenizers, transformers, torch, numpy", ("/tokenizers/", "/transformers/", "/torch", "/numpy/")),
        ("vLLM's front end", ("/vllm/", "/msgspec/", "/zmq/")),
        ("our own Python", os.path.dirname(os.path.abspath(__file__)) + os.sep),
        ("asyncio and threads", ("/asyncio/", "/concurrent/", "/threading.py", "/selectors.py")),
    )

    def __enter__(self):
        self.samples, self.counts, self.ended = 0, collections.Counter(), threading.Event()
        self.engine = psutil.Process().children(recursive=True)[0]
        self.start = time.perf_counter(), sum(self.engine.cpu_times()[:2])
        self.thread = threading.Thread(target=self._sample)
        self.thread.start()
        return self

    def _sample(self) -> None:
        while not self.ended.wait(0.005):
            self.samples += 1
            here = {self._owner(f) for i, f in sys._current_frames().items() if i != threading.get_ident()}
            self.counts.update(here - {None})

    def _owner(self, frame) -> str | None:
        waits = ("select", "wait", "_worker", "_work", "run", "get", "poll")  # innermost where a thread waits in C
        if frame.f_code.co_name in waits:
            return None
        for name, folders in self.OWNERS:
            if any(
                folder in frame.f_code.co_filename for folder in ([folders] if isinstance(folders, str) else folders)
            ):
                in_site = "site-packages" in frame.f_code.co_filename
                if name != "our own Python" or not in_site:
                    return name
        return None

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()
        wall = time.perf_counter() - self.start[0]
        self.shares = {name: self.counts[name] / self.samples for name, _ in self.OWNERS}
        self.shares["engine process (CPU time)"] = (sum(self.engine.cpu_times()[:2]) - self.start[1]) / wall


def lognormal(rng: random.Random, mean: float, variation: float) -> float:
    """A draw with that mean and coefficient of variation."""
    sigma2 = math.log(1 + variation**2)
    return rng.lognormvariate(math.log(mean) - sigma2 / 2, sigma2**0.5)


def bench_rollout(inflight: int, num: int, serial: bool) -> dict:
    """Same engine, prompts, drawn turn lengths and tool latencies for every way of rolling out."""
    from rollout import Piece, Trajectory
    from tools import ToolBase

    rng = random.Random(0)
    lengths = [[min(120, max(2, round(lognormal(rng, TOKENS_PER_TURN, 1)))) for _ in range(TURNS)] for _ in range(num)]
    latencies = [lognormal(rng, TOOL_SECONDS, 1.5) for _ in range(num * (TURNS - 1))]
    engine, rollout, samples = setup(lengths, inflight, max_turns=TURNS)
    sampled = sum(map(sum, lengths))

    def start(index: int):
        prompt = rollout.prepare(samples[index])
        tool = ToolBase.create("bench_tool", **rollout.tool_kwargs["bench_tool"])
        tool.reset(None, None, {"image": prompt.originals})
        return Trajectory.start(prompt, index), tool

    async def ours():
        return await rollout.run(samples, 1, 1.0, take=itertools.count().__next__)

    async def lockstep(parallel: bool):
        """Every turn waits for the slowest trajectory of the batch; tools run together or one by one."""
        for first in range(0, num, inflight):
            batch = [start(i) for i in range(first, min(first + inflight, num))]
            observations = [Piece([], [], [])] * len(batch)
            for turn in range(TURNS):
                generations = await asyncio.gather(
                    *(
                        engine.generate(
                            t.engine_ids + o.engine_ids,
                            t.views + o.views,
                            max_tokens=0,
                            temperature=1.0,
                            seed=t.group_id + (turn << 32),
                        )
                        for (t, _), o in zip(batch, observations, strict=True)
                    )
                )
                calls = []
                for (t, tool), o, g in zip(batch, observations, generations, strict=True):
                    t.append_observation(o)
                    t.append_sampled(g.ids, g.logprobs, g.version)
                    calls.append(rollout.execute_tool(tool, "", g.ids[-1]))
                results = await asyncio.gather(*calls) if parallel else [await c for c in calls]
                observations = [r[0] for r in results]

    async def limit():
        """The same tokens and images with nothing to wait for: observations in the prompt, all turns in one generation."""
        room = asyncio.Semaphore(inflight)

        async def one(index: int):
            t, tool = start(index)
            o = (await rollout.execute_tool(tool, "", engine.codec.im_end))[0]
            pieces = [o] * (TURNS - 1)
            ids, views = (
                t.engine_ids + [i for p in pieces for i in p.engine_ids],
                t.views + [v for p in pieces for v in p.views],
            )
            async with room:
                await engine.generate(ids, views, max_tokens=0, temperature=1.0, seed=index + (TURNS << 32))

        await asyncio.gather(*(one(i) for i in range(num)))

    ways = {
        "this loop": (ours, latencies),
        "lockstep, parallel tools": (lambda: lockstep(True), latencies),
        "this loop, tools take no time": (ours, None),
        "limit: no tools, no turns": (limit, None),
    }
    if serial:
        ways["lockstep, serial tools"] = (lambda: lockstep(False), latencies)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    engine.run(limit())  # warm-up
    for repeat in range(3):
        for name, (way, seconds) in ways.items():
            if repeat and "serial" in name:  # minutes
                continue
            rollout.tool_kwargs["bench_tool"]["seconds"] = iter(seconds) if seconds else itertools.repeat(0.0)
            engine.run(engine._reset_caches())
            begin = time.perf_counter()
            engine.run(way())
            rates[name].append(num / (time.perf_counter() - begin))
    rollout.tool_kwargs["bench_tool"]["seconds"] = itertools.repeat(0.0)
    engine.run(engine._reset_caches())
    with Profile() as profile:
        engine.run(ours())
    engine.close()
    best = {name: max(r) for name, r in rates.items()}
    table = Table(
        "way", "trajectories/s", "sampled tokens/s", title=f"{num} trajectories of {TURNS} turns, {inflight} in flight"
    )
    for name, rate in best.items():
        table.add_row(name, f"{rate:.1f}", f"{rate * sampled / num:.0f}")
    Console().print(table)
    where = Table(
        "share of the wall time in which some thread of the training process is in",
        "",
        title="this loop, tools take no time",
    )
    for name, share in profile.shares.items():
        where.add_row(name, f"{share:.0%}")
    Console().print(where)
    ratio = lambda a, b: round(best[a] / best[b], 2) if b in best else None  # noqa: E731
    return {
        "inflight": inflight,
        "vs_lockstep_serial": ratio("this loop", "lockstep, serial tools"),
        "vs_lockstep_parallel": ratio("this loop", "lockstep, parallel tools"),
        "of_limit": ratio("this loop, tools take no time", "limit: no tools, no turns"),
        "tokens_per_s": round(best["this loop"] * sampled / num),
        "tokens_per_s_without_tool_time": round(best["this loop, tools take no time"] * sampled / num),
        "own_python": round(profile.shares["our own Python"], 3),
    }


def bench_turns() -> dict:
    """Prompt tokens that the engine computed, over the least possible: the prompt, each observation and each last
    sampled token once. Observations have about 200 tokens and an image, turns 24 sampled tokens."""
    table = Table(
        "turns",
        "prefilled per trajectory",
        "least",
        "ratio",
        "images encoded, of distinct ones",
        title="prefix cache, block size 32",
    )
    result = {}
    for turns in (1, 2, 4, 8, 16):
        engine, rollout, samples = setup([[24] * turns] * 8, 8, max_turns=turns, words=180, fresh_crops=True)
        engine.run(engine._reset_caches())
        trajectories = engine.run(rollout.run(samples, 1, 1.0, take=itertools.count().__next__))
        least = sum(len(t.tokens) - t.num_sampled + len(t.turn_texts) - 1 for t in trajectories) / len(trajectories)
        prefilled = engine.prefilled / len(trajectories)
        distinct = sum(len({v.uuid for v in t.views}) for t in trajectories)
        encoded = engine.encoded.value / distinct
        table.add_row(str(turns), f"{prefilled:.0f}", f"{least:.0f}", f"{prefilled / least:.3f}", f"{encoded:.2f}")
        result[f"prefill_ratio_{turns}"] = round(prefilled / least, 3)
        result[f"encoded_{turns}"] = round(encoded, 3)
        engine.close()
    Console().print(table)
    return result


# ---------------------------------------------------------------------------------------------------- train
@dataclasses.dataclass
class Row:
    """A made-up trajectory: text alone, the first third of it prompt."""

    tokens: list[int]
    response_mask: list[int]
    views: list = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, length: int, rng: random.Random) -> "Row":
        prompt = max(1, length // 3)
        return cls([rng.randrange(90) for _ in range(length)], [0] * prompt + [1] * (length - prompt))


def skewed_lengths(rng: random.Random, num: int, mean: int) -> list[int]:
    """Most trajectories end after a turn, some go on: log-normal with variation 1.5, between mean / 8 and 16 x mean."""
    return [min(16 * mean, max(mean // 8, round(lognormal(rng, mean, 1.5)))) for _ in range(num)]


def padded_batches(rows: list[Row], max_tokens: int) -> list[list[Row]]:
    """Rows in the order they come, as many to a batch as fit when all are padded to the longest of them."""
    batches: list[list[Row]] = [[]]
    for row in rows:
        longest = max(len(r.tokens) for r in [*batches[-1], row])
        if batches[-1] and (len(batches[-1]) + 1) * longest > max_tokens:
            batches.append([])
        batches[-1].append(row)
    return batches


def bench_packing(models: list[str], repeats: int) -> dict:
    """Forward and backward of the same rows and budget: packed, against one padded batch after the other."""
    import torch

    from data import pack_rows, plan_microbatches
    from losses import token_logprobs
    from model import Policy, use_cpu_fast_paths

    def backward(logprobs):
        (-logprobs.sum()).backward()

    def run_padded(lm, batches):
        for rows in batches:
            longest = max(len(r.tokens) for r in rows)
            pad = lambda values: torch.tensor([v + [0] * (longest - len(v)) for v in values])  # noqa: E731, B023
            ids, mask = pad([r.tokens for r in rows]), pad([[1] * len(r.tokens) for r in rows])
            response = pad([r.response_mask for r in rows]).bool()
            hidden = lm.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            backward(token_logprobs(hidden, ids, response, lm.get_output_embeddings().weight)[0])

    def run_packed(lm, batches):
        for batch in batches:
            backward(Policy(lm, [])(batch)[0])

    result, ratios = {}, {"skewed": [], "equal": []}
    for name in models:
        plain, codec, mean, num, max_tokens = train_model(name)
        fast = copy.deepcopy(plain)
        use_cpu_fast_paths(fast)
        size = sum(p.numel() for p in plain.parameters()) / 1e6
        rng = random.Random(0)
        mixes = {"skewed": skewed_lengths(rng, num, mean), "equal": [2 * mean] * (num // 2)}
        table = Table(
            "lengths", "way", "tokens/s", "over padded", "computed tokens", title=f"forward and backward, {size:.0f} M"
        )
        for mix, lengths in mixes.items():
            rows = [Row.of(n, rng) for n in lengths]
            padded = padded_batches(rows, max_tokens)
            plan = plan_microbatches(lengths, 1, max_tokens)[0]
            packed = [pack_rows([rows[i] for i in chunk], codec) for chunk in plan]
            computed = sum(len(b) * max(len(r.tokens) for r in b) for b in padded)
            ways = {
                "padded": (run_padded, plain, padded, computed),
                "packed": (run_packed, fast, packed, sum(lengths)),
                "packed, transformers' dense mask": (run_packed, plain, packed, sum(lengths)),
            }
            seconds = {way: math.inf for way in ways}
            for repeat in range(repeats):
                for way, (run, lm, batches, _) in ways.items():
                    if repeat and "dense" in way:  # slow, and only there to be seen
                        continue
                    begin = time.perf_counter()
                    run(lm, batches)
                    seconds[way] = min(seconds[way], time.perf_counter() - begin)
            about = f"{mix}: {len(rows)} of {min(lengths)} to {max(lengths)}"
            for way, (_, _, _, tokens) in ways.items():
                ratio = seconds["padded"] / seconds[way]
                table.add_row(about, way, f"{sum(lengths) / seconds[way]:.0f}", f"{ratio:.2f}", str(tokens))
                about = ""
            ratio = round(seconds["padded"] / seconds["packed"], 2)
            ratios[mix].append(ratio)
            result[f"packed_{mix}_{name}"] = ratio
        Console().print(table)
    return {"packed_skewed": min(ratios["skewed"]), "packed_equal": min(ratios["equal"]), **result}


def bench_useful(max_tokens: int = 8192, mean: int = 128, per_rank: int = 128) -> dict:
    """Tokens of trajectories over the tokens that all ranks have time for: the rest is a rank waiting for another one
    with a larger micro-batch, or computing a stand-in for one that it has not. Nothing else is wasted: no padding."""
    from data import plan_microbatches

    table = Table(
        "ranks", "useful", "unbalanced", "padded", title=f"useful tokens, {per_rank} skewed trajectories a rank"
    )
    worst, rng = 1.0, random.Random(0)
    for ranks in (1, 2, 8, 64):
        lengths = skewed_lengths(rng, ranks * per_rank, mean)

        def share(plan, lengths=lengths, ranks=ranks):
            loads = [[sum(lengths[i] for i in chunk) for chunk in chunks] for chunks in plan]
            slots = itertools.zip_longest(*loads, fillvalue=0)
            return sum(lengths) / (ranks * sum(max(slot) for slot in slots))

        own = [range(r * per_rank, (r + 1) * per_rank) for r in range(ranks)]
        apart = [plan_microbatches([lengths[i] for i in rows], 1, max_tokens)[0] for rows in own]
        unbalanced = [[[rows[i] for i in chunk] for chunk in plan] for rows, plan in zip(own, apart, strict=True)]
        rows = [Row([0] * n, []) for n in lengths]
        padded = sum(len(b) * max(len(r.tokens) for r in b) for b in padded_batches(rows, max_tokens))
        useful = share(plan_microbatches(lengths, ranks, max_tokens))
        table.add_row(str(ranks), f"{useful:.1%}", f"{share(unbalanced):.1%}", f"{sum(lengths) / padded:.1%}")
        worst = min(worst, useful)
    Console().print(table)
    return {"useful": round(worst, 3)}


def bench_loss(vocabulary: int = 150_000, tokens: int = 4096, width: int = 512) -> dict:
    """Log-probabilities and their gradient, against the plain way with all the logits; each in a process of its own."""
    table = Table(
        "way", "seconds", "peak memory above the inputs, MB", title=f"{tokens} tokens, {vocabulary} ids, width {width}"
    )
    rates = {}
    for way in ("ours", "plain"):
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            rates[way] = pool.submit(_loss, way, vocabulary, tokens, width).result()
        table.add_row(way, f"{rates[way][0]:.1f}", f"{rates[way][1]:.0f}")
    Console().print(table)
    (seconds, memory), (plain_seconds, plain_memory) = rates["ours"], rates["plain"]
    return {"loss_mem": round(memory / plain_memory, 3), "loss_time": round(seconds / plain_seconds, 2)}


def _loss(way: str, vocabulary: int, tokens: int, width: int) -> tuple[float, float]:
    """(best seconds of three, peak MB above what was there before)"""
    import torch

    from losses import token_logprobs

    torch.manual_seed(0)
    hidden = torch.randn(1, tokens + 1, width, requires_grad=True)
    head = (torch.randn(vocabulary, width) / width**0.5).requires_grad_()
    ids = torch.randint(vocabulary, (1, tokens + 1))
    mask = torch.ones(1, tokens + 1, dtype=torch.bool)
    mask[0, 0] = False

    def plain():
        logits = hidden[0, :-1] @ head.T
        return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])

    seconds, before = [], psutil.Process().memory_info().rss
    _reset_peak()
    for _ in range(3):
        hidden.grad = head.grad = None
        begin = time.perf_counter()
        logprobs = plain() if way == "plain" else token_logprobs(hidden, ids, mask, head)[0]
        logprobs.sum().backward()
        seconds.append(time.perf_counter() - begin)
        del logprobs
    return min(seconds), (_peak() - before) / 2**20


def _reset_peak(pid: int | str = "self") -> None:
    with open(f"/proc/{pid}/clear_refs", "w") as f:
        f.write("5")  # the high-water mark starts again from here


def _peak(pid: int | str = "self") -> int:
    """Most resident memory of a process since `_reset_peak`, in bytes."""
    with open(f"/proc/{pid}/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))


def train_model(name: str):
    """(model, codec, mean length, rows, micro-batch tokens) of the toy or of a text model of 50 M random parameters."""
    import torch
    from transformers import AutoModelForImageTextToText, Qwen2Config, Qwen2ForCausalLM

    from data import Codec
    from mrope import RopeRules

    toy_base = os.path.join(os.path.dirname(os.path.abspath(__file__)), "assets", "toy_base")
    codec = Codec(toy_base)
    if name == "tiny":
        return AutoModelForImageTextToText.from_pretrained(toy_base, dtype=torch.float32), codec, 128, 64, 8192
    codec.has_vision, codec.rope = False, RopeRules()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=16384,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=13,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config), codec, 64, 32, 4096


# ---------------------------------------------------------------------------------------------------- a real engine
def setup(lengths: list[list[int]], inflight: int, *, max_turns: int, words: int = 0, fresh_crops: bool = False):
    """(engine, rollout, samples): a real vLLM on the toy's model with a longer context, that samples as many tokens as
    `lengths[trajectory][turn]` says, and a tool that waits and answers with a crop (`fresh_crops`: another one each
    turn) and `words` characters of text. `engine.encoded` counts the images that pass the engine's vision tower."""
    from vllm.v1.core.sched.scheduler import Scheduler

    import toy
    from data import Codec, parse_row
    from engine import VLLMEngine
    from rollout import Rollout, RolloutLimits
    from tools import ToolBase

    encoded_images = multiprocessing.Value("l", 0)  # shared with the forked engine
    schedule = Scheduler.schedule

    def counting_schedule(self, *args, **kwargs):
        output = schedule(self, *args, **kwargs)
        encoded_images.value += sum(map(len, output.scheduled_encoder_inputs.values()))
        return output

    class Engine(VLLMEngine):
        prefilled, encoded = 0, encoded_images

        async def generate(self, ids, views, *, max_tokens, temperature, seed):
            drawn, turn = lengths[seed % (1 << 32)], seed >> 32
            n = drawn[turn] if turn < len(drawn) else sum(drawn)
            g = await super().generate(ids, views, max_tokens=n, temperature=temperature, seed=seed)
            self.prefilled += g.prefilled
            return dataclasses.replace(g, stopped=True)

        def _sampling_params(self, max_tokens, temperature, seed):
            params = super()._sampling_params(max_tokens, temperature, seed)
            params.min_tokens = max_tokens
            return params

    class BenchTool(ToolBase):
        name = "bench_tool"

        def __init__(self, *args, seconds=None, **kwargs):
            super().__init__()
            self.seconds, self.calls = seconds, 0

        def reset(self, raw_prompt, multi_modal_data, origin_multi_modal_data, **kwargs):
            self.image = origin_multi_modal_data["image"][0]

        async def execute(self, text, **kwargs):
            self.calls += 1
            if self.calls == max_turns:
                return "", 0.0, True, {}
            await asyncio.sleep(next(self.seconds))
            message = {"role": "user", "content": "<image>" + "x" * words}
            shift = 7 * self.calls if fresh_crops else 0
            crop = self.image.crop((100 + shift, 100, 300 + shift, 300))
            return {"chat": [message], "multi_modal_data": {"image": [crop]}}, 0.0, False, {"call": "bench", "ok": True}

    folder = tempfile.mkdtemp(prefix="nanoeyes-bench-")
    shutil.copytree(
        os.path.join(os.path.dirname(os.path.abspath(__file__)), "assets", "toy_base"), folder, dirs_exist_ok=True
    )
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    config["text_config"]["max_position_embeddings"] = 8192
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f)
    codec = Codec(folder)
    Scheduler.schedule = counting_schedule
    engine = Engine(folder, codec, max_len=8192, max_images=max_turns + 1, max_num_seqs=inflight, kv_cache_mb=1024)
    Scheduler.schedule = schedule
    shutil.rmtree(folder)
    rows = toy.make_rows(len(lengths), 0, "bench")
    samples = [parse_row(row, f"row {i}", env_name="bench_tool") for i, row in enumerate(rows)]
    limits = RolloutLimits(64, 8000, 1000, max_turns, max_turns + 1, 3, 60, 600)
    rules = toy.RULES
    tool_kwargs = {"bench_tool": {"seconds": itertools.repeat(0.0)}}
    rollout = Rollout(
        engine, codec, rules, limits, lambda t: {"score": 0.0}, tool_kwargs, seed=0, max_inflight=inflight
    )
    return engine, rollout, samples


def bench_mrope(num_images: int = 40, num_tokens: int = 20_000) -> dict:
    """Positions of one long trajectory, on one core: milliseconds, and how many times as long transformers' function
    takes, runs of the one and of the other in turn. The numbers are equal (checked here, and in tests/test_mrope.py)."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    from mrope import RopeRules, rope_positions

    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(os.path.join(os.path.dirname(os.path.abspath(__file__)), "assets", "toy_base"))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config).model
    rng, rules = random.Random(0), RopeRules.of(config)
    grids = [[1, 2 * rng.randint(8, 20), 2 * rng.randint(8, 20)] for _ in range(num_images)]
    pads = [h * w // 4 for _, h, w in grids]
    text = (num_tokens - sum(pads)) // num_images
    tokens = torch.tensor([t for n in pads for t in [1] * text + [rules.image_token_id] * n])
    tokens = torch.cat([tokens, torch.ones(num_tokens - len(tokens), dtype=torch.long)])
    types, grids = (tokens == rules.image_token_id).long()[None], torch.tensor(grids)
    both = (
        lambda: rope_positions(tokens, rules, grids),
        lambda: model.get_rope_index(tokens[None], mm_token_type_ids=types, image_grid_thw=grids)[0][:, 0],
    )
    if not torch.equal(*(f() for f in both)):
        sys.exit("the positions differ from transformers'")
    runs = [[], []]
    for _ in range(20):
        for f, seconds in zip(both, runs, strict=True):
            start = time.perf_counter()
            for _ in range(10):
                f()
            seconds.append((time.perf_counter() - start) / 10)
    ours, theirs = map(statistics.median, runs)
    table = Table("", "ms", title=f"positions of {num_tokens} tokens with {num_images} images")
    table.add_row("rope_positions", f"{1e3 * ours:.2f}")
    table.add_row("get_rope_index", f"{1e3 * theirs:.2f}")
    Console().print(table)
    return {"ms": round(1e3 * ours, 3), "vs_transformers": round(theirs / ours, 1)}


# ---------------------------------------------------------------------------------------------------- ram
def bench_ram(gb: float, group_rows: int, folder: str | None) -> dict:
    """One epoch over a file of noise, shuffled, each prompt prepared and held as long as its step lasts."""
    from data import Codec, ImageRules, ParquetData
    from rollout import Rollout, RolloutLimits

    toy_base = os.path.join(os.path.dirname(os.path.abspath(__file__)), "assets", "toy_base")
    prompts_per_step, limits = 16, RolloutLimits(64, 128, 24, 3, 4, 3, 30, 60)
    rollout = Rollout(None, Codec(toy_base), ImageRules(28, 112**2, 112**2, "box"), limits, None, {}, seed=0)
    with tempfile.TemporaryDirectory(prefix="nanoeyes-bench-", dir=folder) as where:
        path = os.path.join(where, "noise.parquet")
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            rows = pool.submit(_write_noise, path, gb, group_rows).result()  # its memory is not this process's
        size = os.path.getsize(path)
        before = psutil.Process().memory_info().rss
        _reset_peak()
        begin, read, step = time.perf_counter(), 0, collections.deque(maxlen=prompts_per_step)
        table = Table(
            "rows read", "resident, MB", title=f"{size / 2**30:.1f} GB, {rows} rows, {group_rows} to a row group"
        )
        for sample in ParquetData([path]).shuffled(0, 0, rows):
            step.append(rollout.prepare(sample))
            read += len(sample.images[0])
            if len(table.rows) < 8 and read >= size * (len(table.rows) + 1) / 8:
                table.add_row(f"{read / size:.0%}", f"{psutil.Process().memory_info().rss / 2**20:.0f}")
        seconds = time.perf_counter() - begin
    Console().print(table)
    growth = (_peak() - before) / 2**20
    return {
        "growth_mb": round(growth),
        "gb": round(size / 2**30, 2),
        "rows": rows,
        "mb_per_s": round(read / 1e6 / seconds),
    }


def _write_noise(path: str, gb: float, group_rows: int) -> int:
    """A parquet file of 1 MB pictures that nothing can compress; returns its rows. One row group is held at a time."""
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (640, 512)).save(buffer, "BMP")
    header = buffer.getvalue()[:54]
    rows, writer = round(gb * 2**30 / len(buffer.getvalue())), None
    for first in range(0, rows, group_rows):
        group = [
            {
                "data_source": "noise",
                "prompt": [{"role": "user", "content": "<image>What is it?"}],
                "images": [{"bytes": header + os.urandom(640 * 512 * 3), "path": None}],
                "reward_model": {"style": "rule", "ground_truth": str(i)},
                "extra_info": {"index": i},
            }
            for i in range(first, min(rows, first + group_rows))
        ]
        table = pa.Table.from_pylist(group)
        writer = writer or pq.ParquetWriter(path, table.schema, compression="none", use_dictionary=False)
        writer.write_table(table)
    writer.close()
    return rows


# ---------------------------------------------------------------------------------------------------- push
# MB of float32 weights -> (width, inner width, layers) of a text model
PUSH_MODELS = {2.5: (128, 384, 3), 250: (768, 2304, 8), 2000: (2048, 6144, 9)}


def bench_push(sizes: list[float], repeats: int) -> dict:
    """Weight push into a real vLLM, caches reset and all, against copying the same parameters within the trainer."""
    head = ("weights, MB", "push, ms", "plain copy, ms", "of memcpy", "trainer's extra MB", "engine's")
    table = Table(*head, title=f"best of {repeats}, in turn; extra: peak over what was there before the first push")
    result, extra = {}, {}
    for size in sizes:
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            mb, push, copy, more = pool.submit(_push, PUSH_MODELS[size], repeats).result()
        ratios = f"{push * 1e3:.1f}", f"{copy * 1e3:.1f}", f"{copy / push:.3f}"
        table.add_row(f"{mb:.1f}", *ratios, *(f"{m:.0f}" for m in more))
        result[f"{size:g}"], extra[f"{size:g}"] = round(copy / push, 3), [round(m) for m in more]
    Console().print(table)
    return {"of_memcpy": result, "extra_mb": extra}


def _push(shape: tuple[int, int, int], repeats: int) -> tuple[float, float, float, list[float]]:
    """(MB, best seconds of a push, of a plain copy, peak MB of trainer and engine over what they had before the first push);
    in a process of its own, for its engine's sake."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from data import Codec
    from engine import VLLMEngine

    width, inner, layers = shape
    toy_base = os.path.join(os.path.dirname(os.path.abspath(__file__)), "assets", "toy_base")
    config = Qwen2Config(
        vocab_size=238,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    torch.set_num_threads(1)  # a forked engine cannot have a parent whose threads have worked
    with tempfile.TemporaryDirectory(prefix="nanoeyes-bench-") as folder:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(os.path.join(toy_base, name), folder)
        lm = Qwen2ForCausalLM(config)
        lm.save_pretrained(folder)
        engine = VLLMEngine(folder, Codec(folder), max_len=256, max_images=0, max_num_seqs=4, kv_cache_mb=64)
    copies = [p.detach().clone() for p in lm.parameters()]
    pushes, plain = [], []
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    for p in processes:
        _reset_peak(p.pid)
    before = [p.memory_info().rss for p in processes]
    try:
        for k in range(repeats + 1):
            begin = time.perf_counter()
            engine.push(lm, k)
            pushes.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            with torch.no_grad():
                for p, room in zip(lm.parameters(), copies, strict=True):
                    room.copy_(p)
            plain.append(time.perf_counter() - begin)
        extra = [(_peak(p.pid) - rss) / 1e6 for p, rss in zip(processes, before, strict=True)]
    finally:
        engine.close()
    mb = sum(p.nbytes for p in lm.parameters()) / 1e6
    # The first push makes the shared file.
    return mb, min(pushes[1:]), min(plain[1:]), [extra[0], max(extra[1:])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("step", help="where the seconds of a run's steps went").add_argument("log")
    one = commands.add_parser("rollout", help="trajectories per second against turn-lockstep and the limit")
    one.add_argument("--inflight", type=int, default=64)
    one.add_argument("--trajectories", type=int, default=256)
    one.add_argument("--serial", type=int, default=1, help="0 leaves the slow lockstep with serial tools out")
    commands.add_parser("turns", help="prefilled tokens over the least possible")
    commands.add_parser("mrope", help="rotary positions of a long trajectory against transformers' get_rope_index")
    two = commands.add_parser("train", help="forward and backward, packed against padded")
    two.add_argument("--models", nargs="+", default=["tiny", "50m"], choices=["tiny", "50m"])
    two.add_argument("--repeats", type=int, default=3, help="the best of so many, one after the other in turn")
    three = commands.add_parser("ram", help="growth of memory while a large image parquet is read")
    three.add_argument("--gb", type=float, default=5)
    three.add_argument("--group-rows", type=int, default=64, help="rows of 1 MB to a row group")
    three.add_argument("--folder", help="where the file is made, and deleted afterwards; default: the temp folder")
    four = commands.add_parser("push", help="weight push against a plain copy of the same bytes")
    four.add_argument("--mb", type=float, nargs="+", default=list(PUSH_MODELS), choices=list(PUSH_MODELS))
    four.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.command == "step":
        result = step(args.log)
    elif args.command == "rollout":
        result = bench_rollout(args.inflight, args.trajectories, bool(args.serial))
    elif args.command == "mrope":
        result = bench_mrope()
    elif args.command == "train":
        result = bench_packing(args.models, args.repeats) | bench_useful() | bench_loss()
    elif args.command == "ram":
        result = bench_ram(args.gb, args.group_rows, args.folder)
    elif args.command == "push":
        result = bench_push(args.mb, args.repeats)
    else:
        result = bench_turns()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
