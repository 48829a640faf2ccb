"""The embedded task: the digit is exactly absent from the view, and present in a crop."""

import random

import numpy as np
import pytest
import torch
from conftest import TOY
from PIL import Image
from torch import nn

import toy
from data import ParquetData


def test_a_digit_averages_to_the_plates_grey_exactly():
    for digit in "0123456789":
        stripes, mask = toy.glyph(digit, 130, 90)
        plate = Image.new("RGB", (60, 60), (130, 130, 130))
        plate.paste(stripes, (12, 6), mask)
        assert plate.getextrema()[0] == (40, 220)
        small = plate.resize((10, 10), Image.Resampling.BOX)
        assert small.getextrema() == ((130, 130),) * 3
        assert plate.resize((10, 10), Image.Resampling.BICUBIC).getextrema() != ((130, 130),) * 3, (
            "the box filter is what does it"
        )


def test_views_of_scenes_that_differ_in_the_digit_alone_are_equal():
    rng = random.Random(3)
    for _ in range(20):
        state = rng.getstate()
        views = []
        for digit in "17":
            rng.setstate(state)
            real, toy.GLYPHS = toy.GLYPHS, dict.fromkeys("0123456789", toy.GLYPHS[digit])
            try:
                scene = toy.make_scene(rng)
            finally:
                toy.GLYPHS = real
            views.append((np.asarray(scene["image"]), np.asarray(toy.RULES.make_view(scene["image"]))))
        assert (views[0][0] != views[1][0]).any(), "the originals differ"
        assert (views[0][1] == views[1][1]).all(), "their views do not"


def _windows(num, seed, high):
    """A window at the true place of the frame: 40 x 40 from the view, or 64 x 64 from the original."""
    rng, xs, ys = random.Random(seed), [], []
    for _ in range(num):
        scene = toy.make_scene(rng)
        x1, y1, x2, y2 = scene["box"] if high else toy.view_box(scene)
        half = 48 if high else 10
        image = scene["image"] if high else toy.RULES.make_view(scene["image"])
        cx, cy = int((x1 + x2) / 2), int((y1 + y2) / 2)
        window = image.crop((cx - half, cy - half, cx + half, cy + half)).resize(
            (64, 64) if high else (40, 40), Image.Resampling.BICUBIC
        )
        xs.append(np.asarray(window, np.float32) / 127.5 - 1)
        ys.append(int(scene["digit"]))
    return torch.tensor(np.stack(xs)).permute(0, 3, 1, 2).contiguous(), torch.tensor(ys)


def _read_digits(high: bool) -> float:
    """Held-out accuracy of a small CNN that is told where to look."""
    torch.manual_seed(0)
    x, y = _windows(1500, 0, high)
    test_x, test_y = _windows(400, 1, high)
    conv = lambda i, o, s: nn.Sequential(nn.Conv2d(i, o, 3, s, 1), nn.BatchNorm2d(o), nn.ReLU())  # noqa: E731
    net = nn.Sequential(
        conv(3, 24, 1), conv(24, 32, 2), conv(32, 48, 2), conv(48, 64, 2), nn.Flatten(), nn.LazyLinear(10)
    )
    net(x[:2])
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
    for _ in range(8):
        for i in torch.randperm(len(x)).split(64):
            nn.functional.cross_entropy(net(x[i]), y[i]).backward()
            optimizer.step()
            optimizer.zero_grad()
    net.eval()
    with torch.no_grad():
        return float((net(test_x).argmax(1) == test_y).float().mean())


@pytest.mark.slow
def test_the_view_cannot_be_read_even_when_told_where_to_look():
    assert _read_digits(high=False) < 0.17, (
        "ten classes: guessing gives 0.1, three standard deviations of 400 tries 0.145"
    )
    assert _read_digits(high=True) > 0.9, "the same network reads the original: the test can fail"


def test_tokenizer_is_lossless_and_lengths_are_what_the_budgets_say(codec):
    for text in (
        toy.SYSTEM,
        toy.question("purple"),
        toy.call_text((4, 100, 60, 112), "red"),
        toy.answer_text("7", "I will guess."),
        "Any {text}, 1/2 & ~!\n",
    ):
        assert codec.decode(codec.encode(text)) == codec.decode(codec.encode(text, tags=True)) == text
    assert (
        len(codec.encode(toy.call_text((4, 100, 60, 112), "red"), tags=True)) + 1 == 23
    )  # configs/toy.py: max_turn_len 24
    assert len(codec.encode(toy.answer_text("7", "Now I see it."), tags=True)) + 1 == 8


def test_data_are_reproducible_and_boxes_true(toy_data):
    a, b = toy.make_rows(3, 5, "train"), toy.make_rows(3, 5, "train")
    assert a == b != toy.make_rows(3, 6, "train")
    assert a[0]["images"] != toy.make_rows(3, 5, "eval")[0]["images"], "splits differ"
    rng = random.Random(1)
    for _ in range(20):
        scene = toy.make_scene(rng)
        pixels, (x1, y1, x2, y2) = np.asarray(scene["image"]), scene["box"]
        color = np.array(toy.COLORS[scene["color"]])
        assert (pixels[y1, x1:x2] == color).all() and (pixels[y2 - 1, x1:x2] == color).all()
        assert (pixels[y1:y2, x1] == color).all() and (pixels[y1:y2, x2 - 1] == color).all()
    samples = list(ParquetData([str(toy_data / "eval.parquet")]))
    assert len(samples) == 8 and samples[0].prompt[1]["content"].startswith("<image>What is the digit")
    assert str(samples[0].extra_info["box"][0]) not in samples[0].prompt[1]["content"]


def test_committed_base_is_what_the_recipe_builds(codec):
    """Shapes and tokenizer of the committed folder equal those of a fresh build; its weights come from `toy.py base`."""
    from model import load_lm

    fresh = toy.build_model(toy.make_tokenizer())
    saved = load_lm(TOY, torch.float32)
    assert {n: p.shape for n, p in fresh.named_parameters()} == {n: p.shape for n, p in saved.named_parameters()}
    assert codec.tokenizer.get_vocab() == toy.make_tokenizer().get_vocab()
    assert 1.0e6 < sum(p.numel() for p in saved.parameters()) < 1.1e6


@pytest.mark.slow
def test_base_training_runs_and_is_reproducible(tmp_path):
    from model import load_lm

    for name in ("a", "b"):
        toy.train_base(str(tmp_path / name), steps=3, noisy_steps=2)
    a, b = (load_lm(str(tmp_path / name), torch.float32).state_dict() for name in ("a", "b"))
    assert all(torch.equal(a[k], b[k]) for k in a)
    untrained = toy.build_model(toy.make_tokenizer()).state_dict()
    assert set(untrained) == set(a) and not any(torch.equal(untrained[k], a[k]) for k in a if a[k].ndim > 1)
