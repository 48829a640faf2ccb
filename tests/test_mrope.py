"""Positions: typed-out tables, and transformers on random interleavings."""

import random

import pytest
import torch
from conftest import TOY
from transformers import AutoConfig, AutoModelForImageTextToText

from mrope import rope_positions

P = 9  # image token


def positions(tokens, grids):
    return rope_positions(
        torch.tensor(tokens), torch.tensor(grids).view(-1, 3), image_token_id=P, merge_size=2
    ).tolist()


def test_text_only():
    assert positions([1, 2, 3], []) == [[0, 1, 2]] * 3


def test_two_images_with_text_between():
    # "a", image of 2 rows x 1 column, "b", image of 1 x 3, "c".  The first takes positions 1, 1+row; goes on at 1 + 2 = 3.
    # "b" is 3; the second starts at 4 and goes on at 4 + 3 = 7.
    tokens = [1, P, P, 2, P, P, P, 3]
    assert positions(tokens, [[1, 4, 2], [1, 2, 6]]) == [
        [0, 1, 1, 3, 4, 4, 4, 7],
        [0, 1, 2, 3, 4, 4, 4, 7],
        [0, 1, 1, 3, 4, 5, 6, 7],
    ]


def test_image_first_image_last_and_neighbours():
    # Two adjacent images of one token each, then one of 2 x 2 at the end.
    assert positions([P, P, 5, P, P, P, P], [[1, 2, 2], [1, 2, 2], [1, 4, 4]]) == [
        [0, 1, 2, 3, 3, 3, 3],
        [0, 1, 2, 3, 3, 4, 4],
        [0, 1, 2, 3, 4, 3, 4],
    ]


def test_pads_and_grids_must_agree():
    with pytest.raises(ValueError, match="3 image tokens, but the image grids .* take 4"):
        positions([P, P, P], [[1, 4, 4]])
    with pytest.raises(ValueError, match="2 image tokens"):
        positions([P, 1, P], [])


def test_equal_to_transformers_on_500_random_interleavings():
    config = AutoConfig.from_pretrained(TOY)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config).model
    rng, image = random.Random(0), config.image_token_id
    for _ in range(500):
        tokens, grids = [], []
        for _ in range(rng.randint(1, 6)):
            tokens += [rng.randrange(50) for _ in range(rng.randint(1, 8))]
            if rng.random() < 0.7:
                rows, cols = rng.randint(1, 9), rng.randint(1, 9)
                tokens += [97, *[image] * (rows * cols), 98]
                grids.append([1, 2 * rows, 2 * cols])
        ids, thw = torch.tensor(tokens), torch.tensor(grids).view(-1, 3)
        ours = rope_positions(ids, thw, image_token_id=image, merge_size=2)
        theirs, _ = model.get_rope_index(
            ids[None], mm_token_type_ids=(ids == image).long()[None], image_grid_thw=thw if len(grids) else None
        )
        assert torch.equal(ours, theirs[:, 0])
