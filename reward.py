"""Rewards: a finished trajectory -> a scalar with named parts, by `data_source`.

A reward function takes the trajectory (its `sample`, `sampled_text`, executed `calls`) and weights, and returns
{"score": float, part: float, ...}. Parts are logged as means; a part that is None is left out of its mean.
"""


def last_answer(text: str) -> str | None:
    """The text of the last closed `<answer>` block after the last `</think>`, stripped; None if there is none.

    >>> last_answer("<think>it is <answer>1</answer></think><answer> 7 </answer>")
    '7'
    """
    tail = text.split("</think>")[-1]
    if "<answer>" not in tail or "</answer>" not in tail.split("<answer>")[-1]:
        return None
    return tail.split("<answer>")[-1].split("</answer>")[0].strip()


def format_error(text: str) -> bool:
    """DeepEyes' format rule: `<think>` or `<answer>` tags out of balance, or an answer of 1000 characters or more."""
    unbalanced = any(text.count(f"<{tag}>") != text.count(f"</{tag}>") for tag in ("think", "answer"))
    return unbalanced or len(last_answer(text) or "") >= 1000


def box_iou(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """Intersection over union of two (x1, y1, x2, y2) boxes.

    >>> box_iou((0, 0, 2, 2), (1, 0, 3, 2))
    0.3333333333333333
    """
    w, h = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    overlap = max(w, 0) * max(h, 0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - overlap
    return overlap / union if union > 0 else 0.0


def toy_zoom(trajectory, *, acc_weight: float = 0.8, format_weight: float = 0.2, tool_weight: float = 1.2) -> dict:
    """DeepEyes' sum for visual search: 0.8 acc + 0.2 format + 1.2 tool, by rule instead of a judge.

    acc is 1 if the last answer is the ground truth and the format is right; format is -1 or 0; tool is 1 if an executed
    call returned an image and acc is 1. `iou` is that of the first executed zoom with the frame: logged, never rewarded.
    """
    text, sample = trajectory.sampled_text, trajectory.sample
    bad = format_error(text)
    acc = float(not bad and last_answer(text) == sample.ground_truth)
    boxes = [call["box"] for call in trajectory.calls if call["ok"] and "box" in call]
    tool = float(acc == 1 and any(call["ok"] and call["num_images"] for call in trajectory.calls))
    return {
        "score": acc_weight * acc + format_weight * (-1.0 if bad else 0.0) + tool_weight * tool,
        "acc": acc,
        "format": -1.0 if bad else 0.0,
        "tool_and_right": tool,
        "iou": box_iou(boxes[0], sample.extra_info["box"]) if boxes else None,
    }


REWARDS = {"toy_zoom": toy_zoom}


def reward_function(data_source: str):
    """The function for a data_source. Raises ValueError naming those there are."""
    if data_source not in REWARDS:
        raise ValueError(f"no reward function for data_source {data_source!r}; there are {', '.join(sorted(REWARDS))}")
    return REWARDS[data_source]
