"""Rotary positions of a token sequence with images: `(3, T)` rows for time, height and width (M-RoPE).

Text advances all three rows by one per token. An image that starts at position p takes p in the time row and
p + row, p + column in the other two; the text after it goes on at p + max(rows, columns). A video is such a block with
several frames, whose time row moves on from frame to frame (Qwen2-VL, Qwen2.5-VL), or, where text with the time stands
between its frames (Qwen3-VL), so many images. Nothing looks ahead: the positions of a longer sequence begin with those of
a shorter one. Source: Qwen2-VL (arXiv:2409.12191, section 2.1), Qwen2.5-VL (arXiv:2502.13923, section 2.1.3); the numbers
equal transformers' `get_rope_index` (tests/test_mrope.py).
"""

from dataclasses import dataclass

import numpy as np
import torch

NO_TOKEN = -1  # the id of a pad that a model does not have


@dataclass(frozen=True)
class RopeRules:
    """What positions depend on besides the sequence itself. The defaults are those of a text-only model."""

    image_token_id: int = NO_TOKEN
    video_token_id: int = NO_TOKEN
    merge_size: int = 1  # a token covers merge_size x merge_size patches
    tokens_per_second: float | None = None  # None: a video's time advances by one per frame, not with the seconds

    @classmethod
    def of(cls, config) -> "RopeRules":
        """Reads a model's Hugging Face config; raises ValueError with what it lacks."""
        if not hasattr(config, "vision_config"):
            return cls()
        vision = config.vision_config
        missing = [k for k in ("image_token_id", "video_token_id") if not hasattr(config, k)]
        missing += [] if hasattr(vision, "spatial_merge_size") else ["vision_config.spatial_merge_size"]
        if "mrope_section" not in (getattr(config.get_text_config(), "rope_parameters", None) or {}):
            missing.append("mrope_section among the rope_parameters")
        if missing:
            raise ValueError(f"its config has no {' and no '.join(missing)}")
        per_second = getattr(vision, "tokens_per_second", None)
        return cls(config.image_token_id, config.video_token_id, vision.spatial_merge_size, per_second)


def rope_positions(
    tokens: torch.Tensor,
    rules: RopeRules,
    image_grids: torch.Tensor | None = None,
    video_grids: torch.Tensor | None = None,
    video_seconds: torch.Tensor | None = None,
) -> torch.Tensor:
    """Positions of one sequence in the expanded view, `(3, T)` int64.

    `tokens` is `(T,)`; the grids are `(number, 3)`, the (t, h, w) patch grid of each image or video in order of
    appearance, which fills `t * h * w / merge_size**2` pads; `video_seconds` is `(videos,)`, the seconds from one frame
    of the grid to the next, 1 where it is not given. Raises ValueError if the tokens and the grids disagree.

    >>> rope_positions(torch.tensor([7, 9, 9, 9, 9, 9, 9, 7]), RopeRules(image_token_id=9, merge_size=2),
    ...                torch.tensor([[1, 4, 6]])).tolist()
    [[0, 1, 1, 1, 1, 1, 1, 4], [0, 1, 1, 1, 2, 2, 2, 4], [0, 1, 2, 3, 1, 2, 3, 4]]
    """
    ids = tokens.numpy()
    video_interval = None  # (videos,): how far time moves from frame to frame, where that is not 1
    if rules.tokens_per_second is not None and video_grids is not None:
        seconds = torch.ones(len(video_grids)) if video_seconds is None else video_seconds
        video_interval = seconds.numpy().astype(np.float32) * np.float32(rules.tokens_per_second)
    is_image, is_video = ids == rules.image_token_id, ids == rules.video_token_id
    # Each row of positions is the running sum of its steps: 1 from a token of text to the next; within a line of a grid
    # only the column moves.
    steps = np.ones((3, len(ids)), np.int64)
    steps[:2] = ~(is_image | is_video)
    exits = []
    for name, is_pad, grids, interval in (
        ("image", is_image, image_grids, None),
        ("video", is_video, video_grids, video_interval),
    ):
        if is_pad.any() or (grids is not None and len(grids)):
            exits.append(_enter_blocks(steps, name, is_pad, grids, rules.merge_size, interval))
    for after, step in exits:  # last, since a block may follow another one directly
        inside = after < len(ids)
        steps[:, after[inside]] = step[:, inside]
    steps[:, :1] = 0
    return torch.from_numpy(steps.cumsum(1, out=steps))


