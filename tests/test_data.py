"""Rows, images, text: what is read, how it is tokenised, and which sentence a broken row gives."""

import copy
import io
import os
import random
import threading
from types import SimpleNamespace

import families
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import SHARED
from PIL import Image
from transformers import Gemma3TextConfig, LlavaConfig, Qwen2_5OmniConfig, Qwen3_5Config

from data import (
    Codec,
    DataError,
    ImageRules,
    ParquetData,
    View,
    decode_image,
    load_pixels,
    pack_rows,
    parse_row,
    plan_microbatches,
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
        return [s.extra_info["index"] for s in ParquetData([path]).shuffled(seed, 0, 24)]

    a, b = draw(1), draw(2)
    assert a == draw(1) != b
    assert sorted(a[:12]) == sorted(a[12:]) == list(range(12)) and a[:12] != a[12:]


def test_rows_by_number(tmp_path):
    """Over two files; only what is asked for is read, and a path in a row is opened for no other."""
    for name, first in (("a", 0), ("b", 10)):
        rows = [row(extra_info={"index": first + i}, images=[{"bytes": None, "path": f"{i}.png"}]) for i in range(7)]
        write_parquet(str(tmp_path / f"{name}.parquet"), rows, row_group_size=3)
    (tmp_path / "5.png").write_bytes(png())
    data = ParquetData([str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")])
    assert len(data) == 14 and (data[5].extra_info["index"], data[12].extra_info["index"]) == (5, 15)
    assert data[12].where == f"{tmp_path / 'b.parquet'} row 5"
    with pytest.raises(DataError, match=r"b.parquet row 6: image file '6.png'"):
        data[13]
    with pytest.raises(IndexError):
        data[14]
    assert len(data.held[1]) <= 3, "one row group at a time"


def test_large_row_groups_can_be_made_small(tmp_path, run_script):
    large, small = str(tmp_path / "large.parquet"), str(tmp_path / "small.parquet")
    write_parquet(large, [row(extra_info={"index": i}) for i in range(150)], row_group_size=150)
    run_script("data.py", "regroup", large, small, check=True)
    meta = pq.ParquetFile(small).metadata
    assert [meta.row_group(g).num_rows for g in range(meta.num_row_groups)] == [64, 64, 22]
    assert pq.read_table(small).equals(pq.read_table(large))
    assert ParquetData([large]).largest[0] > ParquetData([small]).largest[0] > 0
    assert ParquetData([small, large]).largest[1] == large


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


# The size rules of the released models' processors: side of an image token, min_pixels, max_pixels.
RULES = {
    "qwen2_vl": (28, 56 * 56, 16384 * 28 * 28),
    "qwen2_5_vl": (28, 56 * 56, 16384 * 28 * 28),
    "qwen3_vl": (32, 65536, 16777216),
}


def random_sizes(rng, num):
    """Tiny, middling and huge ones, and some as long as the processors take."""
    for i in range(num):
        low, high = [(1, 40), (20, 3000), (3000, 60_000)][i % 3]
        w = rng.randint(low, high)
        h = min(200 * w, rng.randint(low, high) if i % 4 else rng.choice([190, 200]) * w)
        yield (w, h) if rng.random() < 0.5 else (h, w)


@pytest.mark.parametrize("family", families.VISION_FAMILIES)
def test_the_number_of_image_tokens_is_known_without_pixels(family, tmp_path):
    """From the size alone, for 2,000 sizes of which some have gigapixels: as the family's own processor counts."""
    codec = Codec(families.write_folder(family, str(tmp_path)))
    factor, min_pixels, max_pixels = RULES[family]
    assert codec.patch_size * codec.merge_size == factor
    limits = dict(min_pixels=min_pixels, max_pixels=max_pixels)
    rules = ImageRules(factor, **limits, resampling="bicubic")
    counts = set()
    for w, h in random_sizes(random.Random(0), 2000):
        ours = codec.num_image_tokens(rules.view_size((w, h)))
        theirs = codec.image_processor.get_number_of_image_patches(h, w, limits) // codec.image_processor.merge_size**2
        assert ours == theirs, (w, h)
        counts.add(ours)
    assert min(counts) <= 64 and max(counts) > 16_000 and len(counts) > 500


@pytest.mark.parametrize("family", families.VISION_FAMILIES)
def test_the_processor_makes_as_many_patches_as_were_counted(family, tmp_path):
    codec, rng = Codec(families.write_folder(family, str(tmp_path))), random.Random(1)
    factor = RULES[family][0]
    rules = ImageRules(factor, factor**2, 40 * factor**2, "box")
    for w, h in [(1, 200), (1, 1), *((rng.randint(1, 700), rng.randint(4, 700)) for _ in range(30))]:
        size = rules.view_size((w, h))
        image = Image.new("RGB", (w, h))
        assert rules.make_view(image).size == size
        asked = codec.image_processor(
            images=[image], min_pixels=factor**2, max_pixels=40 * factor**2, return_tensors="pt"
        )
        assert asked["image_grid_thw"].tolist() == [list(codec.grid(size))]
        assert len(codec.pixel_values([rules.make_view(image)])[0]) == 4 * codec.num_image_tokens(size)


def test_a_size_that_no_processor_takes_is_told():
    rules = ImageRules(28, 56 * 56, 1120 * 1120, "box")
    assert rules.view_size((200, 1)) == (812, 28), (
        "by hand: sqrt(3136 / 200) = 3.96 times 200 x 1, up to multiples of 28"
    )
    for size in [(201, 1), (1, 201), (0, 5)]:
        with pytest.raises(ValueError, match="one side may be 200 times the other at most"):
            rules.view_size(size)


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


def test_the_layout_of_a_packed_row(codec):
    """Typed out: an image of 2 x 3 tokens, one of 2 x 2 that two trajectories show, and a trajectory without any."""
    wide, square = View.of(Image.new("RGB", (84, 56), (9, 9, 9))), View.of(Image.new("RGB", (56, 56), (200, 9, 9)))
    start, pad, end = codec.image_ids()
    rows = [
        Row(codec, [1, *codec.image_ids(), *codec.image_ids()], [wide, square], [7, 7]),
        Row(codec, [4, 5], [], [6]),
        Row(codec, [*codec.image_ids()], [square], [3]),
    ]
    batch = pack_rows(rows, codec)
    assert batch.rows is rows and batch.lengths == [17, 3, 7]
    assert batch.input_ids.tolist() == [
        [1, start, *[pad] * 6, end, start, *[pad] * 4, end, 7, 7] + [4, 5, 6] + [start, *[pad] * 4, end, 3]
    ]
    assert batch.position_ids[:, 0].tolist() == [
        [*range(17), 0, 1, 2, *range(7)],
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 7, 7, 7, 9, 10, 11] + [0, 1, 2] + [0, 1, 1, 1, 1, 3, 4],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 7, 8, 8, 9, 10, 11] + [0, 1, 2] + [0, 1, 1, 2, 2, 3, 4],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 7, 8, 9, 10, 11] + [0, 1, 2] + [0, 1, 2, 1, 2, 3, 4],
    ]
    assert batch.cu_seqlens.tolist() == [0, 17, 20, 27] and batch.cu_seqlens.dtype == torch.int32
    assert batch.seq_ids.tolist() == [[0] * 17 + [1] * 3 + [2] * 7]
    assert batch.response_mask.int().tolist() == [[0] * 15 + [1, 1] + [0, 0, 1] + [0] * 6 + [1]]
    assert batch.advantages.tolist() == [[0] * 15 + [2, 2] + [0, 0, 2] + [0] * 6 + [2]]
    assert batch.rollout_logprobs.tolist() == [[0] * 15 + [-0.5] * 2 + [0, 0, -0.5] + [0] * 6 + [-0.5]]
    assert batch.values is None, "no row has any"
    assert batch.image_grid_thw.tolist() == [[1, 4, 4], [1, 4, 6]], "each picture once"
    assert batch.image_index.tolist() == [1, 0, 0] and len(batch.pixel_values) == 16 + 24
    assert pack_rows(rows[1:2], codec).pixel_values is None


