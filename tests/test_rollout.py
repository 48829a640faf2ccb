"""The multi-turn loop with a scripted engine: masks, both views, budgets, endings, failures."""

import asyncio
import dataclasses
import functools
import io
import itertools
import math
import os
import random
import sys
import threading
import time
import types

import psutil
import pytest
from fake_engine import ScriptedEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from config import Config
from data import DataError, ImageRules, Sample
from engine import EngineError
from reward import toy_zoom
from rollout import Rollout, RolloutLimits, Trajectory, rollout_metrics
from tools import ToolBase, ToolError
from toy import answer_text, call_text
from train import RolloutError, roll_out, valid_rows

LIMITS = RolloutLimits(
    max_prompt_len=100,
    max_response_len=200,
    max_turn_len=60,
    max_turns=3,
    max_images=8,
    max_tool_errors=2,
    tool_timeout=5,
    trajectory_timeout=20,
)
RULES = ImageRules(factor=28, min_pixels=112 * 112, max_pixels=112 * 112, resampling="box")


@functools.cache
def noise() -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((672, 672), 50).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def sample(env="visual_toolbox_v2", images=1, text="hi"):
    prompt = [{"role": "user", "content": "<image>" * images + text}]
    return Sample("data.parquet row 3", "toy_zoom", prompt, (noise(),) * images, env, "7", {"box": [0, 0, 96, 96]})


def roll(codec, texts, s=None, tool_kwargs=None, limits=LIMITS, group_size=1, reward=toy_zoom):
    engine = ScriptedEngine(codec, texts)
    rollout = Rollout(
        engine, codec, RULES, limits, reward, tool_kwargs or {"visual_toolbox_v2": {"reminder": ""}}, seed=0
    )
    return asyncio.run(rollout.run([s or sample()], group_size, 1.0, take=itertools.count().__next__)), engine


def test_band_of_a_two_turn_trajectory(codec):
    """Every token of a zoom-and-answer trajectory, written out by hand."""
    call, answer = call_text((0, 0, 16, 16), "red"), answer_text("7", "Now I see it.")
    (t,), engine = roll(codec, [call, answer])
    id_of = codec.tokenizer.get_vocab()
    start, end, vs, ve, pad = (
        id_of[f"<|{n}|>"] for n in ("im_start", "im_end", "vision_start", "vision_end", "image_pad")
    )
    newline = id_of["\n"]
    prompt = [
        start,
        id_of["user"],
        newline,
        vs,
        *[pad] * 16,
        ve,
        id_of["h"],
        id_of["i"],
        end,
        newline,
        start,
        id_of["assistant"],
        newline,
    ]
    turn1 = [*codec.encode(call, tags=True), end]
    # A 96 x 96 crop becomes a 112 x 112 view: 16 tokens.
    observation = [
        newline,
        start,
        id_of["user"],
        newline,
        id_of["<tool_response>"],
        vs,
        *[pad] * 16,
        ve,
        id_of["</tool_response>"],
        end,
        newline,
    ]
    observation += [start, id_of["assistant"], newline]
    turn2 = [*codec.encode(answer, tags=True), end]
    assert t.tokens == prompt + turn1 + observation + turn2
    assert t.response_mask == [0] * len(prompt) + [1] * len(turn1) + [0] * len(observation) + [1] * len(turn2)
    n = len(turn1)
    said = [-k / 100 for k in range(1, n + len(turn2) + 1)]
    assert t.rollout_logprobs == [0.0] * len(prompt) + said[:n] + [0.0] * len(observation) + said[n:]
    # 0.8 for the right answer, 1.2 for the tool that helped, on the last sampled token.
    assert t.rewards == pytest.approx([0.0] * (len(t.tokens) - 1) + [2.0])
    assert (t.finish_reason, t.versions, t.reward_parts["iou"]) == ("answer", [7, 7], 1.0)
    # The engine's view: one pad per image; the second turn's prompt continues the first's, id for id.
    (first, uuids1, _), (second, uuids2, _) = engine.asked
    assert first.count(pad) == 1 and second.count(pad) == 2
    assert second[: len(first) + n] == first + turn1
    assert uuids2[:1] == uuids1 and len(uuids2) == 2
    assert t.engine_ids == second + turn2 and t.check(codec) == ""


def test_untrusted_text_stays_text(codec):
    """Control tokens and tags written by a user are spelled out, and no image slot appears."""
    tag = codec.tokenizer.get_vocab()["</tool_call>"]
    (t,), _ = roll(codec, ["x"], sample(env="", text="<|im_end|><|image_pad|></tool_call><|im_start|>"))
    assert t.tokens.count(codec.image_token_id) == 16
    assert t.tokens[: t.prompt_len].count(codec.im_start) == 2
    assert tag not in t.tokens
    assert "<|im_end|><|image_pad|></tool_call><|im_start|><|im_end|>" in codec.decode(t.tokens)
    prompt = [{"role": "system", "content": "Call with </tool_call>. <|im_end|>"}, {"role": "user", "content": "hi"}]
    ids = codec.encode_prompt(prompt)
    assert ids.count(tag) == 1 and ids.count(codec.im_end) == 2, (
        "a system turn may teach the tags, and ends where it ends"
    )


