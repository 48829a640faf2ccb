"""Positions: tables worked out by hand from the papers' rule, and transformers on random interleavings of every family."""

import random
import time

import pytest
import torch
from families import VISION_FAMILIES, make_config, make_lm
from transformers import AutoModelForImageTextToText, LlavaConfig, Qwen2VLConfig

from mrope import RopeRules, packed_positions, rope_positions

P, V = 9, 8  # pads of images and of videos; merge_size 2
RULES = RopeRules(P, V, 2)


def positions(tokens, images=(), videos=(), seconds=None, rules=RULES):
    images, videos = (torch.tensor(g).view(-1, 3) for g in (images, videos))
    seconds = None if seconds is None else torch.tensor(seconds)
    return rope_positions(torch.tensor(tokens), rules, images, videos, seconds).tolist()


# ---------------------------------------------------------------------------------------------------- by hand
def test_text_only():
    assert positions([1, 2, 3]) == [[0, 1, 2]] * 3
    assert rope_positions(torch.tensor([5, P, V]), RopeRules()).tolist() == [[0, 1, 2]] * 3, "no id is a pad there"
    assert positions([]) == [[], [], []]


def test_one_image():
    # Two words, an image of 2 rows x 3 columns from position 2 on, a word at 2 + 3.
    assert positions([1, 2, P, P, P, P, P, P, 3], [[1, 4, 6]]) == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]


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


def test_an_observation_image_at_turn_three():
    # Prompt: word, 2 x 2 image, word (0; 1..2; 3).  Turn 1 and its text observation: 4, 5, 6.  Turn 2: 7.  Its observation:
    # word 8, an image of 1 row x 2 columns from 9 on, word at 11.  Turn 3: 12, 13.
    tokens = [1, P, P, P, P, 2, 3, 3, 4, 3, 4, P, P, 4, 3, 3]
    assert positions(tokens, [[1, 4, 4], [1, 2, 4]]) == [
        [0, 1, 1, 1, 1, 3, 4, 5, 6, 7, 8, 9, 9, 11, 12, 13],
        [0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 9, 11, 12, 13],
        [0, 1, 2, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13],
    ]


def test_a_video_in_one_block():
    # Three frames of 1 x 2 from position 1 on; time moves on by 1 (Qwen2-VL) or by 4 x 0.4 s = 1.6 cut to whole numbers
    # (Qwen2.5-VL, tokens_per_second 4).  The word after it goes on at 1 + 2: columns count, frames do not.
    tokens, grid = [1, V, V, V, V, V, V, 2], [[3, 2, 4]]
    rest = [[0, 1, 1, 1, 1, 1, 1, 3], [0, 1, 2, 1, 2, 1, 2, 3]]
    assert positions(tokens, [], grid) == [[0, 1, 1, 2, 2, 3, 3, 3], *rest]
    per_second = RopeRules(P, V, 2, tokens_per_second=4)
    assert positions(tokens, [], grid, [0.4], per_second) == [[0, 1, 1, 2, 2, 4, 4, 3], *rest]
    assert positions(tokens, [], grid, None, per_second) == [[0, 1, 1, 5, 5, 9, 9, 3], *rest]
    assert positions(tokens, [], grid, [0.4]) == [[0, 1, 1, 2, 2, 3, 3, 3], *rest], "Qwen2-VL knows no seconds"


def test_a_video_with_the_time_between_its_frames():
    # Qwen3-VL: time stamp, frame of 1 x 2, time stamp, frame of 1 x 2, then an image of 1 x 1: each starts afresh.
    assert positions([7, V, V, 7, V, V, P, 1], [[1, 2, 2]], [[2, 2, 4]]) == [
        [0, 1, 1, 3, 4, 4, 6, 7],
        [0, 1, 1, 3, 4, 4, 6, 7],
        [0, 1, 2, 3, 4, 5, 6, 7],
    ]


def test_four_rows_for_packing():
    rows = [([1, P, P], [(1, 2, 4)]), ([2, 3], []), ([P, 1], [(1, 2, 2)])]
    assert packed_positions(rows, RULES).tolist() == [
        [[0, 1, 2, 0, 1, 0, 1]],
        [[0, 1, 1, 0, 1, 0, 1]],
        [[0, 1, 1, 0, 1, 0, 1]],
        [[0, 1, 2, 0, 1, 0, 1]],
    ]
    assert packed_positions([([1, 2, 3], []), ([4, 5], [])], RopeRules()).tolist() == [[0, 1, 2, 0, 1]]


def test_tokens_and_grids_must_agree():
    with pytest.raises(ValueError, match="3 image tokens, but the image grids .* take 4"):
        positions([P, P, P], [[1, 4, 4]])
    with pytest.raises(ValueError, match="2 image tokens, but no image grids"):
        positions([P, 1, P])
    with pytest.raises(ValueError, match="1 video tokens, but no video grids"):
        positions([V])
    with pytest.raises(ValueError, match="0 image tokens, but the image grids"):
        positions([1, 2], [[1, 2, 2]])
    with pytest.raises(ValueError, match="other tokens stand between the image tokens"):
        positions([P, 1, P], [[1, 2, 4]])


# ---------------------------------------------------------------------------------------------------- rules
def test_rules_are_read_from_the_config():
    assert RopeRules.of(make_config("qwen3")) == RopeRules()
    assert RopeRules.of(make_config("qwen2_vl")) == RopeRules(101, 102, 2)
    assert RopeRules.of(make_config("qwen2_5_vl")) == RopeRules(101, 102, 2, 4)
    assert RopeRules.of(make_config("qwen3_vl")) == RopeRules(101, 102, 2)
    # As the first Qwen2-VL folders write it: no text_config, "rope_scaling" with its older type.
    old = dict(rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}, image_token_id=5, video_token_id=6)
    assert RopeRules.of(Qwen2VLConfig(**old)) == RopeRules(5, 6, 2)