def test_a_text_only_model_gets_one_row_of_positions(codec, tmp_path):
    text_codec = Codec(families.write_folder("qwen3", str(tmp_path)))
    batch = pack_rows([Row(codec, [4, 5], [], [6]), Row(codec, [4], [], [6])], text_codec)
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]


def test_pixels_are_made_when_a_micro_batch_is_due(codec, monkeypatch):
    """Each distinct image of it once, outside the thread that asks, and never more than one micro-batch ahead."""
    seen = []
    process = Codec.pixel_values

    def count(self, images):
        seen.extend((threading.current_thread().name, i.size) for i in images)
        return process(self, images)

    monkeypatch.setattr(Codec, "pixel_values", count)
    a, b, same = (View.of(Image.new("RGB", (56, 56), c)) for c in ((1, 2, 3), (9, 9, 9), (1, 2, 3)))
    wide = View.of(Image.new("RGB", (84, 56)))
    rows = [
        Row(codec, [4, *codec.image_ids() * len(views)], views, [6]) for views in ([a], [same, b], [wide, a], [], [b])
    ]
    waiting = [pack_rows(part, codec, pixels=False) for part in (rows[:1], rows[1:2], rows[2:4], [*rows[4:], rows[4]])]
    assert not seen and all(batch.pixel_values is None for batch in waiting)
    batches = []
    for k, batch in enumerate(load_pixels(waiting, codec)):
        assert len(seen) <= [3, 5, 6, 6][k], "images of this micro-batch and of the next"
        batches.append(batch)
    assert all(batch.pixel_values is None for batch in waiting), "they are held by whoever computes, and nowhere else"
    sizes = [(56, 56), (56, 56), (56, 56), (56, 56), (56, 56), (84, 56)]
    assert sorted(size for _, size in seen) == sizes, "1 + 2 + 2 + 1: the last one shows one picture twice"
    assert all(name.startswith("pixels") for name, _ in seen)
    assert [b.image_grid_thw.tolist() for b in batches] == [
        [[1, 4, 4]], [[1, 4, 4]] * 2, [[1, 4, 4], [1, 4, 6]], [[1, 4, 4]],
    ]  # fmt: skip
    assert [b.image_index.tolist() for b in batches] == [[0], [0, 1], [1, 0], [0, 0]]
    for batch in batches:  # as if each picture had been processed alone, in the place where it is shown
        sizes = batch.image_grid_thw.prod(-1).tolist()
        shown = batch.pixel_values.split(sizes)
        for view, k in zip((v for r in batch.rows for v in r.views), batch.image_index.tolist(), strict=True):
            assert torch.equal(shown[k], codec.image_processor([view.image], do_resize=False)["pixel_values"])


