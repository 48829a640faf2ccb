"""The budget of a run, on paper: batch arithmetic, token budgets, memory per GPU and per host; nothing is loaded.

    python train.py --plan configs/7b.py                        # for 1, 8, 16, 32 and 64 GPUs
    python train.py --plan configs/7b.py --num_gpus=[8,24]      # any key of config.py may follow as well

Needs the model folder's config.json alone: the model is built on torch's meta device, where tensors have shapes and no
memory, and its real parameters are counted. Every item is printed with its formula; what is assumed and not derived
stands in the constants below. GB are 2^30 bytes. These are numbers to choose settings by, on the careful side: each item
is the most that the config permits. What a GPU really takes has not been compared with them yet.
"""

import math
import os
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from config import Config, ConfigError, load_config
from model import add_lora

GB = 2**30
GPUS_PER_HOST = 8
NUM_GPUS = [1, 8, 16, 32, 64]
# Assumed, not derived:
RESERVE_GB = 5.0  # of a GPU: CUDA contexts of trainer and sleeping engine, NCCL's buffers, fragmentation
WORKSPACE_GB = 4.0  # of an awake engine: its activations, sampling over the vocabulary, CUDA graphs
PROCESS_GB = 6.0  # of a host, per GPU: trainer and engine processes with their libraries
MM_CACHE_GB = 1.0  # of a host, per engine: processed images, on both sides of its queue
ENCODED_MB = 1.0  # an image as it stands in the data
GROUP_ROWS = 64  # of a parquet row group
ORIGINAL_PIXELS = 4e6  # an unmodified image, decoded
TOKEN_BYTES = 320  # a trajectory's parallel lists, per token: ten entries of a pointer and a number
LOGPROB_CHUNK = 1 << 24  # logits that losses.token_logprobs holds at a time
PUSH_BUCKET_GB = 1.0  # packed buffer of vLLM's ipc weight transfer, unless a parameter is larger
PINNED = 2.0  # torch rounds a block of pinned host memory up to a power of two: at most this much more


@dataclass
class Shape:
    """What the formulas need to know about a model."""

    total: int  # parameters
    vision: int
    head: int  # the output embedding
    tied: bool  # the head is the input embedding as well, and counted once
    adapters: int  # LoRA's parameters, on top of the total
    root: int  # parameters outside the units of sharding: embeddings, head, last norm, the vision tower's ends
    layer: int  # of the largest unit of sharding
    hidden: int
    layers: int
    kv_width: int  # kv heads x head_dim
    kv_heads: int
    heads: int
    saved: tuple[int, int]  # (per-token numbers that a decoder layer's backward keeps in compute dtype, in float32)
    vision_hidden: int = 0
    vision_layers: int = 0
    vision_saved: tuple[int, int] = (0, 0)
    patch_dim: int = 0  # numbers in a patch
    patches_per_token: int = 0
    factor: int = 1  # pixels per token along a side


def read_shape(folder: str, lora_rank: int = 0) -> Shape:
    """The shape of a model folder's config.json. Raises ConfigError."""
    path = os.path.join(folder, "config.json")
    if not os.path.isfile(path):
        raise ConfigError(
            f"{path!r} does not exist: --plan needs the model folder's config.json (its weights it does not)"
        )
    try:
        config = AutoConfig.from_pretrained(folder)
        has_vision = hasattr(config, "vision_config")
        auto = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
        with torch.device("meta"):
            lm = auto.from_config(config)
            count = lambda module: sum(p.numel() for p in module.parameters())  # noqa: E731
            total, visual = count(lm), lm.model.visual if has_vision else None
            text = config.get_text_config()
            head = lm.get_output_embeddings().weight
            units = {name: m for name, m in lm.named_modules() if type(m).__name__ in lm._no_split_modules}
            inside = sum(map(count, units.values()))
            decoder, blocks = [], []
            for name, m in units.items():
                (blocks if ".visual." in name or name.startswith("visual.") else decoder).append(m)
            layer = max(map(count, decoder + blocks))
            saved = _saved_per_token(decoder[0])
            seen = {}
            if has_vision:
                vision = config.vision_config
                width = blocks[0].norm1.weight.numel()
                seen = dict(
                    vision_hidden=width,
                    vision_layers=len(blocks),
                    vision_saved=_saved_per_token(blocks[0]),
                    patch_dim=visual.patch_embed.proj.weight[0].numel(),
                    patches_per_token=vision.spatial_merge_size**2,
                    factor=vision.patch_size * vision.spatial_merge_size,
                )
            if lora_rank:
                add_lora(lm, lora_rank, 1.0)
    except (OSError, ValueError, AttributeError) as e:
        raise ConfigError(f"model folder {folder!r}: {str(e).splitlines()[0]}") from None
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Shape(
        total=total,
        vision=count(visual) if has_vision else 0,
        head=head.numel(),
        tied=head is lm.get_input_embeddings().weight,
        adapters=count(lm) - total,
        root=total - inside,
        layer=layer,
        hidden=text.hidden_size,
        layers=len(decoder),
        kv_width=kv_heads * head_dim,
        kv_heads=kv_heads,
        heads=text.num_attention_heads,
        saved=saved,
        **seen,
    )