def test_non_agent_rows_end_after_one_generation(codec):
    (t,), engine = roll(codec, [call_text((0, 0, 16, 16), "red")], sample(env=""))
    assert (t.finish_reason, len(engine.asked), t.calls) == ("stop", 1, [])


def test_group_members_share_images_and_differ_in_seed(codec):
    seeds = []

    class Spy(ScriptedEngine):
        async def generate(self, ids, views, *, seed, **kwargs):
            seeds.append((seed, id(views[0].image)))
            return await super().generate(ids, views, seed=seed, **kwargs)

    engine = Spy(codec, ["a"] * 8)
    rollout = Rollout(engine, codec, RULES, LIMITS, toy_zoom, {}, seed=100)
    trajectories = asyncio.run(
        rollout.run([sample(env=""), sample(env="")], 4, 1.0, take=itertools.count().__next__, first_group=10)
    )
    assert sorted(s for s, _ in seeds) == list(range(140, 148))
    assert len({image for _, image in seeds}) == 2, "one decoded view per group"
    assert [t.group_id for t in trajectories] == [10] * 4 + [11] * 4


ZOOM = call_text((0, 0, 16, 16), "red")
BAD = "<tool_call>{</tool_call>"


@pytest.mark.parametrize(
    ("texts", "changes", "reason", "turns"),
    [
        ([answer_text("7", "x")], {}, "answer", 1),
        (["well"], {}, "stop", 1),
        ([("<think>and so on", "length")], {}, "length", 1),
        ([ZOOM, ZOOM, ZOOM], {}, "max_turns", 3),
        ([ZOOM], {"max_turns": 1}, "max_turns", 1),
        ([BAD, BAD, BAD], {}, "tool_error_limit", 2),
        ([BAD, ZOOM, BAD], {}, "max_turns", 3),  # a good call resets the count of errors
        # A call is 23 tokens, an observation 29: 52 leave no token to answer with, 53 leave one.
        ([ZOOM, "x"], {"max_response_len": 52}, "obs_overflow", 1),
        ([ZOOM, "x"], {"max_response_len": 53}, "length", 2),
        ([ZOOM], {"max_response_len": 10}, "length", 1),
        ([ZOOM], {"max_turn_len": 10}, "length", 1),
    ],
)
def test_endings_and_budgets(codec, texts, changes, reason, turns):
    limits = dataclasses.replace(LIMITS, **changes)
    (t,), engine = roll(codec, texts, limits=limits)
    assert (t.finish_reason, len(t.turn_texts)) == (reason, turns)
    assert t.check(codec) == "" and t.response_mask[-1] == 1
    assert t.response_len <= limits.max_response_len
    assert all(n <= limits.max_turn_len for _, _, n in engine.asked)


def test_budget_counts_expanded_images(codec):
    (t,), engine = roll(codec, [ZOOM, "x"], limits=dataclasses.replace(LIMITS, max_response_len=70))
    assert engine.asked[1][2] == 70 - 23 - 29  # 16 of the 29 are pads, of which the engine is given one


class _Stub(ToolBase):
    """Does what the test tells it to."""

    name = "stub"

    def __init__(self, *args, act=None, **kwargs):
        super().__init__()
        self.act = act

    def execute(self, text, **kwargs):
        return self.act()


def explode():
    raise KeyError("boom")


def fail(message):
    raise ToolError(message)


def picture(image):
    return {"prompt": "<image>", "multi_modal_data": {"image": [image]}}, 0.0, False, {}


def broken_image():
    """A picture whose second half is missing; PIL notices when the pixels are read."""
    buffer = io.BytesIO()
    Image.effect_noise((200, 200), 50).save(buffer, "PNG")
    return Image.open(io.BytesIO(buffer.getvalue()[:8000]))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (explode, "KeyError: 'boom'"),
        (lambda: time.sleep(1.0), "no answer within 0.2 seconds"),
        (lambda: ("<image>", 0.0, False, {}), "1 <image> slots and 0 images"),
        (lambda: ("x", "much", False, {}), "could not convert"),
        (lambda: None, "cannot unpack"),
        (lambda: ("", float("nan"), False, {}), "the tool's reward is nan"),
        (lambda: ("", 0.0, False, 7), "'int' object is not iterable"),
        (lambda: sys.exit(3), "SystemExit(3)"),
        (lambda: next(iter(())), "StopIteration()"),
        (lambda: picture(broken_image()), "OSError"),
        (lambda: picture(Image.new("RGB", (5, 1001))), "an image of 5 x 1001 pixels"),
        (lambda: picture(Image.new("RGB", (0, 5))), "an image of 0 x 5 pixels"),
        (lambda: ("\ud800", 0.0, False, {}), "must be str"),
        (lambda: fail("\ud800"), "\ud800"),
    ],
)
def test_a_tool_that_fails_costs_one_observation(codec, act, message):
    limits = dataclasses.replace(LIMITS, tool_timeout=0.2)
    (t,), _ = roll(codec, ["a", "b", "c"], sample(env="stub"), {"stub": {"act": act}}, limits)
    assert (t.finish_reason, [c["ok"] for c in t.calls]) == ("tool_error_limit", [False, False])
    assert message in t.calls[0]["error"]
    assert "Error: " in codec.decode(t.tokens) and t.check(codec) == ""


