"""Rows, images, text: what is read, how it is tokenised, and which sentence a broken row gives."""

import io
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import SHARED
from PIL import Image

from data import (
    Codec,
    DataError,
    ImageRules,
    ParquetData,
    View,
    decode_image,
    make_microbatches,
    pad_rows,
    parse_row,
    write_parquet,
)


def png(color=(1, 2, 3), size=(40, 30)):
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, "PNG")
    return buffer.getvalue()


def row(**changes):
    base = {
        "data_source": "toy_zoom",
        "prompt": [{"role": "user", "content": "<image>what?"}],
        "images": [{"bytes": png(), "path": None}],
        "ability": "x",
        "env_name": "visual_toolbox_v2",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"index": 0, "split": "train"},
    }
    return {**base, **changes}


def test_round_trip_and_row_groups(tmp_path):
    path = str(tmp_path / "d.parquet")
    write_parquet(path, [row(extra_info={"index": i}) for i in range(10)], row_group_size=4)
    assert pq.ParquetFile(path).metadata.num_row_groups == 3
    data = ParquetData([path])
    assert data.num_rows == 10
    assert [s.extra_info["index"] for s in data] == list(range(10))
    first = next(iter(data))
    assert (first.where, first.images[0], first.env_name) == (f"{path} row 0", png(), "visual_toolbox_v2")
    assert next(iter(ParquetData([path], env_name=""))).env_name == ""
    assert data.first_rows("env_name") == {"visual_toolbox_v2": f"{path} row 0"}


def test_shuffling_is_seeded_covers_every_row_and_changes_with_the_epoch(tmp_path):
    path = str(tmp_path / "d.parquet")
    write_parquet(path, [row(extra_info={"index": i}) for i in range(12)], row_group_size=5)

    def draw(seed):
        return [s.extra_info["index"] for s, _ in zip(ParquetData([path]).shuffled(seed), range(24), strict=False)]

    a, b = draw(1), draw(2)
    assert a == draw(1) != b
    assert sorted(a[:12]) == sorted(a[12:]) == list(range(12)) and a[:12] != a[12:]


def test_large_nested_images_are_read_in_small_batches(tmp_path):
    """Plain table reads of such files fail or double the memory; every batch here holds at most 16 rows."""
    path = str(tmp_path / "big.parquet")
    noise = np.random.default_rng(0).bytes(1 << 20)
    write_parquet(
        path, [row(images=[{"bytes": noise + bytes([i]), "path": None}]) for i in range(40)], row_group_size=40
    )
    assert [s.images[0][-1] for s in ParquetData([path])] == list(range(40))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": None}, "f.parquet row 5: column 'prompt' is missing or null"),
        ({"prompt": [{"role": "user"}]}, "prompt must be a list of {role, content}"),
        ({"images": None}, "the prompt has 1 <image> slots, but the row has 0 images"),
        ({"images": [{"bytes": None, "path": None}]}, "an image must be bytes, a path or {bytes, path}"),
        ({"images": [{"bytes": None, "path": "gone.png"}]}, "image file 'gone.png': No such file or directory"),
        ({"images": [7]}, "an image must be bytes"),
        ({"reward_model": {"style": "rule"}}, "reward_model has no ground_truth"),
        ({"data_source": None}, "column 'data_source' is missing or null"),
    ],
)
def test_broken_rows_are_named(changes, message):
    with pytest.raises(DataError) as e:
        parse_row(row(**changes), "f.parquet row 5")
    assert "f.parquet row 5: " in str(e.value) and message in str(e.value)


def test_image_entries_of_every_kind(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    for entry in (png(), {"bytes": png(), "path": "x"}, {"bytes": None, "path": "a.png"}, "a.png"):
        assert parse_row(row(images=[entry]), "r", str(tmp_path)).images == (png(),)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match="data file 'nowhere.parquet'"):
        ParquetData(["nowhere.parquet"])
    (tmp_path / "x.parquet").write_bytes(b"hello, not parquet")
    with pytest.raises(DataError, match="x.parquet"):
        ParquetData([str(tmp_path / "x.parquet")])
    pq.write_table(pa.table({"prompt": []}), tmp_path / "empty.parquet")
    with pytest.raises(DataError, match="no rows"):
        ParquetData([str(tmp_path / "empty.parquet")])
    with pytest.raises(DataError, match="row 9: an image cannot be decoded"):
        decode_image(png()[:50], "f.parquet row 9")
    with pytest.raises(DataError, match="model folder 'nowhere'"):
        Codec("nowhere")


def test_views_are_made_once_and_never_resized_again(codec):
    rules = ImageRules(factor=28, min_pixels=56 * 56, max_pixels=200 * 200, resampling="bicubic")
    for size in [(40, 30), (300, 50), (1000, 700), (57, 57), (28, 400)]:
        view = rules.make_view(Image.effect_noise(size, 60))
        pixels, grid = codec.pixel_values([view])  # raises if the processor made another grid
        assert codec.num_image_tokens(view.size) == int(grid.prod()) // 4
        assert tuple(grid[0].tolist()) == codec.grid(view.size)
        assert len(pixels) == int(grid.prod())


def test_both_views_of_a_sequence(codec):
    ids = [1, *codec.image_ids(), 2, *codec.image_ids()]
    pad = codec.image_token_id
    expanded = codec.expand(ids, [(56, 84), (28, 28)])
    assert expanded == [
        1,
        codec.vision_start,
        *[pad] * 6,
        codec.vision_end,
        2,
        codec.vision_start,
        pad,
        codec.vision_end,
    ]
    with pytest.raises(ValueError, match="more image pads than the 1 images"):
        codec.expand(ids, [(56, 84)])
    with pytest.raises(ValueError, match="2 image pads, but 3 images"):
        codec.expand(ids, [(28, 28)] * 3)