def _saved_per_token(block: torch.nn.Module) -> tuple[int, int]:
    """Numbers that the backward of a transformer block keeps per token: (in compute dtype, in float32).

    Each linear layer's output feeds something that keeps it; the MLP's activation and product come on top, and two norms
    with a normalised and a scaled result each, and their input in float32. tests/test_plan.py compares.
    """
    linears = [m for m in block.modules() if isinstance(m, torch.nn.Linear)]
    hidden, inner = linears[-1].out_features, max(m.in_features for m in linears)
    return sum(m.out_features for m in linears) + 2 * inner + 4 * hidden, 2 * hidden


# ---------------------------------------------------------------------------------------------------- items
@dataclass
class Item:
    """One line of the budget."""

    name: str
    formula: str
    gb: float
    phases: str  # letters of the phases in which it is there: r(ollout), u(pdate), p(ush)
    shrink: str  # what makes it smaller


def most_tokens(cfg: Config) -> int:
    """Tokens of the largest micro-batch: a trajectory that is longer than the budget is alone."""
    return max(cfg.microbatch_tokens, cfg.max_prompt_len + cfg.max_response_len)


def images_per_trajectory(cfg: Config) -> int:
    """One with the prompt and one after each turn but the last; a tool that shows several at a time goes up to max_images."""
    return min(cfg.max_images, cfg.max_turns)


def trajectories_per_rank(cfg: Config, num_gpus: int) -> int:
    return math.ceil(cfg.prompts_per_step * cfg.group_size / num_gpus)


def trained_parameters(cfg: Config, s: Shape) -> int:
    if cfg.lora_rank:
        return s.adapters
    return s.total - (s.vision if cfg.freeze_vision else 0)


def state_items(cfg: Config, s: Shape, n: int) -> list[Item]:
    """Weights, gradients and optimizer states of policy, critic and reference, sharded over all GPUs."""
    trained, total = trained_parameters(cfg, s), s.total + s.adapters
    more = "more GPUs, offload or lora_rank"
    items = [
        Item(
            "policy: master weights",
            f"4 x {_b(total)} / n",
            4 * total / n,
            "rup",
            "more GPUs, offload, or a smaller model",
        ),
        Item("policy: gradients", f"4 x {_b(trained)} / n", 4 * trained / n, "u", more),
        Item("policy: Adam's moments", f"8 x {_b(trained)} / n", 8 * trained / n, "rup", more),
    ]
    if cfg.advantage == "gae":
        critic = s.total - (0 if s.tied else s.head) + s.hidden + 1
        learns = critic - (s.vision if cfg.freeze_vision else 0)
        formula = f"(4 x {_b(critic)} + 8 x {_b(learns)}) / n"
        items += [
            Item(
                "critic: weights and moments",
                formula,
                (4 * critic + 8 * learns) / n,
                "rup",
                "an objective without critic",
            ),
            Item("critic: gradients", f"4 x {_b(learns)} / n", 4 * learns / n, "u", "an objective without critic"),
        ]
    if (cfg.kl_coef or cfg.kl_reward_coef) and not cfg.lora_rank:
        shrink = "kl_coef = kl_reward_coef = 0, or lora_rank: the reference is then the policy itself"
        items.append(Item("reference: weights", f"4 x {_b(s.total)} / n", 4 * s.total / n, "rup", shrink))
    for item in items:
        item.gb /= GB
    return items