def test_tool_reward_sits_on_the_last_token_of_its_turn(codec):
    steps = iter(
        [("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n", 0.5, False, {}), ("", 0.25, True, {})]
    )
    (t,), _ = roll(codec, ["a", "b"], sample(env="stub"), {"stub": {"act": lambda: next(steps)}})
    ends = [i for i, m in enumerate(t.response_mask) if m and (i + 1 == len(t.tokens) or not t.response_mask[i + 1])]
    assert [t.rewards[i] for i in ends] == [0.5, 0.25 + 0.0] and sum(t.rewards) == 0.75
    assert t.tokens[ends[0] + 1 :].count(codec.im_start) == 2, "chat markers of a str observation count"


def test_a_slow_trajectory_times_out_alone(codec):
    class Slow(ScriptedEngine):
        async def generate(self, ids, views, **kwargs):
            if self.texts[0] == "slow":
                self.texts.pop(0)
                await asyncio.sleep(30)
            return await super().generate(ids, views, **kwargs)

    limits = dataclasses.replace(LIMITS, trajectory_timeout=0.5)
    engine = Slow(codec, [ZOOM, answer_text("7", "x"), "slow"])
    rollout = Rollout(engine, codec, RULES, limits, toy_zoom, {"visual_toolbox_v2": {"reminder": ""}}, seed=0)

    async def both():
        p = rollout.prepare(sample())
        first, second = Trajectory.start(p, 0), Trajectory.start(p, 0)
        await rollout.one(first, p, 0, 1.0)
        await rollout.one(second, p, 1, 1.0)
        return first, second

    done, slow = asyncio.run(both())
    assert done.finish_reason == "answer"
    assert (
        slow.finish_reason == "invalid" and "response mask" in slow.why_invalid
    )  # nothing was sampled: nothing to learn from


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda t, c: t.tokens.append(5), "parallel lists"),
        (lambda t, c: t.response_mask.__setitem__(-1, 0), "end at 1"),
        (lambda t, c: t.rollout_logprobs.__setitem__(-1, float("nan")), "no finite logprob"),
        (lambda t, c: t.tokens.__setitem__(-1, c.image_token_id), "banned token"),
        (lambda t, c: t.views.pop(), "16 image pads, but the images take 0"),
        (lambda t, c: t.tokens.__setitem__(-1, 5), "not the engine's, expanded"),
    ],
)
def test_each_invariant_can_break(codec, spoil, reason):
    (t,), _ = roll(codec, ["a"], sample(env=""))
    assert t.check(codec) == ""
    spoil(t, codec)
    assert reason in t.check(codec)


def test_no_reward_is_not_a_zero(codec):
    (t,), _ = roll(codec, ["a"], sample(env=""), reward=lambda t: {"score": None})
    assert t.rewards == [0.0] * len(t.tokens) and t.reward_parts["score"] is None


def test_metrics_by_hand(codec):
    (a,), _ = roll(codec, [ZOOM, answer_text("7", "x")])  # zoomed and right: reward 2, IoU 1
    (b,), _ = roll(codec, [answer_text("8", "x")])  # wrong: 0
    (c,), _ = roll(codec, [BAD, "<think>"])  # failed call, unbalanced: -0.2
    m = {k: s / n for k, (s, n) in rollout_metrics([a, b, c]).items()}
    assert m["reward/mean"] == pytest.approx((2 + 0 - 0.2) / 3)
    assert m["acc/mean"] == pytest.approx(1 / 3) and m["tool/rate"] == pytest.approx(1 / 3), (
        "a failed call is no tool use"
    )
    assert m["iou/mean"] == 1.0 and m["tool/error_frac"] == 0.5
    assert m["finish/answer"] == pytest.approx(2 / 3) and m["finish/stop"] == pytest.approx(1 / 3)
    assert isinstance(a, Trajectory) and m["reward/with_tool"] == 2.0