def test_results_go_back_to_their_rows(codec):
    rows = [Row(codec, [4, 5], [], [6]), Row(codec, [4], [], [6])]
    batch = pack_rows(rows[::-1], codec)
    batch.write("values", torch.arange(5.0)[None].requires_grad_())
    assert rows[1].values == [0, 1] and rows[0].values == [2, 3, 4]
    assert not batch.values.requires_grad
    rows[0].values[0] = 9.0
    batch.read("values")
    assert batch.values.tolist() == [[0, 1, 9, 3, 4]]
    moved = batch.to(torch.device("cpu"))
    assert moved.rows is batch.rows and moved.values.tolist() == batch.values.tolist()
    rows[0].values = [1.0]
    with pytest.raises(ValueError, match="values does not have one entry per token"):
        batch.read("values")
    rows[0].values = None
    with pytest.raises(ValueError, match="1 of 2 trajectories have no values"):
        pack_rows(rows, codec)


def test_a_first_token_is_never_a_response(codec):
    """In a packed row it would be scored by the trajectory before it."""
    bad = Row(codec, [4], [], [6])
    bad.response_mask[0] = 1
    with pytest.raises(ValueError, match="nothing predicts it"):
        pack_rows([Row(codec, [4], [], [6]), bad], codec)


def test_plan_typed_out():
    # 26 tokens need two of 20: 8 | 6, 5 beside 6, 4 beside 8, 3 beside 11. In two of 13 the 3 finds no room: three.
    assert plan_microbatches([8, 6, 5, 4, 3], num_ranks=1, max_tokens=20) == [[[1, 2, 4], [0, 3]]]
    assert plan_microbatches([8, 6, 5, 4, 3], num_ranks=1, max_tokens=13) == [[[1, 4], [2, 3], [0]]]
    # On two ranks that makes four, dealt out by size: 8 and 4 + 3 run together, then 6 and 5.
    assert plan_microbatches([8, 6, 5, 4, 3], num_ranks=2, max_tokens=13) == [[[0], [1]], [[3, 4], [2]]]
    assert plan_microbatches([30, 1, 2], num_ranks=1, max_tokens=10) == [[[0], [2, 1]]], "a longer row is alone"
    assert plan_microbatches([5], num_ranks=2, max_tokens=10) == [[[0]], [[]]], "nothing is left for the second rank"
    assert plan_microbatches([], num_ranks=2, max_tokens=10) == [[], []]
    assert plan_microbatches([4, 4, 4], num_ranks=1, max_tokens=4) == [[[0], [1], [2]]]