def update_items(cfg: Config, s: Shape, n: int) -> list[Item]:
    """What a micro-batch's forward and backward take beside the state."""
    size = {"float32": 4, "bfloat16": 2}[cfg.dtype]
    tokens, items = most_tokens(cfg), []
    trains_vision = s.vision and not cfg.freeze_vision and not cfg.lora_rank
    sharded = n > 1 or cfg.offload
    if sharded:
        gathered, formula = s.root + 2 * s.layer, f"{size} x (root {_b(s.root)} + 2 x layer {_b(s.layer)})"
    elif size == 4:
        gathered, formula = 0, "computes on the master weights"
    elif cfg.lora_rank and cfg.gradient_checkpointing:
        gathered, formula = s.head + 2 * s.layer, f"{size} x (head {_b(s.head)} + 2 x layer {_b(s.layer)}) (autocast)"
    else:
        gathered, formula = s.total, f"{size} x {_b(s.total)} (autocast's copies)"
    items.append(Item("gathered weights", formula, size * gathered, "u", "freeze_vision or lora_rank"))
    if cfg.offload:
        largest = max(s.layer, s.root)
        formula = f"4 x largest unit {_b(largest)} / n (float32, on its way from the host)"
        items.append(Item("shard of a unit", formula, 4 * largest / n, "u", "offload = False"))
    unit = 0 if cfg.lora_rank else max(s.layer, s.root if sharded else s.head)
    formula = f"({size} + 4) x largest unit {_b(unit)}"
    items.append(Item("gradient before reduction", formula, (size + 4) * unit, "u", "lora_rank"))
    # Without sharding autocast leaves the residual stream, which the layers hand on, in float32.
    stream = size if sharded else 4
    keep, names = 0.0, []
    once = tokens * (size * s.saved[0] + 4 * s.saved[1])
    once_is = f"one decoder layer: {tokens} x ({size} x {s.saved[0]} + 4 x {s.saved[1]})"
    if cfg.gradient_checkpointing:
        keep += s.layers * tokens * s.hidden * stream
        names.append(f"{s.layers} layers x {tokens} x {s.hidden} x {stream}")
    else:
        keep, once = s.layers * once, 0
        names.append(f"{s.layers} layers x {tokens} x ({size} x {s.saved[0]} + 4 x {s.saved[1]})")
    if trains_vision:
        patches = tokens * s.patches_per_token
        vision_once = patches * (size * s.vision_saved[0] + 4 * s.vision_saved[1])
        if cfg.gradient_checkpointing:
            keep += s.vision_layers * patches * s.vision_hidden * stream
            if vision_once > once:
                once = vision_once
                once_is = f"one vision block: {patches} x ({size} x {s.vision_saved[0]} + 4 x {s.vision_saved[1]})"
            names.append(f"{s.vision_layers} x {patches} patches x {s.vision_hidden} x {stream}")
        else:
            keep += s.vision_layers * vision_once
            names.append(f"{s.vision_layers} x {patches} x ({size} x {s.vision_saved[0]} + 4 x {s.vision_saved[1]})")
    shrink = "microbatch_tokens" + ("" if cfg.gradient_checkpointing else ", or gradient_checkpointing = True")
    if trains_vision:
        shrink += ", or freeze_vision = True"
    items.append(Item("activations kept", " + ".join(names), keep, "u", shrink))
    if once:
        items.append(Item("activations recomputed", once_is, once, "u", shrink))
    # losses.token_logprobs: three buffers of a chunk and its gradient; states and their gradient of each sampled token.
    buffers = LOGPROB_CHUNK * (8 + 2 * size) + tokens * s.hidden * (4 + 2 * size)
    formula = f"2^24 x {8 + 2 * size} + {tokens} x {s.hidden} x {4 + 2 * size}"
    items.append(Item("log-probabilities", formula, buffers, "u", "microbatch_tokens"))
    if s.vision:
        patches = tokens * s.patches_per_token
        formula = f"4 x {patches} patches x {s.patch_dim}"
        items.append(Item("pixels of a micro-batch", formula, 4 * patches * s.patch_dim, "u", "microbatch_tokens"))
    for item in items:
        item.gb /= GB
    return items