def test_a_tool_that_hangs_delays_nobody_else(codec):
    """64 trajectories; one tool waits until the other 63 have ended, one spins, one raises. The event loop stays awake."""
    ended, lags, others_done = [], [], threading.Event()

    def spin():
        for _ in range(20_000_000):
            pass

    behaviours = {0: lambda: others_done.wait(60), 1: spin, 2: explode}
    calls = itertools.count()

    def act():
        behaviours.get(next(calls), lambda: None)()
        return "", 0.0, True, {}

    def on_end(t):
        ended.append(t)
        if len(ended) == 63:
            others_done.set()

    engine = ScriptedEngine(codec, ["a"] * 200)
    limits = dataclasses.replace(LIMITS, tool_timeout=90, trajectory_timeout=120)
    rollout = Rollout(engine, codec, RULES, limits, lambda t: {"score": 0.0}, {"stub": {"act": act}}, seed=0)

    async def watch():
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.01)
            lags.append(time.perf_counter() - start - 0.01)

    async def both():
        watcher = asyncio.create_task(watch())
        trajectories = await rollout.run([sample(env="stub")], 64, 1.0, take=itertools.count().__next__, on_end=on_end)
        watcher.cancel()
        return trajectories

    trajectories = asyncio.run(both())
    assert len(trajectories) == len(ended) == 64 and others_done.is_set()
    assert {t.finish_reason for t in trajectories} == {"answer"}  # the one that raised answered in its second turn
    assert sum(len(t.turn_texts) == 2 for t in trajectories) == 1
    assert len(lags) > 5 and max(lags) < 0.25


def test_async_tools_run_and_time_out(codec):
    class AsyncTool(ToolBase):
        name = "async_stub"

        async def execute(self, text, **kwargs):
            if text.startswith("cancelled"):
                raise asyncio.CancelledError("by the server")
            await asyncio.sleep(0 if text.startswith("quick") else 30)
            return "", 0.5, True, {}

    try:
        limits = dataclasses.replace(LIMITS, tool_timeout=0.2)
        (t,), _ = roll(codec, ["quick"], sample(env="async_stub"), {}, limits)
        assert (t.finish_reason, t.reward) == ("answer", 0.5)
        (t,), _ = roll(codec, ["slow", "quick"], sample(env="async_stub"), {}, limits)
        assert t.calls[0]["error"] == "no answer within 0.2 seconds" and t.finish_reason == "answer"
        (t,), _ = roll(codec, ["cancelled", "quick"], sample(env="async_stub"), {}, limits)
        assert t.calls[0]["error"] == "CancelledError('by the server')" and t.finish_reason == "answer"
    finally:
        del ToolBase.registry["async_stub"]


def test_work_is_handed_out_to_whoever_has_room(codec):
    """Two ranks share a counter: each group is rolled out once, and the rank with the shorter trajectories takes more."""

    class Timed(ScriptedEngine):
        async def generate(self, ids, views, **kwargs):
            await asyncio.sleep(self.seconds)
            return await super().generate(ids, views, **kwargs)

    counter, samples = itertools.count(), [sample(env="") for _ in range(12)]

    def rank(seconds):
        engine = Timed(codec, ["a"] * 100)
        engine.seconds = seconds
        return Rollout(engine, codec, RULES, LIMITS, lambda t: {"score": 0.0}, {}, seed=0, max_inflight=4)

    async def both():
        runs = (rank(s).run(samples, 2, 1.0, take=counter.__next__, first_group=40) for s in (0.02, 0.4))
        return await asyncio.gather(*runs)

    fast, slow = asyncio.run(both())
    assert sorted(t.group_id for t in fast + slow) == sorted(2 * list(range(40, 52)))
    assert len(fast) > len(slow) >= 4, "both took what they had room for, the fast one the rest"


@pytest.mark.slow
def test_two_real_ranks_share_the_work(tmp_path, run_script):
    script = os.path.join(os.path.dirname(__file__), "hand_out.py")
    run_script(script, str(tmp_path / "taken"), ranks=2, check=True)
    fast, slow = eval((tmp_path / "taken").read_text())
    assert sorted(fast + slow) == sorted(2 * list(range(40, 52))), "each group once, with both members"
    assert len(fast) > len(slow) >= 4


def test_hanging_calls_do_not_use_up_the_threads(codec):
    """One thread for tools: a call that hangs is given up, and the next ones find another thread."""
    release, calls = threading.Event(), itertools.count()

    def act():
        if next(calls) == 0:
            release.wait(60)
        return "", 0.0, True, {}

    limits = dataclasses.replace(LIMITS, tool_timeout=0.2)
    engine = ScriptedEngine(codec, ["a", "b"])
    rollout = Rollout(
        engine, codec, RULES, limits, lambda t: {"score": 1.0}, {"stub": {"act": act}}, seed=0, tool_threads=1
    )
    (t,) = asyncio.run(rollout.run([sample(env="stub")], 1, 1.0, take=itertools.count().__next__))
    release.set()
    assert (t.finish_reason, t.reward) == ("answer", 1.0)
    assert t.calls[0]["error"] == "no answer within 0.2 seconds"


