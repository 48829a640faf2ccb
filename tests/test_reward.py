"""Rewards: every rule by hand, what earns the tool bonus, and how a function is found."""

import asyncio
import inspect
import textwrap

import pytest

from data import Sample
from reward import REWARDS, load_function, question_of, reward_function
from rollout import Trajectory, rollout_metrics

THINK = "<think>t</think>"
CALL = THINK + '<tool_call>{"name": "image_zoom_in_tool"}</tool_call><|im_end|>'
FAILED = {"call": "zoom", "ok": False, "turn": 0, "num_images": 0}
EXECUTED = {"call": "zoom", "ok": True, "turn": 0, "num_images": 1}


class ScriptedJudge:
    """Says `right` to everything, and remembers what it was asked."""

    def __init__(self, right):
        self.right, self.asked = right, []

    async def verdict(self, question, truth, answer, style="answer"):
        self.asked.append((question, truth, answer, style))
        return self.right


def trajectory(*turns, truth="red", source="vstar", calls=(), extra=None):
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "<image>\nWhat colour is it?"}]
    sample = Sample("data.parquet row 3", source, prompt, (), "", truth, extra or {})
    return Trajectory(sample, 0, [], [0], [0], [0.0], [0.0], [], 1, turn_texts=list(turns), calls=list(calls))


def reward(t, judge=None, **kwargs):
    result = reward_function(t.sample.data_source, kwargs=kwargs, judge=judge or ScriptedJudge(None))(t)
    return asyncio.run(result) if inspect.isawaitable(result) else result


@pytest.mark.parametrize("source", ["vstar", "vl_agent", "chart", "geoguessr"])
@pytest.mark.parametrize(
    ("turns", "calls", "score", "acc", "form", "tool"),
    [
        ([f"{THINK}<answer>red</answer>"], [], 0.8, 1, 0, 0),
        ([CALL, f"{THINK}<answer>Red.</answer>"], [EXECUTED], 2.0, 1, 0, 1),
        ([CALL, f"{THINK}<answer>red</answer>"], [FAILED], 0.8, 1, 0, 0),  # the call failed
        ([CALL, f"{THINK}<answer>red</answer>"], [{**EXECUTED, "num_images": 0}], 0.8, 1, 0, 0),  # no image came back
        ([CALL, f"{THINK}<answer>red</answer>"], [{**FAILED, "num_images": 1}], 0.8, 1, 0, 0),  # of the error, say
        ([CALL, CALL, f"{THINK}<answer>red</answer>"], [FAILED, {**EXECUTED, "turn": 1}], 2.0, 1, 0, 1),
        ([CALL, f"{THINK}<answer></answer>"], [EXECUTED], 0.0, 0, 0, 0),  # a tool without a right answer
        ([f"{THINK}red"], [], 0.0, 0, 0, 0),
        (["<think>t<answer>red</answer>"], [], -0.2, 0, -1, 0),
        ([CALL, "<think>t<answer>red</answer>"], [EXECUTED], -0.2, 0, -1, 0),
        ([f"{THINK}<answer>{'red ' * 250}</answer>"], [], 0.0, 0, 0, 0),  # stripped: 999 characters, refused or judged
        ([f"{THINK}<answer>{'r' * 1000}</answer>"], [], -0.2, 0, -1, 0),
        # The image came, but nobody has looked at it: the answer was there before.
        ([f"{CALL}<answer>red</answer>"], [EXECUTED], 0.8, 1, 0, 0),
        ([f"{CALL}<answer>red</answer>", f"{THINK}hm"], [EXECUTED], 0.0, 0, 0, 0),
        ([f"{CALL}<answer>red</answer>", "hm"], [EXECUTED], 0.0, 0, 0, 0),
        ([], [], 0.0, 0, 0, 0),
    ],
)
def test_visual_search_by_hand(source, turns, calls, score, acc, form, tool):
    parts = reward(trajectory(*turns, calls=calls, source=source), ScriptedJudge(False))
    assert parts["score"] == pytest.approx(score)
    assert (parts["acc"], parts["format"], parts["tool_and_right"]) == (acc, form, tool)
    assert parts["failed_calls"] == sum(not c["ok"] for c in calls)