def engine_items(cfg: Config, s: Shape) -> tuple[list[Item], float]:
    """(the engine's part of a GPU, GB of KV cache in it): asleep during the update, awake without its cache in the push."""
    size = {"float32": 4, "bfloat16": 2}[cfg.engine_dtype]
    weights = size * s.total / cfg.rollout_tp / GB
    formula = f"{size} x {_b(s.total)} / rollout_tp {cfg.rollout_tp}"
    frac = f"{cfg.engine_gpu_frac:g} x {cfg.device_gb:g}"
    if cfg.engine_kv_cache_mb:
        cache, said = cfg.engine_kv_cache_mb / 1024, "engine_kv_cache_mb"
    else:
        cache, said = max(0.0, cfg.engine_gpu_frac * cfg.device_gb - weights - WORKSPACE_GB), f"{frac} - the two above"
    largest = 4 * s.head / GB
    bucket = max(PUSH_BUCKET_GB, largest)
    push = f"bucket max({PUSH_BUCKET_GB:g}, 4 x head {_b(s.head)}) + 4 x head"
    return [
        Item("engine: weights", formula, weights, "rp", "rollout_tp"),
        Item("engine: workspace", "assumed", WORKSPACE_GB, "r", "engine_gpu_frac"),
        Item("engine: KV cache", said, cache, "r", "engine_gpu_frac"),
        Item("weight push", push, bucket + largest, "p", "a smaller model"),
    ], cache


def gpu_items(cfg: Config, s: Shape, n: int) -> list[Item]:
    reserve = Item("reserve", "assumed: contexts, NCCL, fragments", RESERVE_GB, "rup", "nothing")
    state = [] if cfg.offload else state_items(cfg, s, n)
    return state + update_items(cfg, s, n) + engine_items(cfg, s)[0] + [reserve]


PHASES = {"r": "rollout", "u": "update", "p": "push"}


def phase_totals(items: list[Item]) -> dict[str, float]:
    """GB of a GPU in each phase of a step: what is there at the same time."""
    return {name: sum(i.gb for i in items if letter in i.phases) for letter, name in PHASES.items()}


def verdict(cfg: Config, s: Shape, n: int) -> str:
    """ "fits" with what is left, or which phase does not fit and what to shrink: its largest item."""
    ranks = min(n, GPUS_PER_HOST)
    for what, count in ((f"{ranks} GPUs" + (" of a host" if n > ranks else ""), ranks), (f"{s.heads} heads", s.heads)):
        if count % cfg.rollout_tp:
            return f"no: rollout_tp {cfg.rollout_tp} does not divide {what}"
    items = gpu_items(cfg, s, n)
    totals = phase_totals(items)
    _, cache = engine_items(cfg, s)
    if cache < kv_bytes(cfg, s) * (cfg.max_prompt_len + cfg.max_response_len) / GB:
        return "no: the KV cache does not hold one full-length trajectory; raise engine_gpu_frac or rollout_tp"
    phase = max(totals, key=totals.get)
    if totals[phase] <= cfg.device_gb:
        return f"fits: {cfg.device_gb - totals[phase]:.1f} GB are left in the {phase}, its fullest phase"
    letter = next(k for k, v in PHASES.items() if v == phase)
    worst = max((i for i in items if letter in i.phases), key=lambda i: i.gb)
    over = totals[phase] - cfg.device_gb
    return f"NO: the {phase} takes {over:.1f} GB too many; largest: {worst.name} ({worst.gb:.1f}), by {worst.shrink}"