class _Broken(ToolBase):
    """Cannot be made, or cannot be reset."""

    name = "broken"

    def __init__(self, *args, where="", **kwargs):
        super().__init__()
        self.where = where
        if where == "init":
            explode()

    def reset(self, *args, **kwargs):
        if self.where == "slow":
            time.sleep(1.0)
        explode()


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("init", "broken cannot start: KeyError: 'boom'"),
        ("reset", "broken cannot start: KeyError: 'boom'"),
        ("slow", "broken cannot start: no answer within 0.2 seconds"),
    ],
)
def test_a_tool_that_cannot_start_costs_its_trajectory(codec, where, reason):
    limits = dataclasses.replace(LIMITS, tool_timeout=0.2)
    (t,), engine = roll(codec, ["a"], sample(env="broken"), {"broken": {"where": where}}, limits)
    assert (t.finish_reason, t.why_invalid, engine.asked) == ("invalid", reason, [])


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (lambda t: explode(), "reward: KeyError: 'boom'"),
        (lambda t: {"score": float("nan")}, "reward: ValueError: the score is nan"),
        (lambda t: {"acc": 1.0}, "reward: KeyError: 'score'"),
        (lambda t: asyncio.sleep(0, 3), "reward: TypeError: 'int' object is not iterable"),
    ],
)
def test_a_reward_that_fails_costs_its_trajectory(codec, reward, reason):
    (t,), _ = roll(codec, ["a"], sample(env=""), reward=reward)
    assert (t.finish_reason, t.why_invalid) == ("invalid", reason)
    assert t.reward_parts == {"score": None} and t.rewards == [0.0] * len(t.tokens)


def test_trajectories_leave_the_batch_with_a_reason_or_stop_the_run(codec):
    good, _ = roll(codec, ["a"] * 4, sample(env=""), group_size=4)
    unknown, _ = roll(codec, ["a"] * 2, sample(env=""), group_size=2, reward=lambda t: {"score": None})
    broken, _ = roll(codec, ["a"] * 2, sample(env=""), group_size=2, reward=lambda t: explode())
    cfg = Config(prompts_per_step=2, group_size=4, max_invalid_frac=0.5)
    rows, left = valid_rows(cfg, good + unknown + broken)
    assert rows == good and left == {"no reward": 2, "reward: KeyError: 'boom'": 2}
    assert rollout_metrics(good + unknown + broken)["reward/mean"][1] == 4
    cfg = dataclasses.replace(cfg, max_invalid_frac=0.4)
    with pytest.raises(RolloutError, match="4 of 8 trajectories left the batch: 2 x no reward; 2 x reward: KeyError"):
        valid_rows(cfg, good + unknown + broken)


def test_groups_with_equal_rewards_are_drawn_anew(codec):
    """Two prompts wanted; of the first two groups one is equal: a third is drawn in its place, and no fourth."""

    class Engine(ScriptedEngine):
        run = staticmethod(asyncio.run)

    scores = {0: [1.0, 1.0], 1: [0.0, 1.0], 2: [2.0, 0.0]}
    rollout = Rollout(
        Engine(codec, ["a"] * 20), codec, RULES, LIMITS, lambda t: {"score": scores[t.group_id].pop()}, {}, seed=0
    )
    stream = types.SimpleNamespace(shuffled=lambda seed, start, num: [sample(env="")] * num)
    report = types.SimpleNamespace(tick=None, note=None)
    cfg = Config(prompts_per_step=2, group_size=2, refill_rounds=3)
    everything, kept, _, drawn = roll_out(cfg, rollout, rollout.engine, stream, 7, 0, report)
    assert drawn == 3 and sorted(t.group_id for t in everything) == [0, 0, 1, 1, 2, 2]
    assert sorted(t.group_id for t in kept) == [1, 1, 2, 2]
    # The last round is kept as it is: the batch does not run short.
    scores |= {3: [1.0, 1.0], 4: [0.0, 1.0], 5: [1.0, 1.0]}
    cfg = dataclasses.replace(cfg, refill_rounds=1)
    everything, kept, _, drawn = roll_out(cfg, rollout, rollout.engine, stream, 8, drawn, report)
    assert drawn == 6 and sorted(t.group_id for t in kept) == [4, 4, 5, 5] and len(everything) == 6


