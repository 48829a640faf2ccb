"""Rotary positions of a token sequence with images: `(3, T)` rows for time, height and width (M-RoPE).

Text advances all three rows by one per token. An image that starts at position p takes p in the time row and
p + row, p + column in the other two; the text after it goes on at p + max(rows, columns). Source: Qwen2-VL
(arXiv:2409.12191, section 2.1); the numbers equal transformers' `get_rope_index` (tests/test_mrope.py).
"""

import torch


def rope_positions(tokens: torch.Tensor, grids: torch.Tensor, *, image_token_id: int, merge_size: int) -> torch.Tensor:
    """Positions of one sequence in the expanded view, `(3, T)` int64.

    `tokens` is `(T,)`; `grids` is `(num_images, 3)`, the (t, h, w) patch grid of each image in order of appearance;
    an image fills `t * h * w / merge_size**2` consecutive `image_token_id` tokens. Raises ValueError if the tokens
    and the grids disagree on that number.

    >>> rope_positions(torch.tensor([7, 9, 9, 9, 9, 9, 9, 7]), torch.tensor([[1, 4, 6]]),
    ...                image_token_id=9, merge_size=2).tolist()
    [[0, 1, 1, 1, 1, 1, 1, 4], [0, 1, 1, 1, 2, 2, 2, 4], [0, 1, 2, 3, 1, 2, 3, 4]]
    """
    is_image = tokens == image_token_id
    advance = (~is_image).long()  # how far each token moves the start of what follows it
    if len(grids) == 0 and not is_image.any():
        return (advance.cumsum(0) - advance).expand(3, -1).clone()
    rows, cols = grids[:, 1] // merge_size, grids[:, 2] // merge_size  # (num_images,)
    if not (grids[:, 0] == 1).all():
        raise ValueError("an image grid has t != 1: videos are not supported")
    counts = rows * cols
    pads = is_image.nonzero()[:, 0]
    if len(pads) != int(counts.sum()):
        raise ValueError(f"{len(pads)} image tokens, but the image grids {grids.tolist()} take {int(counts.sum())}")
    advance[pads[counts.cumsum(0) - 1]] = torch.maximum(rows, cols)  # an image moves on at its last token, all at once
    positions = (advance.cumsum(0) - advance).repeat(3, 1)  # (3, T)
    within = torch.arange(len(pads)) - torch.repeat_interleave(
        counts.cumsum(0) - counts, counts
    )  # index inside its image
    width = torch.repeat_interleave(cols, counts)
    positions[1, pads] += within // width
    positions[2, pads] += within % width
    return positions
