"""From parquet rows to samples, and from finished trajectories to micro-batches.

The path of one image: its encoded bytes stay in the `Sample` (one copy for the whole group); `make_view` turns it into
the picture the model sees, whose size alone decides the number of image tokens; `pixel_values` are made last, when a
micro-batch is due, once per distinct image in it.
"""

import bisect
import hashlib
import heapq
import io
import itertools
import json
import math
import os
import random
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from rich.progress import track
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoProcessor, AutoTokenizer

from mrope import RopeRules, packed_positions


class DataError(Exception):
    """Bad input; the message names the file and the row."""


# ---------------------------------------------------------------------------------------------------- samples
@dataclass(frozen=True)
class Sample:
    """One row of a VeRL-format parquet file."""

    where: str  # "file.parquet row 17", for messages
    data_source: str  # picks the reward
    prompt: list[dict]  # [{role, content}]; `<image>` in a content marks an image slot
    images: tuple[bytes, ...]  # encoded, unmodified
    env_name: str  # picks the tool; "" = none
    ground_truth: str
    extra_info: dict = field(default_factory=dict)


def _image_bytes(entry, folder: str, where: str) -> bytes:
    """bytes, {"bytes", "path"} or a path -> encoded bytes."""
    data = entry.get("bytes") if isinstance(entry, dict) else entry if isinstance(entry, bytes) else None
    path = entry.get("path") if isinstance(entry, dict) else entry if isinstance(entry, str) else None
    if data:
        return bytes(data)
    if not path:
        raise DataError(
            f"{where}: an image must be bytes, a path or {{bytes, path}}, but is {type(entry).__name__} without either"
        )
    try:
        with open(os.path.join(folder, path), "rb") as f:
            return f.read()
    except OSError as e:
        raise DataError(f"{where}: image file {path!r}: {e.strerror}") from None


def parse_row(row: dict, where: str, folder: str = ".", env_name: str | None = None) -> Sample:
    """One parquet row -> Sample; `env_name` replaces the row's own. Raises DataError naming the column."""
    for key in ("data_source", "prompt", "reward_model"):
        if row.get(key) is None:
            raise DataError(f"{where}: column {key!r} is missing or null")
    prompt = row["prompt"]
    if (
        not isinstance(prompt, list)
        or not prompt
        or not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in prompt)
    ):
        raise DataError(f"{where}: prompt must be a list of {{role, content}} with text contents")
    images = tuple(_image_bytes(i, folder, where) for i in row.get("images") or [])
    slots = sum(m["content"].count("<image>") for m in prompt)
    if slots != len(images):
        raise DataError(f"{where}: the prompt has {slots} <image> slots, but the row has {len(images)} images")
    truth = row["reward_model"].get("ground_truth")
    if truth is None:
        raise DataError(f"{where}: reward_model has no ground_truth")
    env = row.get("env_name") if env_name is None else env_name
    extra = row.get("extra_info") or {}
    return Sample(where, row["data_source"], [dict(m) for m in prompt], images, env or "", truth, dict(extra))