def kv_bytes(cfg: Config, s: Shape) -> float:
    """Keys and values of one token on one GPU; with fewer kv heads than GPUs each holds a whole head."""
    size = {"float32": 4, "bfloat16": 2}[cfg.engine_dtype]
    return 2 * s.layers * s.kv_width * size * max(1, s.kv_heads // cfg.rollout_tp) / s.kv_heads


def host_items(cfg: Config, s: Shape, n: int) -> list[Item]:
    """Memory of a host. `phases`: "s" at the start alone, "r" while a step runs."""
    ranks, per_rank = min(n, GPUS_PER_HOST), trajectories_per_rank(cfg, n)
    images, engines = images_per_trajectory(cfg), max(1, ranks // cfg.rollout_tp)
    tokens = cfg.max_prompt_len + cfg.max_response_len
    prompts = math.ceil(per_rank / cfg.group_size) + 1
    items = [
        Item("processes", f"{ranks} x {PROCESS_GB:g} (assumed)", ranks * PROCESS_GB, "sr", ""),
        Item("weights while loading", f"4 x {_b(s.total)}, on the first host alone", 4 * s.total / GB, "s", ""),
        Item("tokens of trajectories", f"{ranks} x {per_rank} x {tokens} x {TOKEN_BYTES} bytes",
             ranks * per_rank * tokens * TOKEN_BYTES / GB, "r", ""),
    ]  # fmt: skip
    if s.vision:
        view = 3 * cfg.max_pixels * (1 / cfg.group_size + images - 1)
        pixels = most_tokens(cfg) * s.patches_per_token * s.patch_dim * 4
        items += [
            Item("encoded images", f"{ranks} x ({prompts} prompts + a row group of {GROUP_ROWS}) x {ENCODED_MB:g} MB (assumed)",
                 ranks * (prompts + GROUP_ROWS) * ENCODED_MB / 1024, "r", ""),
            Item("decoded originals", f"{ranks} x {prompts} prompts x 3 x {ORIGINAL_PIXELS:.0e} (assumed)",
                 ranks * prompts * 3 * ORIGINAL_PIXELS / GB, "r", ""),
            Item("views", f"{ranks} x {per_rank} x (1 / group + {images - 1}) x 3 x {cfg.max_pixels}",
                 ranks * per_rank * view / GB, "r", ""),
            Item("views from other ranks", f"{ranks} x {per_rank} x the same" if n > 1 else "one rank",
                 ranks * per_rank * view / GB if n > 1 else 0.0, "r", ""),
            Item("pixels of micro-batches", f"{ranks} x 3 x {most_tokens(cfg)} tokens x {s.patches_per_token} x {s.patch_dim}"
                 " x 4 (one in use, one made, its parts)", ranks * 3 * pixels / GB, "r", ""),
            Item("engines' image caches", f"{engines} x {MM_CACHE_GB:g}", engines * MM_CACHE_GB, "r", ""),
        ]  # fmt: skip
    if cfg.offload:
        for i in state_items(cfg, s, n):
            pinned = 1.0 if "moments" in i.name else PINNED
            items.append(Item(i.name, f"{ranks} x {pinned:g} x {i.formula}", ranks * pinned * i.gb, "sr", ""))
    return items


# ---------------------------------------------------------------------------------------------------- printing
def _b(count: float) -> str:
    return f"{count / 1e9:.3g}B" if count >= 1e8 else f"{count / 1e6:.3g}M"


def _line(name: str, values: list[float | str], formula: str) -> None:
    cells = "".join(f"{v:>8.1f}" if isinstance(v, float) else f"{v:>8}" for v in values)
    print(f"  {name:<30}{cells}   {formula}")


def _items(columns: list[list[Item]], phases: dict[str, str], counts: list[int]) -> None:
    """Items of every number of GPUs side by side, then the sum of each phase."""
    _line("n = GPUs", counts, "formula, for the last column")
    for k, item in enumerate(columns[-1]):
        _line(f"{item.name} [{item.phases}]", [column[k].gb for column in columns], item.formula)
    for letter, name in phases.items():
        sums = [sum(i.gb for i in column if letter in i.phases) for column in columns]
        _line(f"= {name}", sums, f"all with {letter}")


def print_plan(cfg: Config, counts: list[int]) -> None:
    s = read_shape(cfg.model, cfg.lora_rank)
    trajectories, longest = cfg.prompts_per_step * cfg.group_size, cfg.max_prompt_len + cfg.max_response_len
    updates = cfg.num_minibatches * cfg.num_epochs
    print(f"model {cfg.model}: {_b(s.total)} parameters = language model {_b(s.total - s.vision - (0 if s.tied else s.head))}"
          f" + vision tower {_b(s.vision)} + head {'tied' if s.tied else _b(s.head)}; trained {_b(trained_parameters(cfg, s))}"
          + (f" (LoRA, rank {cfg.lora_rank})" if cfg.lora_rank else ""))  # fmt: skip
    print("\nbatch")
    print(f"  {cfg.prompts_per_step} prompts x {cfg.group_size} samples = {trajectories} trajectories a step")
    print(
        f"  x ({cfg.max_prompt_len} prompt + {cfg.max_response_len} response) = {trajectories * longest:,} tokens at most"
    )
    print(
        f"  {cfg.num_minibatches} mini-batches x {cfg.num_epochs} passes = {updates} updates a step, {cfg.steps * updates} in all"
    )
    _line("n = GPUs", counts, "formula")
    _line("trajectories per GPU", [trajectories_per_rank(cfg, n) for n in counts], f"{trajectories} / n, rounded up")
    batches = [math.ceil(trajectories * longest / n / cfg.microbatch_tokens) for n in counts]
    _line("full micro-batches, at most", batches, f"tokens / n / {cfg.microbatch_tokens} per pass, on each GPU")
    _line("engines", [n // cfg.rollout_tp for n in counts], f"n / {cfg.rollout_tp}")
    print("\ntokens")
    print(
        f"  a turn {cfg.max_turn_len} at most, {cfg.max_turns} turns; a trajectory {longest}, a micro-batch {most_tokens(cfg)}"
    )
    if s.vision:
        view = cfg.max_pixels // s.factor**2
        print(f"  an image {view} at most ({cfg.max_pixels} pixels / {s.factor}^2); {cfg.max_prompt_len // view} in a prompt,"
              f" {images_per_trajectory(cfg)} counted here in a trajectory")  # fmt: skip
    per_token, (_, cache) = kv_bytes(cfg, s), engine_items(cfg, s)
    room = int(cache * GB // per_token)
    print(f"  KV cache {per_token / 1024:.0f} KB a token and GPU (2 x {s.layers} layers x {s.kv_width}): an engine holds"
          f" {room:,} tokens, {room // longest} full-length trajectories at a time")  # fmt: skip

    print("\nmemory per GPU, GB; r: rollout, u: update (the engine sleeps), p: push (its KV cache is not there yet)")
    _items([gpu_items(cfg, s, n) for n in counts], PHASES, counts)
    print(f"\nmemory per host of {GPUS_PER_HOST} GPUs, GB, at most; s: at the start, r: while a step runs")
    _items([host_items(cfg, s, n) for n in counts], {"s": "start", "r": "step"}, counts)
    print("  shared memory (/dev/shm): 1 GB a GPU for NCCL and the engines' queues; the weights go from GPU to GPU")

    print(f"\ndevice of {cfg.device_gb:g} GB")
    for n in counts:
        print(f"  {n:>3} GPUs: {verdict(cfg, s, n)}")


def main(argv: list[str]) -> None:
    """`argv`: a config file, any `--key=value` of it, and `--num_gpus=8` or `--num_gpus=[8,16]`."""
    counts = NUM_GPUS
    for arg in argv:
        if arg.startswith("--num_gpus="):
            text = arg.removeprefix("--num_gpus=").strip("[]")
            try:
                counts = [int(n) for n in text.split(",")]
            except ValueError:
                counts = []
            if not counts or min(counts) < 1:
                raise ConfigError(f"--num_gpus must be a list of numbers such as [8,16], but is {text!r}")
    print_plan(load_config([a for a in argv if not a.startswith("--num_gpus=")]), counts)