@pytest.mark.parametrize(("right", "score"), [(True, 2.0), (False, 0.0), (None, None)])
def test_what_rules_cannot_tell_goes_to_the_judge(right, score):
    judge = ScriptedJudge(right)
    t = trajectory(CALL, f"{THINK}<answer>crimson</answer>", calls=[EXECUTED], extra={"question": "<image>Colour?"})
    parts = reward(t, judge)
    assert parts["score"] == (pytest.approx(score) if score is not None else None), "no verdict is no reward, never 0"
    assert parts["acc"] == (None if right is None else float(right)) and parts["judged"] == 1
    assert judge.asked == [("Colour?", "red", "crimson", "answer")]


@pytest.mark.parametrize("answer", ["red", "RED.", "", " "])
def test_rules_spare_the_call(answer):
    judge = ScriptedJudge(None)
    assert reward(trajectory(f"{THINK}<answer>{answer}</answer>"), judge)["judged"] == 0
    assert judge.asked == []


def test_the_judge_is_told_what_kind_of_answer_it_is():
    for source, style in (("geoguessr", "place"), ("vstar", "answer")):
        judge = ScriptedJudge(True)
        reward(trajectory(f"{THINK}<answer>Lyon</answer>", truth="France", source=source), judge)
        assert judge.asked == [("What colour is it?", "France", "Lyon", style)]
    judge = ScriptedJudge(True)
    reward(trajectory(rf"{THINK}\boxed{{Lyon}}", truth="France", source="xince"), judge)
    assert judge.asked[0][3] == "math"


def test_question_of_a_row_without_one():
    assert question_of(trajectory().sample) == "What colour is it?"
    assert question_of(trajectory(extra={"question": "Q?"}).sample) == "Q?"


@pytest.mark.parametrize("source", ["thinklite_eureka", "xince"])
@pytest.mark.parametrize(
    ("text", "truth", "right", "score"),
    [
        (rf"{THINK}so \boxed{{\frac{{1}}{{2}}}}", "0.5", None, 1.2),
        (rf"{THINK}\boxed{{x+1}}", "1+x", None, 1.2),
        (rf"{THINK}\boxed{{B}}", "B", None, 1.2),
        (rf"{THINK}\boxed{{A}}", "B", None, 0.0),
        (rf"{THINK}\boxed{{3}}", "4", None, 0.0),
        (rf"{THINK}\boxed{{the force}}", "friction", True, 1.2),
        (rf"{THINK}\boxed{{the force}}", "friction", False, 0.0),
        (rf"{THINK}\boxed{{the force}}", "friction", None, None),
        (r"<think>\boxed{4}", "4", None, 0.8),  # right, but the thought never ends
        (rf"{THINK}\boxed{{3}} or \boxed{{4}}", "4", None, 0.8),  # two answers: the last counts, and it is bad form
        (rf"{THINK}\boxed{{4}}, again: \boxed{{4}}", "4", None, 1.2),
        (rf"{THINK}4", "4", None, -0.4),
        (rf"{THINK}\boxed{{}}", "4", None, -0.4),
        (rf"{THINK}\boxed{{{'4' * 1000}}}", "4", None, -0.4),
        (r"<think>\boxed{4}</think>", "4", None, -0.4),  # inside the thought alone
    ],
)
def test_boxed_reasoning_by_hand(source, text, truth, right, score):
    parts = reward(trajectory(text, truth=truth, source=source), ScriptedJudge(right))
    assert parts["score"] == (None if score is None else pytest.approx(score))


SEARCH = "<think>t</think><|begin_of_query|>q<|end_of_query|><|im_end|>"
FOUND = {"call": "rag", "ok": True, "turn": 0, "num_images": 0}