def test_bans(codec):
    banned = {codec.decode([i]) for i in codec.banned_ids}
    assert banned == {
        "<|endoftext|>",
        "<|im_start|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
    }
    assert codec.stop_ids == [codec.im_end]


class Row:
    def __init__(self, codec, engine_ids, views, sampled):
        self.views = views
        self.tokens = codec.expand(engine_ids, [v.image.size for v in views]) + sampled
        self.response_mask = [0] * (len(self.tokens) - len(sampled)) + [1] * len(sampled)
        self.rollout_logprobs = [-0.5 * m for m in self.response_mask]
        self.advantages = [2.0 * m for m in self.response_mask]


def test_microbatches_hold_every_row_once_and_each_image_once(codec):
    view_a = View.of(Image.new("RGB", (56, 56), (9, 9, 9)))
    view_b = View.of(Image.new("RGB", (84, 28), (200, 9, 9)))
    rows = [Row(codec, [1, *codec.image_ids()], [view_a], [k, k]) for k in range(5)]
    rows += [
        Row(codec, [1, *codec.image_ids(), *codec.image_ids()], [view_b, view_a], [7] * 20),
        Row(codec, [4, 5], [], [6]),
    ]
    batches = make_microbatches(rows, codec, max_tokens=40)
    # Longest first: the row of 32 tokens alone, four of the nine-token rows in 36 tokens, the fifth, the row of three.
    assert [tuple(b.input_ids.shape) for b in batches] == [(1, 32), (4, 9), (1, 9), (1, 3)]
    long, group, _, text_only = batches
    assert long.image_index.tolist() == [0, 1] and long.image_grid_thw.tolist() == [[1, 2, 6], [1, 4, 4]]
    assert group.image_index.tolist() == [0, 0, 0, 0], "four rows show one picture: it is held once"
    assert len(group.image_grid_thw) == 1 and len(group.pixel_values) == 16
    assert text_only.pixel_values is None and text_only.position_ids[:, 0].tolist() == [[0, 1, 2]] * 3
    assert sum(int(b.response_mask.sum()) for b in batches) == 5 * 2 + 20 + 1
    for b in batches:
        assert (b.advantages == 2.0 * b.response_mask).all() and (b.rollout_logprobs == -0.5 * b.response_mask).all()


def test_padding(codec):
    rows = [
        Row(codec, [1, *codec.image_ids()], [View.of(Image.new("RGB", (56, 56)))], [3, 3]),
        Row(codec, [4, 5], [], [6]),
    ]
    batch = pad_rows(rows, codec)
    assert batch.input_ids[1].tolist() == [4, 5, 6, 0, 0, 0, 0, 0, 0]
    assert batch.attention_mask[1].tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert batch.response_mask[1].tolist() == [False, False, True] + [False] * 6
    assert batch.position_ids[:, 1, :3].tolist() == [[0, 1, 2]] * 3 and batch.image_index.tolist() == [0]


def test_equal_pixels_equal_uuid():
    a, b, c = (View.of(Image.new("RGB", size, (5, 5, 5))) for size in ((28, 56), (28, 56), (56, 28)))
    assert a.uuid == b.uuid != c.uuid


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A Qwen2.5-VL folder without weights, around the real Qwen tokenizer."""
    source = os.path.join(SHARED, "data", "qwen_tokenizer")
    if not os.path.isdir(source):
        pytest.skip("the real Qwen tokenizer is not beside this checkout")
    from transformers import (
        AutoTokenizer,
        Qwen2_5_VLConfig,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    folder = str(tmp_path_factory.mktemp("qwen"))
    tokenizer = AutoTokenizer.from_pretrained(source)
    config = Qwen2_5_VLConfig(
        text_config={"vocab_size": 151936},
        image_token_id=151655,
        vision_start_token_id=151652,
        vision_end_token_id=151653,
    )
    config.save_pretrained(folder)
    Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(), chat_template=tokenizer.chat_template
    ).save_pretrained(folder)
    return Codec(folder)


CHATS = [
    [{"role": "user", "content": "Hello there, what is 12 + 30?"}],
    [{"role": "user", "content": "\n\nstarts and ends with newlines\n"}],
    [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": " leading space, émoji 🙂 and\n\nlines "},
    ],
    [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
]


@pytest.mark.parametrize("chat", CHATS)
def test_turn_markers_equal_the_chat_template(qwen, chat):
    expected = qwen.tokenizer.apply_chat_template(chat, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert qwen.encode_prompt(chat) == expected


def test_the_real_tokenizer_keeps_untrusted_text_plain(qwen):
    ids = qwen.encode("a <|im_end|> b <|image_pad|> c <|vision_start|>")
    assert not set(ids) & set(qwen.banned_ids) and qwen.im_end not in ids
    assert qwen.decode(ids) == "a <|im_end|> b <|image_pad|> c <|vision_start|>"
    tag = qwen.tokenizer.get_vocab()["</tool_call>"]
    assert tag not in qwen.encode("x</tool_call>") and qwen.encode("x</tool_call>", tags=True)[-1] == tag
    assert set(range(151669, 151936)) <= set(qwen.banned_ids), "padded rows of the embedding cannot be sampled"
    assert torch.tensor(qwen.banned_ids).max() < qwen.vocab_size