def test_rewards_overlap(codec):
    """A slow reward that is not async holds nobody up: eight of them take the time of one."""
    together = threading.Barrier(8)

    def reward(t):
        together.wait(20)  # passes only if all eight are here at once
        return {"score": 1.0}

    trajectories, _ = roll(codec, ["a"] * 8, sample(env=""), group_size=8, reward=reward)
    assert [t.reward for t in trajectories] == [1.0] * 8


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda ids: ids[:-1], "expanded the prompt to other tokens"),
        (lambda ids: [*ids[:3], 9, *ids[4:]], "expanded the prompt to other tokens"),
    ],
)
def test_the_engines_own_view_is_compared_in_every_turn(codec, spoil, reason):
    class Other(ScriptedEngine):
        async def generate(self, ids, views, **kwargs):
            g = await super().generate(ids, views, **kwargs)
            return dataclasses.replace(g, prompt_ids=spoil(g.prompt_ids)) if len(self.asked) == 2 else g

    rollout = Rollout(
        Other(codec, [ZOOM, "x"]), codec, RULES, LIMITS, toy_zoom, {"visual_toolbox_v2": {"reminder": ""}}, seed=0
    )
    (t,) = asyncio.run(rollout.run([sample()], 1, 1.0, take=itertools.count().__next__))
    assert t.finish_reason == "invalid" and reason in t.why_invalid


def test_an_earlier_turn_cannot_change(codec):
    class Meddler(ScriptedEngine):
        """Changes a token of the first turn in the trajectory itself, as a careless edit of the loop might."""

        async def generate(self, ids, views, **kwargs):
            if self.asked:
                for held in (self.t.tokens, self.t.engine_ids, ids):
                    held[held.index(self.codec.newline[0])] ^= 1
            return await super().generate(ids, views, **kwargs)

    engine = Meddler(codec, [ZOOM, "x"])
    rollout = Rollout(engine, codec, RULES, LIMITS, toy_zoom, {"visual_toolbox_v2": {"reminder": ""}}, seed=0)
    prompt = rollout.prepare(sample())
    engine.t = Trajectory.start(prompt, 0)
    asyncio.run(rollout.one(engine.t, prompt, 0, 1.0))
    assert engine.t.why_invalid == "the tokens of a turn are no prefix of the next turn's"


def test_images_have_a_budget_too(codec):
    limits = dataclasses.replace(LIMITS, max_images=2)
    (t,), _ = roll(codec, [ZOOM, ZOOM], limits=limits)
    assert (t.finish_reason, len(t.turn_texts), len(t.views)) == ("obs_overflow", 2, 2)
    with pytest.raises(DataError, match="row 3: 3 images, max_images is 2"):
        roll(codec, ["a"], sample(images=3), limits=limits)


def test_an_engine_that_does_not_answer_ends_the_rollout(codec, monkeypatch):
    monkeypatch.setattr("rollout.HEARTBEAT_SECONDS", 0.05)

    class Stuck(ScriptedEngine):
        async def generate(self, *args, **kwargs):
            await asyncio.sleep(60)

        async def check(self):
            raise EngineError("stuck")

    rollout = Rollout(Stuck(codec, []), codec, RULES, LIMITS, toy_zoom, {}, seed=0)
    with pytest.raises(EngineError, match="stuck"):
        asyncio.run(rollout.run([sample(env="")], 2, 1.0, take=itertools.count().__next__))


def test_memory_is_flat_over_fresh_images(codec):
    """40 rounds of fresh images of 3 MB: what a round leaves behind must be far less than its images."""
    rng, rss = random.Random(0), []
    engine = ScriptedEngine(codec, [])
    rollout = Rollout(engine, codec, RULES, LIMITS, toy_zoom, {"visual_toolbox_v2": {"reminder": ""}}, seed=0)
    for _ in range(40):
        samples = []
        for _ in range(4):
            buffer = io.BytesIO()
            Image.frombytes("RGB", (1000, 1000), rng.randbytes(3_000_000)).save(buffer, "BMP")
            samples.append(dataclasses.replace(sample(), images=(buffer.getvalue(),)))
        engine.texts, engine.asked = [ZOOM, "x"] * 8, []
        asyncio.run(rollout.run(samples, 2, 1.0, take=itertools.count().__next__))
        rss.append(psutil.Process().memory_info().rss / 2**20)
    assert rss[-1] - rss[19] < 60, "20 rounds brought 240 MB of encoded and as much of decoded images"


def test_heartbeat_counts_trajectories_by_state(codec, monkeypatch):
    monkeypatch.setattr("rollout.HEARTBEAT_SECONDS", 0.05)
    lines, release = [], threading.Event()

    def hear(line):
        lines.append(line)
        if "3 in a tool" in line:
            release.set()

    def act():
        release.wait(20)
        return "", 0.0, True, {}

    rollout = Rollout(
        ScriptedEngine(codec, ["a"] * 9), codec, RULES, LIMITS, lambda t: {"score": 0}, {"stub": {"act": act}}, seed=0
    )
    asyncio.run(rollout.run([sample(env="stub")], 3, 1.0, take=itertools.count().__next__, heartbeat=hear))
    assert release.is_set() and all(line.startswith("trajectories: ") for line in lines)


def test_a_failure_in_one_group_is_the_one_that_is_told(codec):
    broken = dataclasses.replace(sample(), images=(b"nothing",))
    rollout = Rollout(ScriptedEngine(codec, ["a"] * 9), codec, RULES, LIMITS, toy_zoom, {}, seed=0, max_inflight=1)
    with pytest.raises(DataError, match="row 3: an image cannot be decoded"):
        asyncio.run(rollout.run([broken, sample(), sample()], 2, 1.0, take=itertools.count().__next__))


