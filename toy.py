"""The embedded task: a coloured frame somewhere in a 672 x 672 picture holds a digit that only a zoom can show.

    python toy.py data out/toy/data      # train.parquet and eval.parquet, seeded
    python toy.py base assets/toy_base   # trains the tiny base model (a Qwen2.5-VL of 1 M parameters) from scratch

The policy sees a 112 x 112 view, made by averaging 6 x 6 blocks. Each lit cell of the digit is half dark, half bright
around the plate's grey and fills exactly one such block: in the view the digit is not small, it is gone. The base model
stands for a pretrained VLM: it knows the format, zooms sometimes, with noisy boxes, reads crops, and guesses otherwise.
"""

import argparse
import io
import math
import os
import random
import time
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers import models as token_models
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from data import Codec, ImageRules, MicroBatch, View, pack_rows, write_parquet
from losses import token_logprobs
from model import Policy, hidden_states, load_lm
from tools import TOOL_TURN

# ---------------------------------------------------------------------------------------------------- world
CANVAS, VIEW = 672, 112  # sides of the original and of the model's view
SCALE = CANVAS // VIEW  # 6: one view pixel averages a 6 x 6 block
CELL = 28  # one visual token covers 28 x 28 view pixels
BOX_STEP = 4  # the base model writes box numbers in multiples of 4 view pixels
RULES = ImageRules(factor=28, min_pixels=VIEW * VIEW, max_pixels=(VIEW + 1) ** 2, resampling="box")  # = configs/toy.py
COLORS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 230),
    "yellow": (235, 215, 40),
    "purple": (160, 50, 190),
    "orange": (245, 140, 30),
}
# A 5 x 7 dot-matrix font, a row of five dots per word.
FONT = {
    "0": "01110 10001 10011 10101 11001 10001 01110",
    "1": "00100 01100 00100 00100 00100 00100 01110",
    "2": "01110 10001 00001 00010 00100 01000 11111",
    "3": "11111 00010 00100 00010 00001 10001 01110",
    "4": "00010 00110 01010 10010 11111 00010 00010",
    "5": "11111 10000 11110 00001 00001 10001 01110",
    "6": "00110 01000 10000 11110 10001 10001 01110",
    "7": "11111 00001 00010 00100 01000 01000 01000",
    "8": "01110 10001 10001 01110 10001 10001 01110",
    "9": "01110 10001 10001 01111 00001 00010 01100",
}
GLYPHS = {d: np.array([[int(c) for c in row] for row in rows.split()], np.uint8) for d, rows in FONT.items()}