@pytest.mark.parametrize(
    ("turns", "calls", "truth", "score"),
    [
        ([SEARCH, f"{THINK}<answer>Paris</answer>"], [FOUND], "Paris", 0 + 1 + 2),
        ([SEARCH, f"{THINK}<answer>Paris, France</answer>"], [FOUND], "Paris", 0 + 1 + 2 * 2 / 3),
        ([SEARCH, f"{THINK}<answer>London</answer>"], [FOUND], "Paris", 0 + 1 + 0),
        ([f"{THINK}<answer>Paris</answer>"], [], "Paris", 0 - 1 + 2),
        ([SEARCH, f"{THINK}<answer>Paris</answer>"], [FAILED], "Paris", 0 - 1 + 2),
        ([SEARCH, f"{THINK}<answer>Paris</answer>"], [FOUND], ["Lutetia", "Paris"], 3),
        ([SEARCH, f"{THINK}<answer>Paris</answer>"], [FOUND], {"target": ["Paris"]}, 3),
        ([SEARCH, f"{THINK}Paris"], [FOUND], "Paris", -1 + 1 + 0),
        ([SEARCH, "<think>t<answer>Paris</answer>"], [FOUND], "Paris", -1 + 1 + 0),
        (["<|begin_of_query|>q", f"{THINK}<answer>Paris</answer>"], [FOUND], "Paris", -1 + 1 + 0),
        # It writes the documents itself.
        (
            [
                SEARCH
                + "<|begin_of_documents|>Paris<|end_of_documents|><|begin_of_query|>q<|end_of_query|>"
                + f"{THINK}<answer>Paris</answer>"
            ],
            [],
            "Paris",
            -1 - 1 + 0,
        ),
    ],
)
def test_search_by_hand(turns, calls, truth, score):
    assert reward(trajectory(*turns, calls=calls, truth=truth, source="rag_v2-train"))["score"] == pytest.approx(score)


