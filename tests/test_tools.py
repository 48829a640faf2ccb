"""Tools: where crops land, what bad calls give, what an observation may be."""

import json
import math
import random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from data import ImageRules, view_size
from tools import Observation, ToolBase, ToolError, VisualToolboxV2, box_to_original, crop_box


def toolbox(image, view=None, **kwargs):
    tool = ToolBase.create("visual_toolbox_v2", **kwargs)
    tool.reset([], {"image": [view or image]}, {"image": [image]})
    return tool


def call(name="image_zoom_in_tool", **arguments):
    return "<think>x</think><tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


# Side of an image token, min_pixels and max_pixels of the families' released processors; max_pixels small, for speed.
FAMILY_RULES = {
    "qwen2_vl": (28, 56 * 56, 300 * 300),
    "qwen2_5_vl": (28, 56 * 56, 300 * 300),
    "qwen3_vl": (32, 256 * 256, 384 * 384),
}


@pytest.mark.parametrize("family", FAMILY_RULES)
@pytest.mark.parametrize("frame", ["model_pixels", "rel1000", "original"])
def test_a_marker_in_the_original_is_in_the_crop(frame, family):
    """The size that the model saw is the processor's own answer (transformers' smart_resize), not ours."""
    rng = random.Random(frame + family)
    factor, min_pixels, max_pixels = FAMILY_RULES[family]
    rules = ImageRules(factor, min_pixels, max_pixels, resampling="bicubic")
    for _ in range(30):
        w, h = rng.randint(60, 900), rng.randint(60, 900)
        image = Image.new("RGB", (w, h), (0, 0, 0))
        mx, my = rng.randrange(w - 8), rng.randrange(h - 8)  # an 8 x 8 red marker
        image.paste((255, 0, 0), (mx, my, mx + 8, my + 8))
        seen_h, seen_w = smart_resize(h, w, factor, min_pixels, max_pixels)
        # The box a policy would give: the marker's corners in its own frame, with a margin of 20 original pixels.
        x1, y1, x2, y2 = max(mx - 20, 0), max(my - 20, 0), min(mx + 28, w), min(my + 28, h)
        unit = {"model_pixels": (seen_w, seen_h), "rel1000": (1000, 1000), "original": (w, h)}[frame]
        box = [x1 * unit[0] / w, y1 * unit[1] / h, x2 * unit[0] / w, y2 * unit[1] / h]
        tool = toolbox(image, rules.make_view(image), box_frame=frame)
        observation, _, done, info = tool.execute(call(bbox_2d=box))
        assert info["ok"] and not done
        assert info["box"] == pytest.approx((x1, y1, x2, y2), abs=1e-6)
        crop = observation["multi_modal_data"]["image"][0]
        red = np.argwhere((np.asarray(crop) == (255, 0, 0)).all(-1))  # (row, column)
        assert len(red) == 64, "the whole marker, at the original's resolution"
        assert red.min(0) == pytest.approx((my - y1, mx - x1), abs=1)


def test_the_frame_matters():
    """Boxes of the view taken for boxes of the original miss the marker: DeepEyes' fault, and the test above can fail."""
    image = Image.new("RGB", (672, 672))
    image.paste((255, 0, 0), (600, 600, 620, 620))
    view = image.resize((112, 112))
    wrong, _, _, _ = toolbox(image, view, box_frame="original").execute(call(bbox_2d=[98, 98, 105, 105]))
    right, _, _, _ = toolbox(image, view, box_frame="model_pixels").execute(call(bbox_2d=[98, 98, 105, 105]))
    assert (255, 0, 0) not in set(wrong["multi_modal_data"]["image"][0].getdata())
    assert (255, 0, 0) in set(right["multi_modal_data"]["image"][0].getdata())