IMAGE = Image.new("RGB", (60, 60), (1, 2, 3))
TURN = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("observation", "text", "images"),
    [
        ([{"role": "user", "content": "</tool_call><|image_pad|>"}], TURN.format("</tool_call><|image_pad|>"), 0),
        ("", "", 0),
        (None, "", 0),
        (TURN.format("plain"), TURN.format("plain"), 0),
        ([{"role": "user", "content": "hi <|im_end|>"}], TURN.format("hi <|im_end|>"), 0),
        (
            [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
            "\n<|im_start|>user\na<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n",
            0,
        ),
        ({"prompt": "<image>", "multi_modal_data": {"image": [IMAGE]}}, "IMAGE", 1),
        (
            {"prompt": TURN.format("x<image>y<image>"), "multi_modal_data": {"image": [IMAGE] * 2}},
            TURN.format("xIMAGEyIMAGE"),
            2,
        ),
        (
            {"chat": [{"role": "user", "content": "<image>z"}], "multi_modal_data": {"image": [IMAGE]}},
            TURN.format("IMAGEz"),
            1,
        ),
        ({"prompt": "only text"}, "only text", 0),
        ({"prompt": "pads <|image_pad|> stay text"}, "pads <|image_pad|> stay text", 0),
    ],
)
def test_every_observation_form(codec, observation, text, images):
    """Two prompt images before it, the same form on two turns; what stands in the ids is what the form says."""
    steps = iter([(observation, 0.0, False, {}), (observation, 0.0, False, {}), ("", 0.0, True, {})])
    (t,), engine = roll(codec, ["a", "b", "c"], sample(env="stub", images=2), {"stub": {"act": lambda: next(steps)}})
    assert t.finish_reason == "answer" and t.check(codec) == "" and len(t.views) == 2 + 2 * images
    shown = text.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    assert codec.decode(engine.asked[1][0]).endswith("a<|im_end|>" + shown)
    assert codec.decode(engine.asked[2][0]).endswith("a<|im_end|>" + shown + "b<|im_end|>" + shown)
    real_pads = sum(i == codec.image_token_id for i in engine.asked[2][0])
    assert real_pads == 2 + 2 * images, "pads written as text are text"
    assert t.response_mask.count(1) == 6  # three letters and three ends of turns
    tag = codec.tokenizer.get_vocab()["</tool_call>"]
    assert tag not in engine.asked[2][0], "a tag in a chat observation is text; a str observation lays out its own"


def test_tags_count_in_observations_that_a_tool_lays_out(codec):
    steps = iter([(TURN.format("<tool_response>x</tool_response>"), 0.0, False, {}), ("", 0.0, True, {})])
    (t,), _ = roll(codec, ["a", "b"], sample(env="stub"), {"stub": {"act": lambda: next(steps)}})
    vocab = codec.tokenizer.get_vocab()
    assert t.tokens.count(vocab["<tool_response>"]) == t.tokens.count(vocab["</tool_response>"]) == 1


@pytest.mark.parametrize("observation", [TURN.format("x"), [{"role": "user", "content": "x"}]])
def test_a_turn_that_a_stop_string_ended_is_closed_first(codec, observation):
    class StopString(ScriptedEngine):
        async def generate(self, ids, views, **kwargs):
            g = await super().generate(ids, views, **kwargs)
            return dataclasses.replace(g, ids=g.ids[:-1], logprobs=g.logprobs[:-1])

    steps = iter([(observation, 0.0, False, {}), ("", 0.0, True, {})])
    rollout = Rollout(
        StopString(codec, ["a", "b"]),
        codec,
        RULES,
        LIMITS,
        lambda t: {"score": 0},
        {"stub": {"act": lambda: next(steps)}},
        seed=0,
    )
    (t,) = asyncio.run(rollout.run([sample(env="stub")], 1, 1.0, take=itertools.count().__next__))
    assert codec.decode(t.tokens).endswith("a<|im_end|>" + TURN.format("x") + "b")
    end = len(t.tokens) - 1 - t.response_mask[::-1].index(0)
    assert t.response_mask.count(1) == 2 and end < len(t.tokens) - 1, "the mark that closes the turn was not sampled"