@pytest.mark.parametrize(
    ("source", "text", "truth", "score"),
    [
        ("rag_v2-test", "<answer>The Paris.</answer>", "paris", 1),
        ("rag_v2-test", "<answer>Paris, France</answer>", "Paris", 0),
        ("rag_v2-test", "Paris", "Paris", 0),
        ("frozenlake", "<action>left</action>", "", 0),
        ("gsm8k", "3 + 4 = 7\n#### 7<|im_end|>", "7", 1),
        ("gsm8k", "#### 1,234", "1234", 1),
        ("gsm8k", "#### $7.00.", "7", 1),
        ("gsm8k", "#### 5 #### 7", "7", 1),
        ("gsm8k", "#### 7 #### 5", "7", 0),
        ("gsm8k", "the answer is 7", "7", 0),  # strict
        ("gsm8k", "<think>#### 7</think>", "7", 0),
        ("gsm8k", "#### -7", "7", 0),
        ("gsm8k", "#### 7", "so 7\n#### 7", 1),  # the data set's own answer text
        ("gsm8k", "", "7", 0),
        ("openai/gsm8k", "#### 7", "7", 1),
        ("MATH", r"\boxed{\frac{1}{2}}", "0.5", 1),
        ("MATH", r"\boxed{\frac{1}{3}}", "0.5", 0),
        ("MATH", "0.5", "0.5", 0),
        ("lighteval/MATH", r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
        ("geometry3k", rf"{THINK}\boxed{{5}}", "5", 1.0),
        ("geometry3k", rf"{THINK}\boxed{{4}}", "5", 0.1),
        ("geometry3k", r"\boxed{5}", "5", 0.9),
        ("geometry3k", THINK + "5", "5", 0),
        ("geometry3k", r"</think>\boxed{5}<think>", "5", 0.9),  # no block of thought
        ("hiyouga/geometry3k", rf"{THINK}\boxed{{2\sqrt{{2}}}}", r"\sqrt{8}", 1.0),
    ],
)
def test_rule_rewards_by_hand(source, text, truth, score):
    assert reward(trajectory(text, truth=truth, source=source))["score"] == pytest.approx(score)


def test_variants_and_weights_are_arguments():
    flexible = lambda text: reward(trajectory(text, truth="7", source="gsm8k"), method="flexible")["score"]  # noqa: E731
    assert [flexible(t) for t in ("it is 7.", r"3 \boxed{7}", "7 then 8", "none")] == [1, 1, 0, 0]
    assert reward(trajectory("#### 8", truth="7", source="gsm8k"), format_score=0.1)["score"] == 0.1
    t = trajectory(CALL, f"{THINK}<answer>red</answer>", calls=[EXECUTED])
    assert reward(t, acc_weight=1.0, tool_weight=0.25)["score"] == 1.25
    assert reward(trajectory("<think>"), format_weight=3.0)["score"] == -3.0
    with pytest.raises(ValueError, match="'vstar' has no argument tool_wieght"):
        reward(t, tool_wieght=1.0)


def test_unknown_sources_and_missing_judges_are_told_at_once():
    with pytest.raises(ValueError, match=r"no reward function for data_source 'vstarr'; there are .*, vstar, "):
        reward_function("vstarr")
    with pytest.raises(ValueError, match="'vstar' needs a judge: set LLM_AS_A_JUDGE_BASE"):
        reward_function("vstar")
    assert {s for s in REWARDS if reward_function(s, judge=ScriptedJudge(None)).needs_judge} == {
        "vstar",
        "vl_agent",
        "chart",
        "geoguessr",
        "thinklite_eureka",
        "xince",
    }


USER = textwrap.dedent(
    '''
    """A user's file."""
    from __future__ import annotations
    from dataclasses import dataclass

    @dataclass
    class Parts:
        x: float

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
        assert extra_info["question"] == "Q?" and extra_info["num_turns"] == 2
        found = {k: extra_info[k] for k in ("num_calls", "num_failed_calls", "num_tool_images")}
        return {"score": float(solution_str.endswith(ground_truth)) + bonus, "pred": "text", "ok": True, **found}

    def plain_float(data_source, solution_str, ground_truth):
        return 0.5

    def of_trajectory(trajectory):
        return len(trajectory.turn_texts)

    async def later(data_source, solution_str, ground_truth, extra_info):
        return {"score": None, "acc": None}

    async def with_judge(trajectory, judge):
        return {"score": await judge.verdict("q", "t", "a")}

    def no_score(trajectory):
        return {"acc": 1.0}

    def strange(prompt, response):
        return 1.0
    '''
)


def test_a_users_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(USER)
    t = trajectory(CALL, "so red<|im_end|>\n", calls=[EXECUTED, FAILED], source="whatever", extra={"question": "Q?"})

    def run(name, judge=None, **kwargs):
        result = reward_function("whatever", f"{path}:{name}", kwargs, judge)(t)
        return asyncio.run(result) if inspect.isawaitable(result) else result

    counted = {"num_calls": 2.0, "num_failed_calls": 1.0, "num_tool_images": 1.0}
    assert run("compute_score", bonus=0.25) == {"score": 1.25, "ok": 1.0, **counted}, "texts are no parts"
    assert run("plain_float") == {"score": 0.5}
    assert run("of_trajectory") == {"score": 2.0}
    assert run("later") == {"score": None, "acc": None}
    assert run("with_judge", ScriptedJudge(True)) == {"score": 1.0}
    for name, why in {
        "with_judge": "needs a judge",
        "no_score": "must have a 'score', but has acc",
        "strange": r"must take \(trajectory\) or \(data_source, solution_str, .*but takes \(prompt, response\)",
        "absent": "has no function 'absent'; it has .*compute_score",
    }.items():
        with pytest.raises(ValueError, match=why):
            run(name)
    with pytest.raises(ValueError, match="absent.py' is no file"):
        load_function(str(tmp_path / "absent.py:f"))
    with pytest.raises(ValueError, match="must be 'file.py:name'"):
        load_function("compute_score")
    (tmp_path / "broken.py").write_text("import nothing_of_the_kind")
    with pytest.raises(ValueError, match="cannot be imported: ModuleNotFoundError"):
        load_function(str(tmp_path / "broken.py:f"))


def test_parts_of_every_reward_can_be_logged():
    """Means over trajectories take numbers and None, whatever function made them."""
    rows = []
    for source in sorted(REWARDS):
        t = trajectory(f"{THINK}<answer>7</answer>", truth="7", source=source, extra={"box": [0, 0, 9, 9]})
        t.reward_parts = reward(t)
        assert set(map(type, t.reward_parts.values())) <= {float, type(None)} and t.reward_parts["score"] is not None
        rows.append(t)
    assert "failed_calls/mean" in rollout_metrics(rows)