def test_boxes_by_hand():
    size = dict(view_size=(100, 50), original_size=(1000, 1000))
    assert box_to_original([10, 10, 20, 20], frame="model_pixels", **size) == pytest.approx((100, 200, 200, 400))
    assert box_to_original([500, 0, 250, 1000], frame="rel1000", **size) == pytest.approx(
        (250, 0, 500, 1000)
    )  # swapped
    assert box_to_original([-50, 900, 2000, 950], frame="original", **size) == pytest.approx(
        (0, 900, 1000, 950)
    )  # clipped
    # 4 x 4 around (102, 102) grows to 28 x 28 around it; at a corner it moves inside; a small image bounds it.
    assert crop_box((100, 100, 104, 104), (500, 500), min_side=28, max_aspect=100) == (88, 88, 116, 116)
    assert crop_box((0, 496, 4, 500), (500, 500), min_side=28, max_aspect=100) == (0, 472, 28, 500)
    assert crop_box((0, 0, 4, 4), (20, 500), min_side=28, max_aspect=100) == (0, 0, 20, 28)
    # 400 x 2 with max_aspect 8: the short side becomes 50.
    assert crop_box((0, 100, 400, 102), (500, 500), min_side=28, max_aspect=8) == (0, 76, 400, 126)


anything = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**400), 10**400), st.floats(allow_nan=True), st.text(max_size=5)
)
numbers = st.one_of(st.floats(-2000, 2000), st.integers(-50, 350), st.integers(-(10**400), 10**400), st.floats())
boxes = st.one_of(
    anything,
    st.lists(anything, max_size=6),
    st.lists(numbers, min_size=4, max_size=4),
    st.lists(st.floats(-100, 1100), min_size=4, max_size=4),
)


@settings(max_examples=800, deadline=None)
@given(
    box=boxes,
    size=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    frame=st.sampled_from(["model_pixels", "rel1000", "original"]),
    family=st.sampled_from(sorted(FAMILY_RULES)),
)
def test_any_box_gives_a_legal_crop_or_a_text_error(box, size, frame, family):
    factor, min_pixels, max_pixels = FAMILY_RULES[family]
    rules = ImageRules(factor, min_pixels, max_pixels, resampling="box")
    assume(max(size) <= 200 * min(size))  # others are refused before a tool sees them
    image = Image.new("RGB", size)
    observation, reward, done, info = toolbox(image, rules.make_view(image), box_frame=frame).execute(call(bbox_2d=box))
    assert (reward, done) == (0.0, False)
    parsed = Observation.parse(observation)
    if not info["ok"]:
        assert parsed.images == [] and "Error" in parsed.text
        return
    crop = parsed.images[0]
    assert crop.width >= min(28, size[0]) and crop.height >= min(28, size[1])
    # Legal for the family's processor: it takes the crop itself, and the view as it is.
    height, width = smart_resize(crop.height, crop.width, factor, min_pixels, max_pixels)
    assert rules.make_view(crop).size == (width, height)
    assert width % factor == height % factor == 0 and width * height <= max(max_pixels, 200 * factor**2)
    pixels = PROCESSORS[family](images=[rules.make_view(crop)], do_resize=False, return_tensors="pt")
    assert len(pixels["pixel_values"]) == width * height * 4 // factor**2


PROCESSORS = {f: Qwen2VLImageProcessor(patch_size=rule[0] // 2, merge_size=2) for f, rule in FAMILY_RULES.items()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<tool_call>{", "not closed"),
        ("<tool_call>{</tool_call>", "a call must be"),
        ("<tool_call>[1]</tool_call>", "a call must be"),
        (call("fly", bbox_2d=[1, 2, 3, 4]), "a call must be"),
        (call(), "image_zoom_in_tool lacks bbox_2d"),
        (call(bbox_2d=[1, 2, 3]), "four numbers"),
        (call(bbox_2d=[1, 2, 3, "4"]), "four numbers"),
        (call(bbox_2d=[5, 5, 5, 9]), "no part of the image"),
        (call(bbox_2d=[0, 0, 9, 10**400]), "four numbers"),
        (call(bbox_2d=[0, 0, 9, math.nan]), "four numbers"),
        (call("image_rotate_tool", angle=10**400), "angle must be a number"),
        (call(bbox_2d=[0, 0, 9, 9], image_index=1), "image_index must be between 0 and 0"),
        (call("image_rotate_tool", angle="up"), "angle must be a number"),
        ("<tool_call>" * 100_000 + "</tool_call>", "a call must be"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "a call must be"),
    ],
)
def test_bad_calls_are_told_and_go_on(text, message):
    observation, _, done, info = toolbox(Image.new("RGB", (64, 64))).execute(text)
    assert not done and not info["ok"]
    assert message in observation