def glyph(digit: str, grey: int, amplitude: int) -> tuple[Image.Image, Image.Image]:
    """(stripes, mask) of a digit, 30 x 42 px: every lit 6 x 6 cell averages exactly to `grey`."""
    lit = np.kron(GLYPHS[digit], np.ones((SCALE, SCALE), np.uint8))
    stripes = np.where(np.arange(lit.shape[1]) % SCALE < SCALE // 2, grey - amplitude, grey + amplitude)
    pixels = np.broadcast_to(stripes, lit.shape).astype(np.uint8)
    return Image.fromarray(pixels).convert("RGB"), Image.fromarray(lit * 255)


def make_scene(rng: random.Random) -> dict:
    """{"image": 672 x 672 PIL, "color", "digit", "box": (x1, y1, x2, y2) of the frame in original pixels}."""
    noise = np.random.default_rng(rng.getrandbits(32))
    # Red grows along x and green along y: a ViT with relative positions alone finds absolute ones in the scene.
    y, x = np.mgrid[0:VIEW, 0:VIEW] / VIEW
    base = np.stack([25 + 205 * x, 25 + 205 * y, np.full_like(x, rng.randrange(100, 156))], -1)
    base = (base + noise.integers(-6, 7, base.shape)).clip(0, 255).astype(np.uint8)
    image = Image.fromarray(base.repeat(SCALE, 0).repeat(SCALE, 1))
    draw = ImageDraw.Draw(image)
    for _ in range(rng.randint(3, 6)):  # grey clutter
        left, top, w, h = rng.randrange(CANVAS), rng.randrange(CANVAS), rng.randint(20, 110), rng.randint(20, 110)
        fill = (rng.randint(90, 210),) * 3
        kind = rng.choice(["ellipse", "ellipse", "rectangle", "rectangle", "line"])
        if kind == "line":
            draw.line([left, top, left + w, top + h], fill=fill, width=rng.randint(3, 10))
        else:
            getattr(draw, kind)([left, top, left + w, top + h], fill=fill)
    color, digit, cell = rng.choice(list(COLORS)), rng.choice("0123456789"), rng.randrange(16)
    side, room = rng.randint(84, 108), CELL * SCALE
    jitter = (room - side) // 2 - 6  # the frame stays inside its 28 x 28 cell of the view
    left = cell % 4 * room + (room - side) // 2 + rng.randint(-jitter, jitter)
    top = cell // 4 * room + (room - side) // 2 + rng.randint(-jitter, jitter)
    grey, rim = rng.randint(112, 143), side // 9
    draw.rectangle([left, top, left + side - 1, top + side - 1], fill=COLORS[color])
    draw.rectangle([left + rim, top + rim, left + side - 1 - rim, top + side - 1 - rim], fill=(grey,) * 3)
    stripes, mask = glyph(digit, grey, rng.randint(75, 110))
    at = [
        round((corner + side / 2 - size / 2) / SCALE) * SCALE
        for corner, size in zip((left, top), stripes.size, strict=True)
    ]
    image.paste(stripes, tuple(at), mask)  # aligned to the 6 px grid: only there do the stripes cancel exactly
    return {"image": image, "color": color, "digit": digit, "box": (left, top, left + side, top + side)}


# ---------------------------------------------------------------------------------------------------- text
SYSTEM = "You can zoom in with image_zoom_in_tool."


def question(color: str) -> str:
    return f"What is the digit in the {color} box?"


def call_text(box: tuple[int, ...], color: str) -> str:
    numbers = ", ".join(map(str, box))
    arguments = f'{{"name": "image_zoom_in_tool", "arguments": {{"bbox_2d": [{numbers}]}}}}'
    return f"<think>I will zoom in on the {color} box.</think>\n<tool_call>\n{arguments}\n</tool_call>"


def answer_text(digit: str, thought: str) -> str:
    return f"<think>{thought}</think>\n<answer>{digit}</answer>"


# What visual_toolbox_v2 answers with (configs/toy.py leaves the reminder of the format out).
OBSERVATION = TOOL_TURN.format("<image>")


# ---------------------------------------------------------------------------------------------------- data
def make_rows(num: int, seed: int, split: str) -> list[dict]:
    """VeRL-format rows; the frame's box stands in extra_info for the grounding IoU, never in the prompt."""
    rng = random.Random(f"{seed}-{split}")
    rows = []
    for i in range(num):
        scene, buffer = make_scene(rng), io.BytesIO()
        scene["image"].save(buffer, "PNG", compress_level=1)
        rows.append(
            {
                "data_source": "toy_zoom",
                "prompt": [
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": "<image>" + question(scene["color"])},
                ],
                "images": [{"bytes": buffer.getvalue(), "path": None}],
                "ability": "zoom",
                "env_name": "visual_toolbox_v2",
                "reward_model": {"style": "rule", "ground_truth": scene["digit"]},
                "extra_info": {
                    "index": i,
                    "split": split,
                    "question": question(scene["color"]),
                    "answer": scene["digit"],
                    "box": list(scene["box"]),
                },
            }
        )
    return rows


# ---------------------------------------------------------------------------------------------------- tokenizer and model
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
TAGS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<answer>",
    "</answer>",
]
WORDS = [
    "system", "user", "assistant", "You can zoom in", " with", " image_zoom_in_tool", "image_zoom_in_tool", '{"name": "',
    '", "arguments": {"bbox_2d": [', "]}}", ", ", "What is the digit", " in the", " box", *(f" {c}" for c in COLORS),
    "I will zoom in on the", "I can see it.", "Now I see it.", "I will guess.",
]  # fmt: skip


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Characters plus whole-word tokens for what the task says, and the integers 10 .. 112; lossless on ASCII."""
    chars = [chr(i) for i in range(32, 127)] + ["\n"]
    tokenizer = Tokenizer(token_models.BPE(vocab={c: i for i, c in enumerate(chars)}, merges=[], unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t in TAGS + WORDS + [str(n) for n in range(10, VIEW + 1)]]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    )


CHAT_TEMPLATE = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m['role'] + '\n' -}}"
    "{%- if m['content'] is string -%}{{- m['content'] -}}{%- else -%}{%- for c in m['content'] -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' if c['type'] == 'image' else c['text'] -}}"
    "{%- endfor -%}{%- endif -%}{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def build_model(
    tokenizer: PreTrainedTokenizerFast, hidden: int = 96, seed: int = 0
) -> Qwen2_5_VLForConditionalGeneration:
    """An untrained Qwen2.5-VL of about 1 M parameters. Head size 32 is the smallest that vLLM runs on CPU."""
    torch.manual_seed(seed)
    ids = tokenizer.get_vocab()
    text = dict(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 6, 6]),
    )
    vision = dict(
        depth=2,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_heads=hidden // 32,
        patch_size=14,
        spatial_merge_size=2,
        window_size=112,
        out_hidden_size=hidden,
        fullatt_block_indexes=[0, 1],
    )
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    # Number line: nearby numbers start with similar embeddings, points of a smooth random curve.
    n = torch.arange(VIEW + 1)[:, None] / VIEW
    freq = (torch.arange(1, hidden // 2 + 1) * 0.5).clamp(max=12)
    curve = torch.cat([(2 * math.pi * n * freq).sin(), (2 * math.pi * n * freq).cos()], 1) @ torch.randn(hidden, hidden)
    with torch.no_grad():
        for value in range(VIEW + 1):
            model.get_input_embeddings().weight[ids[str(value)]] = 0.03 * curve[value] / curve.std()
    model.generation_config = GenerationConfig(
        eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"], bos_token_id=ids["<|endoftext|>"]
    )
    return model


def save_folder(model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: str) -> None:
    """A complete Hugging Face folder: weights, tokenizer, processor and chat template."""
    norm = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3, patch_size=14, merge_size=2, temporal_patch_size=2)
    pixels = {
        "shortest_edge": 28 * 28,
        "longest_edge": 16 * VIEW * VIEW,
    }  # wide: views are made by us, never resized again
    image_processor = Qwen2VLImageProcessor(size=pixels, **norm)
    video_processor = Qwen2VLVideoProcessor(size=pixels, **norm)
    model.save_pretrained(folder)
    Qwen2_5_VLProcessor(image_processor, tokenizer, video_processor, chat_template=CHAT_TEMPLATE).save_pretrained(
        folder
    )


# ---------------------------------------------------------------------------------------------------- base training
@dataclass
class Trace:
    """A written-out trajectory for supervised training; `labels` holds a {token: weight} or None per visual token."""

    tokens: list[int]
    response_mask: list[int]
    views: list[View]
    labels: list[dict[int, float] | None]


def view_box(scene: dict) -> tuple[float, ...]:
    """The frame's box in view pixels."""
    return tuple(v / SCALE for v in scene["box"])


