"""Rewards: a finished trajectory -> a scalar with named parts, by `data_source`.

A reward function has one of two signatures:

    f(trajectory, *, weights...)                                         this file's own
    compute_score(data_source, solution_str, ground_truth, extra_info)   VeRL's, for a user's file ("path.py:name")

and returns a float or {"score": float, part: float, ...}. Parts are logged as means; a part that is None is left out of
its mean. A score of None is no reward: the trajectory leaves the batch, and nobody takes it for a 0.

What a rule can decide (answers.py) costs no call; the rest goes to the judge (judge.py). A function does its rules at once
and returns either the result or a coroutine that asks the judge first: the rollout runs plain code in a thread, and the
coroutine on its event loop.
"""

import functools
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Awaitable, Callable

from answers import (
    MAX_ANSWER_LEN,
    after_thinking,
    boxes,
    exact_match,
    format_error,
    last_answer,
    last_boxed,
    math_equal,
    rule_verdict,
    same_number,
    token_f1,
)


# ---------------------------------------------------------------------------------------------------- reward functions
def box_iou(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """Intersection over union of two (x1, y1, x2, y2) boxes.

    >>> box_iou((0, 0, 2, 2), (1, 0, 3, 2))
    0.3333333333333333
    """
    w, h = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    overlap = max(w, 0) * max(h, 0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - overlap
    return overlap / union if union > 0 else 0.0


def last_turn(trajectory) -> str:
    """What was sampled last: an answer given before a tool was looked at does not count."""
    return trajectory.turn_texts[-1] if trajectory.turn_texts else ""


def saw_image(trajectory) -> bool:
    """Whether an executed call returned an image that the policy has then read (a later turn was sampled)."""
    last = len(trajectory.turn_texts) - 1
    return any(call["ok"] and call["num_images"] and call["turn"] < last for call in trajectory.calls)


def failed_calls(trajectory) -> int:
    return sum(not call["ok"] for call in trajectory.calls)


def question_of(sample) -> str:
    """The question for the judge: `extra_info["question"]`, else the last user message; image slots taken out."""
    asked = [m["content"] for m in sample.prompt if m.get("role") == "user"]
    return str(sample.extra_info.get("question") or (asked[-1] if asked else "")).replace("<image>", "").strip()


def truths_of(sample) -> list[str]:
    """The accepted answers: `ground_truth` is one, a list of them, or {"target": ...} as in search data."""
    truth = sample.ground_truth
    if isinstance(truth, dict):
        truth = truth.get("target", "")
    return [str(t) for t in truth] if isinstance(truth, list | tuple) else [str(truth)]


def _decided(
    verdict: bool | None, ask: Callable[[], Awaitable[bool | None]], total: Callable[[float | None, bool], dict]
):
    """`total(acc, judged)` at once if a rule has decided, else a coroutine that asks the judge first."""

    async def judged() -> dict:
        right = await ask()
        return total(None if right is None else float(right), True)

    return judged() if verdict is None else total(float(verdict), False)


def overlong(response_len: int, max_response_len: int, buffer: int) -> float:
    """DAPO's soft punishment of length (arXiv:2503.14476, eq. 13): 0 up to `buffer` tokens before the limit, then down to -1.

    >>> [overlong(n, 100, 20) for n in (80, 85, 100)]
    [0.0, -0.25, -1.0]
    """
    return max(-1.0, min(0.0, (max_response_len - buffer - response_len) / buffer))


def toy_zoom(trajectory, *, acc_weight: float = 0.8, format_weight: float = 0.2, tool_weight: float = 1.2) -> dict:
    """`visual_search`'s sum with a rule instead of a judge: the answer must be the ground truth, letter for letter.

    `iou` is that of the first executed zoom with the frame: logged, never rewarded.
    """
    bad = format_error(trajectory.sampled_text)
    acc = float(not bad and last_answer(last_turn(trajectory)) == trajectory.sample.ground_truth)
    frames = [call["box"] for call in trajectory.calls if call["ok"] and "box" in call]
    tool = float(acc == 1 and saw_image(trajectory))
    return {
        "score": acc_weight * acc + format_weight * -float(bad) + tool_weight * tool,
        "acc": acc,
        "format": -float(bad),
        "tool_and_right": tool,
        "iou": box_iou(frames[0], trajectory.sample.extra_info["box"]) if frames else None,
    }


def visual_search(
    trajectory,
    *,
    judge,
    style: str = "answer",
    acc_weight: float = 0.8,
    format_weight: float = 0.2,
    tool_weight: float = 1.2,
) -> dict | Awaitable[dict]:
    """DeepEyes' sum for V*, charts and maps: 0.8 acc + 0.2 format + 1.2 tool.

    acc: 1 if the last answer means the ground truth (rules, then the judge) and the format is right; format: -1 or 0;
    tool: 1 if acc is 1 and an executed call returned an image that the policy has seen. Failed calls earn nothing.
    """
    sample, bad = trajectory.sample, format_error(trajectory.sampled_text)
    answer, truth = last_answer(last_turn(trajectory)), str(sample.ground_truth)

    def total(acc: float | None, judged: bool) -> dict:
        parts = {"format": -float(bad), "judged": float(judged), "failed_calls": failed_calls(trajectory)}
        if acc is None:
            return {"score": None, "acc": None, **parts}
        tool = float(acc == 1 and saw_image(trajectory))
        score = acc_weight * acc + format_weight * -float(bad) + tool_weight * tool
        return {"score": score, "acc": acc, "tool_and_right": tool, **parts}

    verdict = False if bad else rule_verdict(answer, truth)
    return _decided(verdict, lambda: judge.verdict(question_of(sample), truth, answer, style), total)


def boxed_reasoning(
    trajectory, *, judge, acc_weight: float = 1.2, format_weight: float = 0.4
) -> dict | Awaitable[dict]:
    r"""DeepEyes' sum for reasoning without tools: 1.2 acc + 0.4 format.

    acc: 1 if the last `\boxed{}` equals the ground truth (choice letters, math-verify), else if the judge says so.
    format: -1 if the think tags are unbalanced, or there is no box, boxes that differ, or 1000 characters in one; acc is
    still judged, as there, unless the answer is missing or too long.
    """
    sample, text = trajectory.sample, trajectory.sampled_text
    found, answer, truth = boxes(last_turn(trajectory)), last_boxed(last_turn(trajectory)), str(sample.ground_truth)
    unbalanced = text.count("<think>") != text.count("</think>")
    bad = unbalanced or not answer or len(answer) >= MAX_ANSWER_LEN or len(set(found)) > 1

    def total(acc: float | None, judged: bool) -> dict:
        score = None if acc is None else acc_weight * acc + format_weight * -float(bad)
        return {"score": score, "acc": acc, "format": -float(bad), "judged": float(judged)}

    verdict = rule_verdict(answer, truth)
    if verdict is None and math_equal(answer, truth):
        verdict = True
    return _decided(verdict, lambda: judge.verdict(question_of(sample), truth, answer, "math"), total)


_SEARCH_TAGS = [(f"<|begin_of_{what}|>", f"<|end_of_{what}|>") for what in ("query", "documents")]


def search_f1(trajectory, *, format_weight: float = 1.0, retrieval_weight: float = 1.0, f1_weight: float = 2.0) -> dict:
    """DeepEyes' sum for training a searcher: format (-1 or 0) + retrieval (+1 if a search was carried out, else -1) + 2 F1.

    F1 is that of the last answer's words with the best of the accepted answers. Documents that the policy writes itself
    are a format error: only the retriever's count.
    """
    text, answer = trajectory.sampled_text, last_answer(last_turn(trajectory))
    written = "<|begin_of_documents|>" in text
    unbalanced = any(text.count(start) != text.count(end) for start, end in _SEARCH_TAGS)
    bad = written or unbalanced or not answer or format_error(text)
    f1 = 0.0 if bad else max(token_f1(answer, truth) for truth in truths_of(trajectory.sample))
    retrieval = 1.0 if any(call["ok"] for call in trajectory.calls) else -1.0
    return {
        "score": format_weight * -float(bad) + retrieval_weight * retrieval + f1_weight * f1,
        "f1": f1,
        "acc": 0.0 if bad else max(exact_match(answer, truth) for truth in truths_of(trajectory.sample)),
        "format": -float(bad),
        "retrieval": retrieval,
        "failed_calls": failed_calls(trajectory),
    }


def search_exact(trajectory) -> dict:
    """For evaluating a searcher: 1 if the last answer is one of the accepted ones in SQuAD's sense, else 0."""
    answer = last_answer(last_turn(trajectory)) or ""
    acc = (
        max(exact_match(answer, truth) for truth in truths_of(trajectory.sample))
        if len(answer) < MAX_ANSWER_LEN
        else 0.0
    )
    return {"score": acc, "acc": acc}


def game_pays(trajectory) -> dict:
    """0: the game's own rewards sit on the turns already."""
    return {"score": 0.0}


def gsm8k(trajectory, *, method: str = "strict", format_score: float = 0.0) -> dict:
    """VeRL's rule for GSM8K: 1 if the number after the last `####` is the truth, `format_score` if it is another one.

    `method="flexible"` takes a box or, failing that, the last number of the text instead.
    """
    text = after_thinking(last_turn(trajectory))
    given = re.findall(r"####\s*\$?\s*(-?\.?\d[\d,.]{0,50})", text[-2000:])
    if method == "flexible" and not given:
        given = [last_boxed(text) or ""] if boxes(text) else re.findall(r"-?\.?\d[\d,.]{0,50}", text[-2000:])
    elif method not in ("strict", "flexible"):
        raise ValueError(f"gsm8k: method must be strict or flexible, but is {method!r}")
    truth = str(trajectory.sample.ground_truth).rpartition("####")[2].strip()
    acc = float(bool(given) and same_number(given[-1].rstrip(".,"), truth) is True)
    return {"score": acc or (format_score if given else 0.0), "acc": acc}


def boxed_math(trajectory) -> dict:
    r"""For MATH: 1 if the last `\boxed{}` equals the truth, else 0. `math_timeout`: it took too long to tell, so 0."""
    equal = math_equal(last_boxed(last_turn(trajectory)), str(trajectory.sample.ground_truth))
    return {"score": float(equal is True), "acc": float(equal is True), "math_timeout": float(equal is None)}


def geometry3k(trajectory, *, acc_weight: float = 0.9, format_weight: float = 0.1) -> dict:
    r"""VeRL's sum for Geometry3K: 0.9 acc + 0.1 format; format is 1 if a `<think>` block comes before a `\boxed{}`."""
    text = trajectory.sampled_text
    bad = text.count("<think>") != 1 or text.count("</think>") != 1 or "<think>" not in text.partition("</think>")[0]
    shaped = float(not bad and last_boxed(text) is not None)
    parts = boxed_math(trajectory)
    return parts | {"score": acc_weight * parts["acc"] + format_weight * shaped, "format": shaped}


REWARDS = {
    "toy_zoom": toy_zoom,
    "vstar": visual_search,
    "vl_agent": visual_search,
    "chart": visual_search,
    "geoguessr": functools.partial(visual_search, style="place"),
    "thinklite_eureka": boxed_reasoning,
    "xince": boxed_reasoning,
    "rag_v2-train": search_f1,
    "rag_v2-test": search_exact,
    "frozenlake": game_pays,
    "gsm8k": gsm8k,
    "openai/gsm8k": gsm8k,
    "MATH": boxed_math,
    "lighteval/MATH": boxed_math,
    "DigitalLearningGmbH/MATH-lighteval": boxed_math,
    "HuggingFaceH4/MATH-500": boxed_math,
    "geometry3k": geometry3k,
    "hiyouga/geometry3k": geometry3k,
}


# ---------------------------------------------------------------------------------------------------- finding one
@functools.cache
def load_function(spec: str) -> Callable:
    """The function that "path/to/file.py:name" means. Raises ValueError naming the file or what is in it."""
    path, colon, name = spec.rpartition(":")
    if not colon or not os.path.isfile(path):
        raise ValueError(f"reward function {spec!r}: it must be 'file.py:name', and {path or spec!r} is no file")
    module_name = "reward_fn_" + os.path.splitext(os.path.basename(path))[0]  # its own name might hide another module
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    module = sys.modules[module_name] = importlib.util.module_from_spec(module_spec)  # dataclasses look there
    try:
        module_spec.loader.exec_module(module)
    except Exception as e:
        raise ValueError(f"reward function {spec!r}: {path} cannot be imported: {type(e).__name__}: {e}") from e
    function = getattr(module, name, None)
    if not callable(function):
        has = ", ".join(sorted(n for n, f in vars(module).items() if inspect.isfunction(f)))
        raise ValueError(f"reward function {spec!r}: {path} has no function {name!r}; it has {has or 'none'}")
    return function


def reward_function(data_source: str, reward_fn: str = "", kwargs: dict | None = None, judge=None) -> Callable:
    """What maps a trajectory of this data_source to {"score", parts...} (or a coroutine of that).

    `reward_fn` ("file.py:name") takes the place of the table for every data_source. `kwargs` are the function's named
    arguments (weights, variants); `judge` is handed to a function that has an argument of this name. Raises ValueError
    for an unknown data_source, function or argument, and for a judge that is needed and missing: call it at the start.
    """
    if not reward_fn and data_source not in REWARDS:
        raise ValueError(f"no reward function for data_source {data_source!r}; there are {', '.join(sorted(REWARDS))}")
    function = load_function(reward_fn) if reward_fn else REWARDS[data_source]
    parameters = inspect.signature(function).parameters
    takes_trajectory = next(iter(parameters), "") == "trajectory"
    if not takes_trajectory and not {"data_source", "solution_str", "ground_truth"} <= set(parameters):
        raise ValueError(
            f"reward function {reward_fn!r} must take (trajectory) or (data_source, solution_str, ground_truth, "
            f"extra_info), but takes ({', '.join(parameters)})"
        )
    kwargs = dict(kwargs or {})
    unknown = set(kwargs) - set(parameters)
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise ValueError(f"the reward function of {data_source!r} has no argument {', '.join(sorted(unknown))}")
    if "judge" in parameters:
        if judge is None:
            raise ValueError(f"data_source {data_source!r} needs a judge: set LLM_AS_A_JUDGE_BASE to its address")
        kwargs["judge"] = judge

    def reward(trajectory, **more):
        if takes_trajectory:
            result = function(trajectory, **kwargs, **more)
        else:
            result = function(**_verl_arguments(trajectory, parameters), **kwargs, **more)
        return _later(result) if inspect.isawaitable(result) else _parts(result)

    reward.needs_judge = "judge" in parameters
    return reward


def _verl_arguments(trajectory, parameters) -> dict:
    """VeRL's four arguments. solution_str is what was sampled, without end-of-turn markers and observations.

    extra_info is the row's, and says besides what the tools did, so that no rule has to guess it from the text.
    """
    turns = (re.sub(r"(?:<\|im_end\|>|<\|endoftext\|>)\s*$", "", text) for text in trajectory.turn_texts)
    calls = trajectory.calls
    did = {
        "num_turns": len(trajectory.turn_texts),
        "num_calls": len(calls),
        "num_failed_calls": failed_calls(trajectory),
        "num_tool_images": sum(c["num_images"] for c in calls if c["ok"]),
        "finish_reason": trajectory.finish_reason,
    }
    sample = trajectory.sample
    arguments = {
        "data_source": sample.data_source,
        "solution_str": "\n".join(turns),
        "ground_truth": sample.ground_truth,
        "extra_info": {**sample.extra_info, **did},
    }
    return arguments if "extra_info" in parameters else {k: v for k, v in arguments.items() if k != "extra_info"}


async def _later(result: Awaitable) -> dict:
    return _parts(await result)


def _parts(result) -> dict:
    """A float or a dict with a score, numbers as parts -> {"score": float or None, part: float}; texts are left out."""
    if not isinstance(result, dict):
        return {"score": float(result)}
    if "score" not in result:
        raise ValueError(f"a reward function's dict must have a 'score', but has {', '.join(map(str, result))}")

    def is_number(value) -> bool:
        return value is None or (hasattr(value, "__float__") and not isinstance(value, str))

    return {k: None if v is None else float(v) for k, v in result.items() if k == "score" or is_number(v)}
