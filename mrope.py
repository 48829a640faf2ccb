"""Rotary positions of a token sequence with images: `(3, T)` rows for time, height and width (M-RoPE).

Text advances all three rows by one per token. An image that starts at position p takes p in the time row and
p + row, p + column in the other two; the text after it goes on at p + max(rows, columns). A video is such a block with
several frames, whose time row moves on from frame to frame (Qwen2-VL, Qwen2.5-VL), or, where text with the time stands
between its frames (Qwen3-VL), so many images. Nothing looks ahead: the positions of a longer sequence begin with those of
a shorter one. Source: Qwen2-VL (arXiv:2409.12191, section 2.1), Qwen2.5-VL (arXiv:2502.13923, section 2.1.3); the numbers
equal transformers' `get_rope_index` (tests/test_mrope.py).
"""

from dataclasses import dataclass

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
    interval = 1.0 if rules.tokens_per_second is None else float(rules.tokens_per_second)
    if rules.tokens_per_second is not None and video_seconds is not None:
        interval = interval * video_seconds.float()  # (videos,)
    advance = torch.ones_like(tokens)  # how far each token moves the start of what follows it
    blocks = []
    for name, pad_id, grids, step in (
        ("image", rules.image_token_id, image_grids, 1.0),
        ("video", rules.video_token_id, video_grids, interval),
    ):
        pads = (tokens == pad_id).nonzero()[:, 0]
        if len(pads) or (grids is not None and len(grids)):
            last, moves, within = _blocks(name, pads, grids, rules.merge_size, step)
            advance[pads] = 0
            advance[last] = moves  # a block moves on at its last pad, all at once
            blocks.append((pads, within))
    positions = (advance.cumsum(0) - advance).repeat(3, 1)  # (3, T)
    for pads, within in blocks:
        positions[:, pads] += within
    return positions


def _blocks(name: str, pads: torch.Tensor, grids: torch.Tensor | None, merge_size: int, step):
    """(last, moves, within): each block's last pad, how far it moves on what follows, each pad's `(3, pads)` in its block.

    A block is an image, a frame that text separates from the one before it, or frames that follow each other directly.
    """
    if grids is None or len(grids) == 0:
        raise ValueError(f"{len(pads)} {name} tokens, but no {name} grids")
    frames, rows, cols = grids[:, 0], grids[:, 1] // merge_size, grids[:, 2] // merge_size
    if len(pads) != int((frames * rows * cols).sum()):
        raise ValueError(
            f"{len(pads)} {name} tokens, but the {name} grids {grids.tolist()} take {int((frames * rows * cols).sum())}"
        )
    # From here on one entry per frame; an image is one frame.
    owner = torch.repeat_interleave(torch.arange(len(grids)), frames)
    rows, cols = rows[owner], cols[owner]
    sizes = rows * cols
    ends = sizes.cumsum(0)
    starts = ends - sizes
    if not torch.equal(pads[ends - 1] - pads[starts], sizes - 1):
        raise ValueError(f"other tokens stand between the {name} tokens of one grid")
    number = torch.arange(len(owner))
    follows = torch.zeros_like(owner, dtype=torch.bool)  # directly on the frame before it, of the same video
    follows[1:] = (owner[1:] == owner[:-1]) & (pads[starts[1:]] == pads[ends[:-1] - 1] + 1)
    closes = ~follows.roll(-1)  # the first frame never follows, so the last one closes
    time = number - torch.where(follows, 0, number).cummax(0).values  # of a frame in its block
    time = (time * (step[owner] if isinstance(step, torch.Tensor) else step)).long()
    frame = torch.repeat_interleave(number, sizes)  # of each pad
    place = torch.arange(len(pads)) - starts[frame]
    width = cols[frame]
    within = torch.stack([time[frame], place // width, place % width])
    return pads[ends[closes] - 1], torch.maximum(rows, cols)[closes], within


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