class ParquetData(Sequence):
    """Rows of several parquet files, read lazily: at most one row group is held at a time.

    Small record batches are read, since one batch over a large nested column fails in Arrow ("Nested data conversions
    not implemented for chunked array outputs").
    """

    def __init__(self, files: list[str], env_name: str | None = None):
        self.env_name = env_name
        self.groups = []  # (file, row group, number of its first row in the file)
        self.starts = []  # the same number, counted over all files
        self.group_rows = []  # rows of each
        self.num_rows = 0
        self.held: tuple[int, list[dict]] = (-1, [])  # (row group, its rows)
        self.largest = (0, "")  # (bytes of the largest row group, its file)
        for path in files:
            try:
                meta = pq.ParquetFile(path).metadata
            except (OSError, pa.ArrowInvalid) as e:
                raise DataError(f"data file {path!r}: {str(e).splitlines()[0]}") from None
            first = 0
            for g in range(meta.num_row_groups):
                self.groups.append((path, g, first))
                self.starts.append(self.num_rows + first)
                self.group_rows.append(meta.row_group(g).num_rows)
                self.largest = max(self.largest, (meta.row_group(g).total_byte_size, path))
                first += self.group_rows[-1]
            self.num_rows += first
        if self.num_rows == 0:
            raise DataError(f"no rows in {files}")

    def first_rows(self, column: str) -> dict[str, str]:
        """{value: "file row n"} of a column's distinct values, reading that column alone; for checks at the start."""
        found: dict[str, str] = {}
        for path, group, first in self.groups:
            try:
                values = pq.ParquetFile(path).read_row_group(group, columns=[column])[column].to_pylist()
            except KeyError:
                values = [None] * pq.ParquetFile(path).metadata.row_group(group).num_rows
            for i, value in enumerate(values):
                found.setdefault(value or "", f"{path} row {first + i}")
        return found

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, i: int) -> Sample:
        """Row `i` in file order. Its row group stays at hand until a row of another one is asked for."""
        if not 0 <= i < self.num_rows:
            raise IndexError(i)
        g = bisect.bisect_right(self.starts, i) - 1
        path, group, first = self.groups[g]
        if self.held[0] != g:
            self.held = g, []  # the old one goes before the new one comes
            for batch in pq.ParquetFile(path).iter_batches(batch_size=16, row_groups=[group]):
                self.held[1].extend(batch.to_pylist())
        k = i - self.starts[g]
        return parse_row(self.held[1][k], f"{path} row {first + k}", os.path.dirname(path), self.env_name)

    def shuffled(self, seed: int, start: int, num: int) -> "Rows":
        """`num` rows of an endless order, from position `start` on; the same for any number of ranks.

        Each epoch permutes the row groups and the rows within each, so that row groups are read one after the other.
        """
        numbers: list[int] = []
        for epoch in itertools.count(start // self.num_rows):
            rng, position = random.Random(f"{seed}-{epoch}"), epoch * self.num_rows
            for g in rng.sample(range(len(self.groups)), len(self.groups)):
                order = list(range(self.group_rows[g]))
                rng.shuffle(order)
                skip = max(0, start - position)
                numbers += [self.starts[g] + k for k in order[skip:]]
                position += len(order)
                if len(numbers) >= num:
                    return Rows(self, numbers[:num])


@dataclass(frozen=True)
class Rows(Sequence):
    """Some rows of a ParquetData, by number; each is read when it is asked for."""

    data: ParquetData
    numbers: list[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> Sample:
        return self.data[self.numbers[i]]


# ---------------------------------------------------------------------------------------------------- images
MAX_ASPECT = 200  # of transformers' Qwen-VL image processors
_RESAMPLING = {k: Image.Resampling[k.upper()] for k in ("box", "bilinear", "bicubic", "lanczos")}


def view_size(width: int, height: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(width, height) of the model's view: multiples of `factor` (patch x merge), area within the bounds.

    The rule is `smart_resize` of transformers' Qwen2VLImageProcessor, with one addition: enlarging to `min_pixels`
    never goes above `max_pixels`. As there, a thin image keeps one `factor` on its short side, and may then be larger.

    >>> view_size(672, 672, factor=28, min_pixels=56 * 56, max_pixels=112 * 112)
    (112, 112)
    """
    w, h = (round(side / factor) * factor for side in (width, height))
    if w * h < min_pixels:
        scale = math.sqrt(min_pixels / (width * height))
        w, h = (math.ceil(side * scale / factor) * factor for side in (width, height))
    if w * h > max_pixels:
        scale = math.sqrt(width * height / max_pixels)
        w, h = (math.floor(side / scale / factor) * factor for side in (width, height))
    return max(factor, w), max(factor, h)


@dataclass(frozen=True)
class ImageRules:
    """How the model's view of an image is made: shared by prompts and observations, by training and evaluation."""

    factor: int  # patch_size x merge_size
    min_pixels: int
    max_pixels: int
    resampling: str

    def view_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """(width, height) of the view of an image of `size`; no pixel is touched. Raises ValueError as `make_view`."""
        width, height = size
        if min(size) < 1 or max(size) > MAX_ASPECT * min(size):
            raise ValueError(
                f"an image of {width} x {height} pixels: one side may be {MAX_ASPECT} times the other at most"
            )
        return view_size(width, height, factor=self.factor, min_pixels=self.min_pixels, max_pixels=self.max_pixels)

    def make_view(self, image: Image.Image) -> Image.Image:
        """The picture the model sees, RGB. Raises ValueError on one that the models' processors refuse."""
        size = self.view_size(image.size)
        image = image.convert("RGB")
        return image if image.size == size else image.resize(size, _RESAMPLING[self.resampling])


def decode_image(data: bytes, where: str) -> Image.Image:
    """Encoded bytes -> PIL image with its pixels loaded. Raises DataError naming the row."""
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as e:
        raise DataError(f"{where}: an image cannot be decoded ({e})") from None
    return image


@dataclass(frozen=True)
class View:
    """An image as the model sees it, with its content hash: equal hash means equal pixels."""

    image: Image.Image
    uuid: str

    @classmethod
    def of(cls, image: Image.Image) -> "View":
        digest = hashlib.sha256(str(image.size).encode())
        digest.update(image.tobytes())
        return cls(image, digest.hexdigest())


# ---------------------------------------------------------------------------------------------------- text
# In what frame each family was taught to give boxes: its model cards say it, no file of the model folder does.
BOX_FRAMES = {"qwen2_vl": "rel1000", "qwen2_5_vl": "model_pixels", "qwen3_vl": "rel1000"}


class Codec:
    """Text, chat markers and image slots -> token ids, for one model folder.

    What differs between model families is read from the folder's own config, tokenizer and processor; the box frame
    alone hangs on the model's type. A model that does not fit stops here (`_what_is_missing`). Turn markers
    (ChatML, as in the Qwen chat templates) and image slots are added as ids. Text never makes a control token:
    `<|im_end|>` written in it stays plain characters. Where anyone may have written it (a user's turn, chat observations,
    errors) tags such as `</tool_call>` stay characters too; in system and assistant turns, and in the observations that a
    tool has laid out itself, they are the tokens that the model knows them as (`tags=True`).
    """

    def __init__(self, folder: str):
        try:
            self.config = AutoConfig.from_pretrained(folder)
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as e:
            raise DataError(f"model folder {folder!r}: {str(e).splitlines()[0]}") from None
        try:
            self.rope = RopeRules.of(self.config)
        except ValueError as e:
            raise DataError(f"model folder {folder!r} ({self.config.model_type}) is not supported: {e}") from None
        self.has_vision = hasattr(self.config, "vision_config")
        if self.has_vision:
            try:
                self.image_processor = AutoProcessor.from_pretrained(folder).image_processor
            except (OSError, ValueError, AttributeError) as e:
                raise DataError(f"model folder {folder!r}: no image processor ({str(e).splitlines()[0]})") from None
            self.merge_size = self.rope.merge_size
            self.patch_size = self.config.vision_config.patch_size
            self.image_token_id = self.rope.image_token_id
        spelled = json.loads(self.tokenizer.backend_tokenizer.to_str())
        self._tags = Tokenizer.from_str(json.dumps(spelled))
        for token in spelled["added_tokens"]:
            token["special"] = token["special"] or bool(re.fullmatch(r"</?\w+>", token["content"]))
        self._plain = Tokenizer.from_str(json.dumps(spelled))
        self._tags.encode_special_tokens = self._plain.encode_special_tokens = True  # = encode them as plain text
        special = self.tokenizer.get_added_vocab()
        need = ["<|im_start|>", "<|im_end|>"]
        if self.has_vision:
            need += ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
        missing = ", ".join(t for t in need if t not in special)
        if missing:
            raise DataError(f"model folder {folder!r}: the tokenizer lacks {missing}; only ChatML models are supported")
        if missing := self._what_is_missing():
            raise DataError(f"model folder {folder!r} ({self.config.model_type}) is not supported: {missing}")
        self.im_start, self.im_end = special["<|im_start|>"], special["<|im_end|>"]
        if self.has_vision:
            self.vision_start, self.vision_end = special["<|vision_start|>"], special["<|vision_end|>"]
        # Some templates (Qwen2-VL) put a system turn before a conversation that has none.
        self._default_system: list[int] = []
        if self.tokenizer.chat_template or self.has_vision:
            template = self.tokenizer if self.tokenizer.chat_template else AutoProcessor.from_pretrained(folder)
            rendered = template.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
            self._default_system = self.encode_slots(rendered.split("<|im_start|>user")[0], tags=True, markers=True)
        self.newline, self._assistant = self.encode("\n"), [self.im_start, *self.encode("assistant\n")]
        # Ids the policy must never sample: vision and chat control tokens, and the padded rows of the embedding.
        # `<think>`, `<tool_call>` and the like are added tokens too, but not special ones: they stay.
        self.vocab_size = self.config.get_text_config().vocab_size
        self.stop_ids = [self.im_end]
        chat_control = {i for i, t in self.tokenizer.added_tokens_decoder.items() if t.special}
        self.banned = frozenset((chat_control | set(range(len(self.tokenizer), self.vocab_size))) - set(self.stop_ids))
        self.banned_ids = sorted(self.banned)

    def _what_is_missing(self) -> str:
        """Why the code would be wrong about this model, in words; "" for one that fits."""
        kinds = set(getattr(self.config.get_text_config(), "layer_types", None) or ()) - {"full_attention"}
        if kinds:
            return f"its text layers are in part {', '.join(sorted(kinds))}; packed rows need full_attention"
        if not self.has_vision:
            parts = ", ".join(self.config.sub_configs)
            return f"it is made of {parts}, which is neither text alone nor text and a vision_config" if parts else ""
        for ours, theirs in (("patch_size", "patch_size"), ("spatial_merge_size", "merge_size")):
            wanted, made = getattr(self.config.vision_config, ours, None), getattr(self.image_processor, theirs, None)
            if wanted is None or wanted != made:
                return f"its vision_config's {ours} is {wanted}, its image processor's {theirs} is {made}"
        pad = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        if pad != self.image_token_id:
            return f"its config's image_token_id is {self.image_token_id}, its tokenizer's <|image_pad|> is {pad}"
        return ""

    @property
    def box_frame(self) -> str:
        """What the numbers of the model's boxes mean (`tools.box_to_original`). Raises DataError where nobody knows."""
        if self.has_vision and self.config.model_type not in BOX_FRAMES:
            raise DataError(
                f"how {self.config.model_type} was taught to give boxes is not known; set box_frame to model_pixels,"
                f" rel1000 or original (known: {', '.join(BOX_FRAMES)})"
            )
        return BOX_FRAMES.get(self.config.model_type, "original")  # without vision there are no boxes

    def encode(self, text: str, *, tags: bool = False) -> list[int]:
        """Plain text; control tokens written in it stay plain characters, and tags as well unless `tags`."""
        return (self._tags if tags else self._plain).encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """For parsing a call and for showing; never encoded again."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def image_ids(self) -> list[int]:
        """An image slot in the engine's view: ONE pad between its markers."""
        return [self.vision_start, self.image_token_id, self.vision_end]

    def encode_slots(self, text: str, *, tags: bool = False, markers: bool = False) -> list[int]:
        """Text with `<image>` slots, engine view. `markers` honours `<|im_start|>` and `<|im_end|>` in the text."""
        ids = []
        for part in re.split(r"(<image>|<\|im_start\|>|<\|im_end\|>)" if markers else "(<image>)", text):
            if part == "<image>":
                ids += self.image_ids()
            elif markers and part in ("<|im_start|>", "<|im_end|>"):
                ids.append(self.im_start if part == "<|im_start|>" else self.im_end)
            elif part:
                ids += self.encode(part, tags=tags)
        return ids

    def encode_chat(self, messages: list[dict], *, slots: bool = True) -> list[int]:
        """Chat messages between turn markers, then the start of the assistant's turn; engine view.

        `slots=False` takes `<image>` for text as well.
        """
        ids = []
        for m in messages:
            text, tags = m["role"] + "\n" + m["content"], m["role"] in ("system", "assistant")
            # Role and content in one piece: "\n\n" can be one token.
            content = self.encode_slots(text, tags=tags) if slots else self.encode(text, tags=tags)
            ids += [self.im_start, *content, self.im_end, *self.newline]
        return ids + self._assistant

    def encode_prompt(self, messages: list[dict]) -> list[int]:
        """A conversation from the data: as `encode_chat`, after the template's default system turn where it has one."""
        return (self._default_system if messages[0]["role"] != "system" else []) + self.encode_chat(messages)

    def num_image_tokens(self, size: tuple[int, int]) -> int:
        """Trainer tokens of a view, from its (width, height) alone."""
        return (size[0] // (self.patch_size * self.merge_size)) * (size[1] // (self.patch_size * self.merge_size))

    def grid(self, size: tuple[int, int]) -> tuple[int, int, int]:
        """The (t, h, w) patch grid of a view."""
        return (1, size[1] // self.patch_size, size[0] // self.patch_size)

    def expand(self, engine_ids: list[int], sizes: list[tuple[int, int]]) -> list[int]:
        """Engine view -> trainer view: the k-th pad becomes as many pads as the k-th view takes."""
        if not self.has_vision:
            return list(engine_ids)
        out, k = [], 0
        for t in engine_ids:
            if t == self.image_token_id:
                if k == len(sizes):
                    raise ValueError(f"more image pads than the {len(sizes)} images")
                out += [t] * self.num_image_tokens(sizes[k])
                k += 1
            else:
                out.append(t)
        if k != len(sizes):
            raise ValueError(f"{k} image pads, but {len(sizes)} images")
        return out

    def pixel_values(self, images: list[Image.Image]) -> tuple[torch.Tensor, torch.Tensor]:
        """Views -> (`pixel_values`, `image_grid_thw`) from the model's own processor, which resizes nothing."""
        out = self.image_processor(images=images, do_resize=False, return_tensors="pt")
        expected = torch.tensor([self.grid(i.size) for i in images])
        if not torch.equal(out["image_grid_thw"], expected):
            raise ValueError(f"the processor made grids {out['image_grid_thw'].tolist()}, expected {expected.tolist()}")
        return out["pixel_values"], out["image_grid_thw"]


# ---------------------------------------------------------------------------------------------------- micro-batches
# What a row may say about each of its tokens, as a list of floats; None or no such attribute = not known.
TOKEN_FIELDS = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "advantages", "returns", "weights")


@dataclass
class MicroBatch:
    """Whole trajectories one behind the other in a single row, without padding. Entry t speaks about token t.

        input_ids      | trajectory 0 .... | trajectory 1 .. | trajectory 2 |
        text position  | 0 1 2 3 4 5 6 7 8 | 0 1 2 3 4 5 6 7 | 0 1 2 3 4 5  |
        seq_ids        | 0 0 0 0 0 0 0 0 0 | 1 1 1 1 1 1 1 1 | 2 2 2 2 2 2  |
        cu_seqlens     0                   9                17             23

    Attention stays within a trajectory and positions restart, so that each gets the logits that it would get alone.
    `views` are the distinct images, `pixel_values` theirs; `image_index[k]` says which of them the k-th image slot shows.
    """

    rows: list  # the trajectories, in this order
    input_ids: torch.Tensor  # (1, T)
    position_ids: torch.Tensor  # (4, 1, T): text position, M-RoPE's time, height, width; (1, T) for text-only models
    cu_seqlens: torch.Tensor  # (trajectories + 1,) int32
    seq_ids: torch.Tensor  # (1, T)
    response_mask: torch.Tensor  # (1, T) bool
    rollout_logprobs: torch.Tensor | None = None  # (1, T), as the six below
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    views: list[View] = field(default_factory=list)  # the distinct images
    pixel_values: torch.Tensor | None = None  # (patches, dim), once they are made
    image_grid_thw: torch.Tensor | None = None  # (distinct images, 3)
    image_index: torch.Tensor | None = None  # (image slots,)

    @property
    def lengths(self) -> list[int]:
        return [len(r.tokens) for r in self.rows]

    def read(self, name: str) -> None:
        """Takes one of TOKEN_FIELDS from the rows; None if no row has it."""
        lists = [getattr(r, name, None) for r in self.rows]
        missing = sum(values is None for values in lists)
        if missing == len(lists):
            setattr(self, name, None)
            return
        if missing:
            raise ValueError(f"{missing} of {len(lists)} trajectories have no {name}")
        if [len(values) for values in lists] != self.lengths:
            raise ValueError(f"{name} does not have one entry per token")
        flat = torch.tensor([v for values in lists for v in values], dtype=torch.float32)
        setattr(self, name, flat[None].to(self.input_ids.device))

    def write(self, name: str, values: torch.Tensor) -> None:
        """Keeps one of TOKEN_FIELDS that was computed here, (1, T), and gives every row its part as a list."""
        values = values.detach()
        setattr(self, name, values)
        for row, part in zip(self.rows, values[0].split(self.lengths), strict=True):
            setattr(row, name, part.tolist())

    def to(self, device: torch.device) -> "MicroBatch":
        return replace(self, **{k: v.to(device) for k, v in vars(self).items() if isinstance(v, torch.Tensor)})


def plan_microbatches(lengths: list[int], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """plan[rank][k] are the numbers of the rows in a rank's k-th micro-batch; every rank has as many of them.

    Longest first into the emptiest micro-batch of all ranks; where that exceeds `max_tokens`, once more with one more
    micro-batch per rank. So they are few and equally full, and the k-th ones, for which the ranks wait on one another,
    are neighbours in size. A row longer than `max_tokens` is alone. With fewer rows than micro-batches some are empty.

    >>> plan_microbatches([2, 9, 5, 4, 1], num_ranks=2, max_tokens=12)
    [[[1, 0]], [[2, 3, 4]]]
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    per_rank = -(-sum(min(n, max_tokens) for n in lengths) // (num_ranks * max_tokens))
    while (chunks := _fill(lengths, longest_first, per_rank * num_ranks, max_tokens)) is None:
        per_rank += 1
    chunks.sort(key=lambda chunk: -sum(lengths[i] for i in chunk))
    return [chunks[rank::num_ranks] for rank in range(num_ranks)]


def _fill(lengths: list[int], order: list[int], num: int, max_tokens: int) -> list[list[int]] | None:
    """The rows in `order`, each into the emptiest of `num` chunks; None if one does not fit."""
    chunks: list[list[int]] = [[] for _ in range(num)]
    emptiest = [(0, c) for c in range(num)]  # heap of (tokens, chunk)
    for i in order:
        tokens, c = emptiest[0]
        if tokens and tokens + lengths[i] > max_tokens:
            return None
        chunks[c].append(i)
        heapq.heapreplace(emptiest, (tokens + lengths[i], c))
    return chunks


def pack_rows(rows: list, codec: Codec, *, pixels: bool = True) -> MicroBatch:
    """Rows (with `tokens`, `response_mask`, `views` and any of TOKEN_FIELDS) -> one micro-batch, in the given order.

    How rows are laid out changes no gradient: the loss is a sum over tokens. Without `pixels`, which take most of the
    memory, it waits for `load_pixels`.
    """
    if any(r.response_mask[0] for r in rows):  # in a packed row the trajectory before it would
        raise ValueError("the first token of a trajectory cannot be a response token: nothing predicts it")
    slots = [v for r in rows for v in r.views]
    lengths = torch.tensor([len(r.tokens) for r in rows])
    batch = MicroBatch(
        rows=rows,
        input_ids=torch.tensor([[t for r in rows for t in r.tokens]]),
        position_ids=packed_positions(
            [(r.tokens, [codec.grid(v.image.size) for v in r.views]) for r in rows], codec.rope
        ),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int(),
        seq_ids=torch.repeat_interleave(torch.arange(len(rows)), lengths)[None],
        response_mask=torch.tensor([[m for r in rows for m in r.response_mask]], dtype=torch.bool),
    )
    for name in TOKEN_FIELDS:
        batch.read(name)
    if slots:
        # Equal sizes side by side: attention within images runs as one batch per run of them.
        batch.views = sorted({v.uuid: v for v in slots}.values(), key=lambda v: v.image.size)
        number = {v.uuid: k for k, v in enumerate(batch.views)}
        batch.image_grid_thw = torch.tensor([codec.grid(v.image.size) for v in batch.views])
        batch.image_index = torch.tensor([number[v.uuid] for v in slots])
    return with_pixels(batch, codec) if pixels else batch


_PIXEL_THREADS = ThreadPoolExecutor(2, thread_name_prefix="pixels")
_AHEAD = ThreadPoolExecutor(1, thread_name_prefix="ahead")


def with_pixels(batch: MicroBatch, codec: Codec) -> MicroBatch:
    """The micro-batch with the pixels of its views, each processed once, in threads."""
    if not batch.views:
        return batch
    pixels = _PIXEL_THREADS.map(lambda v: codec.pixel_values([v.image])[0], batch.views)
    return replace(batch, pixel_values=torch.cat(list(pixels)))


def load_pixels(batches: list[MicroBatch], codec: Codec) -> Iterator[MicroBatch]:
    """The micro-batches with their pixels, made while the one before is computed: a few of them are held at a time, where
    those of a whole step would be hundreds of gigabytes on a host.
    """
    futures = (_AHEAD.submit(with_pixels, batch, codec) for batch in batches)
    coming = next(futures, None)
    while coming:
        batch, coming = coming.result(), next(futures, None)
        yield batch


def add_blank_image(batch: MicroBatch, codec: Codec) -> None:
    """Gives a text-only micro-batch an image that no token shows.

    Under FSDP a rank that skips the vision tower skips its collectives, and the others wait for ever.
    """
    if not batch.views:
        side = codec.patch_size * codec.merge_size
        batch.views = [View.of(Image.new("RGB", (side, side)))]
        batch.image_grid_thw = torch.tensor([codec.grid((side, side))])
        batch.image_index = torch.zeros(0, dtype=torch.long)


def regroup(source: str, target: str, rows: int = 64) -> None:
    """Copies a parquet file into one with row groups of `rows` rows. Holds a few pages of the source at a time, which in a
    large row group can be a thousand rows each."""
    file = pq.ParquetFile(source, buffer_size=1 << 20)
    with pq.ParquetWriter(f"{target}.tmp", file.schema_arrow, compression="none") as writer:
        for batch in track(file.iter_batches(batch_size=rows), target, total=-(-file.metadata.num_rows // rows)):
            writer.write_batch(batch, row_group_size=rows)
    os.replace(f"{target}.tmp", target)


def write_parquet(path: str, rows: list[dict], row_group_size: int = 64) -> None:
    """Rows in VeRL's format -> parquet, in row groups small enough to be read one at a time."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    tmp = f"{path}.tmp"
    pq.write_table(pa.Table.from_pylist(rows), tmp, row_group_size=row_group_size, compression="none")
    os.replace(tmp, path)


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] != "regroup":
        sys.exit("python data.py regroup LARGE_GROUPS.parquet SMALL_GROUPS.parquet")
    regroup(*sys.argv[2:])