def test_a_config_that_lacks_something_is_named():
    with pytest.raises(
        ValueError, match="no video_token_id and no vision_config.spatial_merge_size and no mrope_section"
    ):
        RopeRules.of(LlavaConfig(image_token_id=3))
    config = make_config("qwen2_5_vl")
    del config.text_config.rope_parameters["mrope_section"]
    with pytest.raises(ValueError, match="its config has no mrope_section among the rope_parameters"):
        RopeRules.of(config)


# ---------------------------------------------------------------------------------------------------- transformers
def theirs(model, tokens, rules, images, videos, seconds):
    """`get_rope_index` of one sequence."""
    types = (tokens == rules.image_token_id).long() + 2 * (tokens == rules.video_token_id).long()
    options = {} if rules.tokens_per_second is None else {"second_per_grid_ts": seconds if len(videos) else None}
    grids = dict(image_grid_thw=images if len(images) else None, video_grid_thw=videos if len(videos) else None)
    return model.get_rope_index(tokens[None], mm_token_type_ids=types[None], **grids, **options)[0][:, 0]


def random_sequence(rng, family, rules):
    """Text, images and videos in any order, first and last places included; what surrounds a picture may be missing."""
    tokens, images, videos, seconds = [], [], [], []
    text = lambda least: tokens.extend(rng.randrange(50) for _ in range(rng.randint(least, 6)))  # noqa: E731
    for _ in range(rng.randint(1, 5)):
        kind = rng.choice(["text", "image", "image", "video"])
        rows, cols = rng.choice([(1, 1), (1, 7), (5, 1), (rng.randint(1, 5), rng.randint(1, 5))])
        if kind == "text":
            text(1)
        elif kind == "image":
            tokens += [rules.image_token_id] * (rows * cols)
            images.append([1, 2 * rows, 2 * cols])
        else:
            frames = rng.randint(1, 4)
            for f in range(frames):
                tokens += [rules.video_token_id] * (rows * cols)
                if family == "qwen3_vl" and f < frames - 1:
                    text(1)
            videos.append([frames, 2 * rows, 2 * cols])
            seconds.append(rng.choice([0.25, 0.4, 0.5, 1.0, 1.7]))
        # transformers takes neighbours of one kind for one picture: at least a token between.
        tokens.append(rng.randrange(50))
    if rng.random() < 0.5 and len(tokens) > 1:
        tokens.pop()
    grids = [torch.tensor(g).view(-1, 3) for g in (images, videos)]
    return torch.tensor(tokens), *grids, torch.tensor(seconds)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_equal_to_transformers_on_5000_random_interleavings(family):
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(make_config(family)).model
    rng, rules = random.Random(0), RopeRules.of(make_config(family))
    images = videos = 0
    for _ in range(5000):
        tokens, *rest = random_sequence(rng, family, rules)
        assert torch.equal(rope_positions(tokens, rules, *rest), theirs(model, tokens, rules, *rest))
        images, videos = images + len(rest[0]), videos + len(rest[1])
    assert images > 5000 and videos > 2500


def test_the_families_differ():
    """The comparison above can fail: on a video the rules of one family are wrong for another."""
    tokens, none, video = torch.tensor([1, *[102] * 6, 2]), torch.zeros(0, 3).long(), torch.tensor([[3, 2, 4]])
    results = [
        rope_positions(tokens, RopeRules.of(make_config(f)), none, video).tolist() for f in ("qwen2_vl", "qwen2_5_vl")
    ]
    assert results[0] != results[1]


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_positions_of_a_longer_sequence_extend_those_of_a_shorter_one(family):
    rng, rules = random.Random(1), RopeRules.of(make_config(family))
    for _ in range(100):
        tokens, images, _, _ = random_sequence(rng, family, rules)
        tokens = tokens[tokens != rules.video_token_id]
        whole, seen = rope_positions(tokens, rules, images), 0
        pads_of = (images.prod(-1) // 4).tolist()
        for end in range(len(tokens) + 1):  # every cut but those inside a picture
            pads = int((tokens[:end] == rules.image_token_id).sum())
            while seen < len(pads_of) and pads >= sum(pads_of[: seen + 1]):
                seen += 1
            if pads == sum(pads_of[:seen]):
                assert torch.equal(rope_positions(tokens[:end], rules, images[:seen]), whole[:, :end])


def test_a_text_model_counts_its_tokens():
    """What the text-only families do by themselves: the logits with our positions are those without."""
    for family in ("qwen2", "qwen3"):
        lm, tokens = make_lm(family), torch.arange(90)[None]
        ours = packed_positions([(tokens[0].tolist(), [])], RopeRules.of(lm.config))
        with torch.no_grad():
            assert torch.equal(lm(tokens, position_ids=ours).logits, lm(tokens).logits)
            assert not torch.allclose(lm(tokens, position_ids=ours // 2).logits, lm(tokens).logits, atol=1e-3)


def test_twenty_thousand_tokens_with_forty_images_take_milliseconds():
    """No loop over tokens: 2 ms on an idle core (bench.py mrope); here room for a busy one."""
    tokens = torch.tensor(([1] * 100 + [P] * 400) * 40)
    grids, seconds = torch.tensor([[1, 40, 40]] * 40), []
    for _ in range(10):
        start = time.perf_counter()
        rope_positions(tokens, RULES, grids)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.010