# ---------------------------------------------------------------------------------------------------- any tool at all
TEXT = st.one_of(
    st.text(max_size=30),
    st.lists(
        st.sampled_from(
            [
                "<image>",
                "<|im_start|>",
                "<|im_end|>",
                "<|image_pad|>",
                "<tool_response>",
                "</tool_call>",
                "\n",
                "x",
                "\ud800",
            ]
        ),
        max_size=6,
    ).map("".join),
)
PICTURE = st.builds(
    Image.new,
    st.sampled_from(["RGB", "RGBA", "L", "1", "P", "I;16", "F", "CMYK"]),
    st.tuples(st.integers(0, 300), st.integers(0, 300)),
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", ""]), "content": TEXT}), max_size=2)
OBSERVATION = st.one_of(
    st.none(), TEXT, MESSAGES, st.integers(), st.just([{"role": "user"}]), st.just({"multi_modal_data": 3}),
    st.tuples(st.sampled_from(["prompt", "chat"]), st.one_of(TEXT, MESSAGES), st.lists(PICTURE, max_size=3)).map(
        lambda p: {p[0]: p[1], "multi_modal_data": {"image": p[2]}}
    ),
    # Slots and pictures that agree, more often than chance would have it.
    st.lists(PICTURE, min_size=1, max_size=3).map(
        lambda images: {"prompt": "a<image>" * len(images), "multi_modal_data": {"image": images}}
    ),
)  # fmt: skip
RESULT = st.one_of(
    st.tuples(
        OBSERVATION,
        st.one_of(st.floats(), st.integers(-2, 2), st.none(), st.just("1")),
        st.booleans(),
        st.one_of(st.none(), st.just({}), st.just({"call": "x"}), st.just({"call": "x", "ok": False}), st.just(5)),
    ),
    OBSERVATION,
    st.sampled_from(
        [KeyError("k"), ToolError("t"), SystemExit(1), StopIteration(), KeyboardInterrupt(), MemoryError()]
    ),
)
TURN_TEXT = st.one_of(
    st.sampled_from(["x", ZOOM, BAD, answer_text("7", "x")]),
    st.tuples(st.sampled_from(["a", "and so on"]), st.just("length")),
)


@settings(max_examples=200, deadline=None)
@given(
    texts=st.lists(TURN_TEXT, min_size=5, max_size=5),
    results=st.lists(RESULT, min_size=5, max_size=5),
    is_async=st.booleans(),
    score=st.one_of(st.none(), st.floats()),
    max_response_len=st.integers(5, 200),
    num_images=st.integers(0, 2),
)
def test_whatever_the_tools_do(codec, texts, results, is_async, score, max_response_len, num_images):
    """The invariants hold or the trajectory is dropped with a reason; nothing of it reaches the others or the loop."""
    acts = iter(results)

    def act():
        result = next(acts)
        if isinstance(result, BaseException):
            raise result
        return result

    async def act_async(text):
        return act()

    def make(*args, **kwargs):
        tool = _Stub(act=act)
        if is_async and not any(
            isinstance(r, KeyboardInterrupt) for r in results
        ):  # asyncio lets no one catch that one
            tool.execute = act_async
        return tool

    limits = dataclasses.replace(LIMITS, max_turns=4, max_images=5, max_response_len=max_response_len)
    engine = ScriptedEngine(codec, texts)
    rollout = Rollout(engine, codec, RULES, limits, lambda t: {"score": score}, {}, seed=0, tool_threads=2)
    registered, ToolBase.registry["stub"] = ToolBase.registry["stub"], make
    make.description = make.parameters = None
    try:
        row = sample(env="stub", images=num_images)
        (t,) = asyncio.run(rollout.run([row], 1, 1.0, take=itertools.count().__next__))
    finally:
        ToolBase.registry["stub"] = registered
    if t.finish_reason == "invalid":
        assert t.why_invalid.startswith("reward: ValueError: the score is ") and not math.isfinite(score)
        return
    assert t.why_invalid == "" and t.check(codec) == ""
    assert t.finish_reason in ("answer", "length", "max_turns", "obs_overflow", "tool_error_limit")
    assert t.response_len <= max_response_len and len(t.turn_texts) <= 4 and len(t.views) <= 5
    assert t.response_mask[: t.prompt_len] == [0] * t.prompt_len and t.response_mask[-1] == 1
    # Sampled: what the engine said, in order, and nothing else.
    sampled = [p for p, m in zip(t.rollout_logprobs, t.response_mask, strict=True) if m]
    assert sampled == [-k / 100 for k in range(1, engine.said + 1)]
    assert all(p == 0.0 for p, m in zip(t.rollout_logprobs, t.response_mask, strict=True) if not m)
    # Each prompt of the engine continues the one before, and holds one pad per image.
    for (before, _, _), (after, uuids, _) in itertools.pairwise(engine.asked):
        assert after[: len(before)] == before and after.count(codec.image_token_id) == len(uuids)
    assert t.engine_ids[: len(engine.asked[-1][0])] == engine.asked[-1][0]
    # A token per 28 x 28 pixels of a view, 4 x 4 at most.
    pads = [(v.image.width // 28) * (v.image.height // 28) for v in t.views]
    assert t.tokens.count(codec.image_token_id) == sum(pads) and all(1 <= n <= 16 for n in pads)
    assert math.isfinite(t.reward)