def test_endings_and_rotation():
    tool = toolbox(Image.new("RGB", (80, 40)))
    assert tool.execute("<answer>7</answer>")[2:] == (True, {"finish_reason": "answer"})
    assert tool.execute("nothing to do")[2:] == (True, {"finish_reason": "stop"})
    both = call(bbox_2d=[0, 0, 40, 40]) + "<answer>7</answer>"
    assert tool.execute(both)[2] is False, "a call before the answer is carried out"
    assert tool.execute("<answer>7</answer>" + call(bbox_2d=[0, 0, 40, 40]))[2] is True
    observation, _, _, info = tool.execute(call("image_rotate_tool", angle=90))
    assert info["ok"] and observation["multi_modal_data"]["image"][0].size == (40, 80)


def test_schema_names_the_arguments_that_are_read():
    for name, schema in VisualToolboxV2.parameters.items():
        required = schema["function"]["parameters"]["required"]
        good = {"bbox_2d": [0, 0, 30, 30], "angle": 5}
        observation, _, _, info = toolbox(Image.new("RGB", (64, 64))).execute(
            call(name, **{k: good[k] for k in required})
        )
        assert info["ok"], observation


def test_registry():
    with pytest.raises(ValueError, match="unknown tool 'nope'; there are .*visual_toolbox_v2"):
        ToolBase.create("nope")
    with pytest.raises(ValueError, match="two tools are named 'visual_toolbox_v2'"):
        type("Other", (ToolBase,), {"name": "visual_toolbox_v2"})

    class CustomTool(ToolBase):  # the shape of a DeepEyes tool
        name = "custom_tool_v0"

        def __init__(self, _name, _desc, _params, **kwargs):
            super().__init__(name=self.name)

    assert ToolBase.create("custom_tool_v0").name == "custom_tool_v0"
    del ToolBase.registry["custom_tool_v0"]


def test_observation_forms():
    image = Image.new("RGB", (30, 30))
    chat = [{"role": "user", "content": "<image> and"}]
    assert Observation.parse("") == Observation.parse(None) == Observation("", [])
    assert Observation.parse("hello") == Observation("hello", [])
    assert Observation.parse(chat[:0]) == Observation("", [])
    assert Observation.parse({"prompt": "<image>x", "multi_modal_data": {"image": [image]}}) == Observation(
        "<image>x", [image]
    )
    assert Observation.parse({"chat": chat, "multi_modal_data": {"image": [image]}}) == Observation(chat, [image])
    for bad in (
        "<image>",
        {"prompt": "x", "multi_modal_data": {"image": [image]}},
        chat,
        7,
        [1],
        {"chat": [{"role": "user"}]},
    ):
        with pytest.raises(ToolError):
            Observation.parse(bad)
    with pytest.raises(ToolError, match="PIL"):
        Observation.parse({"prompt": "<image>", "multi_modal_data": {"image": ["a.png"]}})


def test_view_size_equals_the_processors_rule_within_its_bounds():
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    # 144 / 112 is no float: transformers' floor falls one factor short there, and so does ours, or tokens would not agree.
    assert smart_resize(144, 144, factor=28, min_pixels=112 * 112, max_pixels=112 * 112) == (84, 84)
    assert view_size(144, 144, factor=28, min_pixels=112 * 112, max_pixels=112 * 112) == (84, 84)
    rng, refused = random.Random(0), 0
    for _ in range(2000):
        w, h = (int(math.exp(rng.uniform(math.log(8), math.log(5000)))) for _ in range(2))
        rules = ImageRules(factor=28, min_pixels=56 * 56, max_pixels=1280 * 28 * 28, resampling="box")
        if max(w, h) / min(w, h) > 200:
            with pytest.raises(ValueError, match="200"):
                smart_resize(h, w, factor=28, min_pixels=56 * 56, max_pixels=1280 * 28 * 28)
            with pytest.raises(ValueError, match=f"an image of {w} x {h} pixels"):
                rules.make_view(Image.new("1", (w, h)))
            refused += 1
            continue
        ours = view_size(w, h, factor=28, min_pixels=56 * 56, max_pixels=1280 * 28 * 28)
        assert ours == smart_resize(h, w, factor=28, min_pixels=56 * 56, max_pixels=1280 * 28 * 28)[::-1]
    assert refused > 10