def test_plan_on_random_lengths():
    """Every row once, no micro-batch too large, ranks alike, and little of the time is spent waiting for a larger one."""
    rng, waits = np.random.default_rng(0), []
    for _ in range(200):
        ranks, n = int(rng.integers(1, 9)), int(rng.integers(1, 300))
        lengths = rng.lognormal(6, rng.uniform(0, 1.5), n).astype(int).clip(1, 20_000).tolist()
        plan = plan_microbatches(lengths, ranks, 16_384)
        assert sorted(i for chunks in plan for chunk in chunks for i in chunk) == list(range(n))
        assert len({len(chunks) for chunks in plan}) == 1
        loads = np.array([[sum(lengths[i] for i in chunk) for chunk in chunks] for chunks in plan])
        for load, chunk in zip(loads.ravel(), (c for chunks in plan for c in chunks), strict=True):
            assert load <= 16_384 or len(chunk) == 1
        if n >= 20 * ranks and max(lengths) < 16_384:
            waits.append(1 - loads.sum() / (loads.max(0).sum() * ranks))
    assert len(waits) > 50 and np.mean(waits) < 0.01, np.mean(waits)


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
        text_config={
            "vocab_size": 151936,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
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


# ---------------------------------------------------------------------------------------------------- families
def folder_of(config, path):
    """The toy's tokenizer and processor beside another config."""
    folder = families.write_folder("qwen2_5_vl", str(path))
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", families.FAMILIES)
def test_what_differs_between_families_is_read_from_their_folders(family, tmp_path):
    codec = Codec(families.write_folder(family, str(tmp_path)))
    assert codec.has_vision == (family in families.VISION_FAMILIES)
    assert (codec.im_start, codec.im_end, codec.stop_ids) == (97, 98, [98])
    if codec.has_vision:
        assert codec.image_ids() == [99, 101, 100]
        assert codec.patch_size == {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16}[family]
        assert codec.grid((codec.patch_size * 4, codec.patch_size * 6)) == (1, 6, 4)
    # Model cards: Qwen2-VL and Qwen3-VL give thousandths of the sides, Qwen2.5-VL pixels of the resized image.
    frames = {"qwen2_vl": "rel1000", "qwen2_5_vl": "model_pixels", "qwen3_vl": "rel1000"}
    assert codec.box_frame == frames.get(family, "original")


def test_a_model_that_does_not_fit_stops_at_once(tmp_path):
    cases = [
        (LlavaConfig(), r"\(llava\) is not supported: its config has no video_token_id and .* no mrope_section"),
        (Qwen3_5Config(), r"\(qwen3_5\) is not supported: its config has no mrope_section|in part linear_attention"),
        (Gemma3TextConfig(), r"\(gemma3_text\) .* in part sliding_attention; packed rows need full_attention"),
        (Qwen2_5OmniConfig(), r"\(qwen2_5_omni\) .* which is neither text alone nor text and a vision_config"),
    ]
    for i, (config, message) in enumerate(cases):
        with pytest.raises(DataError, match=message):
            Codec(folder_of(config, tmp_path / str(i)))
    config = families.make_config("qwen2_5_vl")
    config.vision_config.patch_size = 16
    with pytest.raises(DataError, match="vision_config's patch_size is 16, its image processor's patch_size is 14"):
        Codec(folder_of(config, tmp_path / "patch"))
    config = families.make_config("qwen2_5_vl")
    config.image_token_id = 7
    with pytest.raises(DataError, match=r"image_token_id is 7, its tokenizer's <\|image_pad\|> is 101"):
        Codec(folder_of(config, tmp_path / "pad"))
    os.remove(os.path.join(folder_of(families.make_config("qwen2_5_vl"), tmp_path / "none"), "processor_config.json"))
    with pytest.raises(DataError, match="no image processor"):
        Codec(str(tmp_path / "none"))


def test_an_unknown_box_frame_is_told(codec):
    other = copy.copy(codec)
    other.config = SimpleNamespace(model_type="qwen9_vl")
    with pytest.raises(DataError, match="how qwen9_vl was taught to give boxes is not known; set box_frame"):
        other.box_frame  # noqa: B018