def _enter_blocks(
    steps: np.ndarray, name: str, is_pad: np.ndarray, grids: torch.Tensor | None, merge_size: int, interval
):
    """Writes the steps at the start of each line and block; returns where blocks are left, by what step `(3, blocks)`.

    A block is an image, a frame that text separates from the one before it, or frames that follow each other directly.
    """
    pads = np.flatnonzero(is_pad)
    if grids is None or len(grids) == 0:
        raise ValueError(f"{len(pads)} {name} tokens, but no {name} grids")
    frames, rows, cols = (grids.numpy() // (1, merge_size, merge_size)).T
    if len(pads) != (total := (frames * rows * cols).sum()):
        raise ValueError(f"{len(pads)} {name} tokens, but the {name} grids {grids.tolist()} take {total}")
    # From here on one entry per frame; an image is one frame.
    owner = np.repeat(np.arange(len(frames)), frames)
    rows, cols = rows[owner], cols[owner]
    ends = (rows * cols).cumsum()
    first, last = pads[ends - rows * cols], pads[ends - 1]
    if (last - first != rows * cols - 1).any():
        raise ValueError(f"other tokens stand between the {name} tokens of one grid")
    follows = np.zeros(len(owner), bool)  # directly on the frame before it, of the same video
    follows[1:] = (owner[1:] == owner[:-1]) & (first[1:] == last[:-1] + 1)
    number = np.arange(len(owner))
    time = number - np.maximum.accumulate(np.where(follows, 0, number))  # frames before this one in its block
    if interval is not None:
        time = (time.astype(np.float32) * interval[owner]).astype(np.int64)

    # A new line: the column goes back, the row moves.
    width = np.repeat(cols, rows)  # of each line
    line = np.repeat(first, rows) + (np.arange(len(width)) - np.repeat(rows.cumsum() - rows, rows)) * width
    steps[1, line] = 1
    steps[2, line] = 1 - width
    steps[:, first] = 1
    if len(f := np.flatnonzero(follows)):  # back to the block's first row and column
        steps[:, first[f]] = time[f] - time[f - 1], 1 - rows[f], 1 - cols[f]
    closes = np.ones_like(follows)
    closes[:-1] = ~follows[1:]
    leave = np.maximum(rows, cols) - (time, rows - 1, cols - 1)
    return last[closes] + 1, leave[:, closes]


def packed_positions(rows: list[tuple[list[int], list[tuple[int, int, int]]]], rules: RopeRules) -> torch.Tensor:
    """`position_ids` of one packed row, from each sequence's tokens and image grids: the only place that makes them.

    `(4, 1, T)`: the position in the text, from which transformers finds the sequences' bounds, then time, height and
    width; `(1, T)`, the text's alone, for a text-only model.

    >>> packed_positions([([7, 7], []), ([7, 9, 9], [(1, 2, 4)])], RopeRules(image_token_id=9, merge_size=2)).tolist()
    [[[0, 1, 0, 1, 2]], [[0, 1, 0, 1, 1]], [[0, 1, 0, 1, 1]], [[0, 1, 0, 1, 2]]]
    """
    text = torch.cat([torch.arange(len(tokens)) for tokens, _ in rows])[None]  # (1, T)
    if rules.image_token_id == NO_TOKEN:
        return text
    rope = [rope_positions(torch.tensor(tokens), rules, torch.tensor(g).view(-1, 3)) for tokens, g in rows]
    return torch.cat([text[None], torch.cat(rope, -1)[:, None]])