def noisy_box(scene: dict, rng: random.Random, *, sigma: float, max_log_scale: float) -> tuple[int, ...]:
    """A box around the frame on the 4 px grid: centre moved by sigma sides, enlarged by up to e**max_log_scale."""
    x1, y1, x2, y2 = view_box(scene)
    side = x2 - x1
    cx, cy = (x1 + x2) / 2 + rng.gauss(0, sigma) * side, (y1 + y2) / 2 + rng.gauss(0, sigma) * side
    half = math.exp(rng.uniform(0, max_log_scale)) * side / 2
    w, h = half * math.exp(rng.gauss(0, sigma / 4)), half * math.exp(rng.gauss(0, sigma / 4))
    x1, y1, x2, y2 = (int(min(VIEW, max(0, round(v / BOX_STEP) * BOX_STEP))) for v in (cx - w, cy - h, cx + w, cy + h))
    x1, y1 = min(x1, VIEW - BOX_STEP), min(y1, VIEW - BOX_STEP)
    return x1, y1, max(x2, x1 + BOX_STEP), max(y2, y1 + BOX_STEP)


class TraceMaker:
    """Writes supervised traces with the same codec, views and crops that the rollout uses."""

    def __init__(self, codec: Codec, rng: random.Random):
        self.codec, self.rng = codec, rng
        self.ids = codec.tokenizer.get_vocab()

    def _trace(self, parts: list[tuple[list[int], int]], views: list[View], labels: list) -> Trace:
        tokens, mask = [], []
        sizes = [v.image.size for v in views]
        for ids, sampled in parts:
            k = ids.count(self.codec.image_token_id)
            ids = self.codec.expand(ids, sizes[:k])
            sizes = sizes[k:]
            tokens += ids
            mask += [sampled] * len(ids)
        return Trace(tokens, mask, views, labels)

    def _prompt(self, text: str) -> list[int]:
        return self.codec.encode_chat(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "<image>" + text}]
        )

    def _turn(self, text: str) -> list[int]:
        return [*self.codec.encode(text, tags=True), self.codec.im_end]

    def _scene_labels(self, scene: dict) -> list:
        """On the visual token that holds the frame: its colour and its box numbers."""
        x1, y1, x2, y2 = view_box(scene)
        labels: list = [None] * 16
        words = [" " + scene["color"], *(str(int(round(v / BOX_STEP) * BOX_STEP)) for v in (x1, y1, x2, y2))]
        label: dict[int, float] = {}
        for w in words:
            label[self.ids[w]] = label.get(self.ids[w], 0) + 1 / len(words)
        labels[int((y1 + y2) / 2 // CELL) * 4 + int((x1 + x2) / 2 // CELL)] = label
        return labels

    def _crop(self, scene: dict, box: tuple[int, ...]) -> tuple[View, list]:
        """The view of a crop, and labels: the digit, on the visual token at its centre, if it is large enough to read."""
        view = View.of(RULES.make_view(scene["image"].crop(tuple(v * SCALE for v in box))))
        (w, h), (x1, y1, x2, y2), frame = view.image.size, box, view_box(scene)
        labels: list = [None] * self.codec.num_image_tokens((w, h))
        fx = ((frame[0] + frame[2]) / 2 - x1) / (x2 - x1)
        fy = ((frame[1] + frame[3]) / 2 - y1) / (y2 - y1)
        if 0 < fx < 1 and 0 < fy < 1 and 7 * h / (y2 - y1) > 25:  # the glyph is 7 view pixels high
            labels[int(fy * h / CELL) * (w // CELL) + int(fx * w / CELL)] = {self.ids[scene["digit"]]: 1.0}
        return view, labels

    def zoom(self, box_noise: dict, call_only: bool = False) -> Trace:
        """Call the tool with a noisy box, read the crop, answer; `call_only` stops after the call."""
        scene = make_scene(self.rng)
        box, view = noisy_box(scene, self.rng, **box_noise), View.of(RULES.make_view(scene["image"]))
        parts = [(self._prompt(question(scene["color"])), 0), (self._turn(call_text(box, scene["color"])), 1)]
        if call_only:
            return self._trace(parts, [view], self._scene_labels(scene))
        crop, labels = self._crop(scene, box)
        parts += [(self.codec.encode_slots(OBSERVATION, tags=True, markers=True), 0)]
        parts += [(self._turn(answer_text(scene["digit"], "Now I see it.")), 1)]
        return self._trace(parts, [view, crop], self._scene_labels(scene) + labels)

    def read(self, box_noise: dict) -> Trace:
        """A crop as the prompt image: read it."""
        scene = make_scene(self.rng)
        crop, labels = self._crop(scene, noisy_box(scene, self.rng, **box_noise))
        parts = [(self._prompt("What is the digit?"), 0), (self._turn(answer_text(scene["digit"], "I can see it.")), 1)]
        return self._trace(parts, [crop], labels)

    def direct(self) -> Trace:
        """Answer without zooming. The digit is not in the view, so that all one can learn is to guess."""
        scene = make_scene(self.rng)
        parts = [
            (self._prompt(question(scene["color"])), 0),
            (self._turn(answer_text(scene["digit"], "I will guess.")), 1),
        ]
        return self._trace(parts, [View.of(RULES.make_view(scene["image"]))], self._scene_labels(scene))

    def page(self) -> Trace:
        """A picture full of digits at the sizes that crops show, with a label on each: practice in reading."""
        rng = self.rng
        over, step = 2, rng.choice([37, 56, 56, 56])  # drawn at twice the size, one digit per step x step square
        image = Image.new("RGB", (VIEW * over, VIEW * over), tuple(rng.randint(90, 220) for _ in range(3)))
        draw, labels = ImageDraw.Draw(image), [None] * 16
        for row in range(VIEW // step):
            for col in range(VIEW // step):
                if rng.random() < 0.15:
                    continue
                dot = rng.uniform(3.5, min(7.8, step / 7.2))
                w, h = 5 * dot, 7 * dot
                cx = (col + 0.5) * step + rng.uniform(-1, 1) * max(0, (step - w) / 2 - 1)
                cy = (row + 0.5) * step + rng.uniform(-1, 1) * max(0, (step - h) / 2 - 1)
                grey, rim, digit = rng.randint(112, 143), dot * rng.uniform(1, 3), rng.choice("0123456789")
                plate = [
                    max(col * step, cx - w / 2 - rim), max(row * step, cy - h / 2 - rim),
                    min((col + 1) * step, cx + w / 2 + rim), min((row + 1) * step, cy + h / 2 + rim),
                ]  # fmt: skip
                draw.rectangle([v * over for v in plate], fill=(grey,) * 3)
                stripes, mask = glyph(digit, grey, rng.randint(75, 110))
                size = (round(w * over), round(h * over))
                corner = (round((cx - w / 2) * over), round((cy - h / 2) * over))
                image.paste(
                    stripes.resize(size, Image.Resampling.BICUBIC), corner, mask.resize(size, Image.Resampling.BICUBIC)
                )
                labels[int(cy // CELL) * 4 + int(cx // CELL)] = {self.ids[digit]: 1.0}
        ids = [self.codec.vision_start, self.codec.image_token_id]
        return self._trace([(ids, 0)], [View.of(image.reduce(over))], labels)


def label_loss(
    policy: Policy, hidden: torch.Tensor, batch: MicroBatch, traces: list[Trace], none_id: int
) -> torch.Tensor:
    """Cross-entropy of every visual token against its label; unlabelled ones say "nothing here" at a fifth of the weight."""
    head = policy.lm.get_output_embeddings().weight
    labels = [label for t in traces for label in t.labels]
    target, weight = torch.zeros(len(labels), head.shape[0]), torch.full((len(labels),), 0.2)
    for i, label in enumerate(labels):
        if label is None:
            target[i, none_id] = 1
        else:
            weight[i] = 1
            target[i, list(label)] = torch.tensor(list(label.values()))
    logits = hidden[batch.input_ids == policy.lm.config.image_token_id] @ head.T
    return (-(target * torch.log_softmax(logits, -1)).sum(-1) * weight).sum() / weight.sum()


def train_base(folder: str, steps: int = 1100, noisy_steps: int = 130, seed: int = 0) -> None:
    """Trains the base model and writes a Hugging Face folder; about 8 minutes on one core.

    Stage 1: zoom with good boxes, read crops, a few direct guesses; digit pages in its first half. Stage 2, at a fifth of
    the rate: zoom 30 % of the time, with noisy boxes, guess otherwise, so that RL has both to find and to lose.
    """
    tokenizer = make_tokenizer()
    save_folder(build_model(tokenizer, seed=seed), tokenizer, folder)
    codec = Codec(folder)
    policy = Policy(load_lm(folder, torch.float32), codec.banned_ids)
    rng = random.Random(seed)
    make, ids, total = TraceMaker(codec, rng), tokenizer.get_vocab(), steps + noisy_steps
    patch = policy.lm.model.visual.patch_embed.proj.weight
    flat_patch = torch.nn.Parameter(patch.data.flatten(1))  # the same memory, 2-D as Muon wants it
    embedding = policy.lm.get_input_embeddings().weight
    matrices = [p for p in policy.parameters() if p.ndim == 2 and p is not embedding]
    others = [p for p in policy.parameters() if p.ndim == 1] + [embedding]
    optimizers = [
        torch.optim.Muon([*matrices, flat_patch], lr=0.02, weight_decay=0.1),
        torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    numbers = torch.tensor([i for t, i in ids.items() if t.isdigit()])
    good, noisy = dict(sigma=0.05, max_log_scale=0.5), dict(sigma=0.4, max_log_scale=1.2)
    start = time.time()
    for step in range(total):
        first = step < steps
        done = step / steps if first else (step - steps) / noisy_steps
        rate = (
            min(1, ((step if first else step - steps) + 1) / 20)
            * min(1, (1 - done) / 0.5 + 0.05)
            * (1 if first else 0.2)
        )
        for optimizer, lr in zip(optimizers, (0.02, 1e-3), strict=True):
            optimizer.param_groups[0]["lr"] = lr * rate
        traces = []
        for _ in range(24):
            u = rng.random()
            if first:
                if rng.random() < 0.2:
                    traces.append(make.zoom(good, call_only=True))
                else:
                    traces.append(make.read(good) if u < 0.25 else make.direct() if u < 0.3 else make.zoom(good))
            else:
                traces.append(
                    make.read(noisy) if u < 0.3 else make.zoom(noisy) if rng.random() < 0.3 else make.direct()
                )
        batch = pack_rows(traces, codec)
        hidden = hidden_states(policy.lm.model, batch)
        head = policy.lm.get_output_embeddings().weight
        logprobs, _ = token_logprobs(hidden, batch.input_ids, batch.response_mask, head)
        # Box numbers, the digit, and the words around them: three means, since the words would drown the rest.
        after_answer = torch.roll(batch.input_ids, 1, 1) == ids["<answer>"]
        is_digit = batch.response_mask & after_answer
        is_number = batch.response_mask & torch.isin(batch.input_ids, numbers) & ~is_digit
        is_word = batch.response_mask & ~is_digit & ~is_number
        parts = [-logprobs[m].mean() if m.any() else torch.zeros(()) for m in (is_word, is_number, is_digit)]
        labels = label_loss(policy, hidden, batch, traces, ids["~"])
        (sum(parts) + (1.0 if first else 0.3) * labels).backward()
        if first and done < 0.5:
            pages = [make.page() for _ in range(16)]
            batch = pack_rows(pages, codec)
            label_loss(policy, hidden_states(policy.lm.model, batch), batch, pages, ids["~"]).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        flat_patch.grad = patch.grad.flatten(1)
        for optimizer in optimizers:
            optimizer.step()
        policy.zero_grad(set_to_none=True)
        if step % 50 == 49 or step == total - 1:
            shown = zip(("words", "box", "digit", "labels"), (*parts, labels), strict=True)
            losses = "  ".join(f"{name} {value.item():.3f}" for name, value in shown)
            print(f"step {step + 1}/{total}  {losses}  {time.time() - start:.0f} s", flush=True)
    save_folder(policy.lm, tokenizer, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    data = commands.add_parser("data", help="write train.parquet and eval.parquet")
    data.add_argument("folder")
    data.add_argument("--train", type=int, default=16 * 80)
    data.add_argument("--eval", type=int, default=192)
    data.add_argument("--seed", type=int, default=0)
    base = commands.add_parser("base", help="train the tiny base model from scratch")
    base.add_argument("folder")
    base.add_argument("--steps", type=int, default=1100)
    base.add_argument("--noisy-steps", type=int, default=130)
    base.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.command == "data":
        for split in ("train", "eval"):
            write_parquet(
                os.path.join(args.folder, f"{split}.parquet"), make_rows(getattr(args, split), args.seed, split)
            )
    else:
        torch.set_num_threads(1)  # sums in a fixed order: the same checkpoint on every run on the same type of machine
        train_base(args.folder, args.steps, args.noisy_steps, args.seed)


if __name__ == "__main__":
    main()
