"""Tools: what the policy can call in the middle of its reasoning, and what comes back.

A tool is a class with a `name` (= `env_name` in the data), made once per trajectory. `reset` gives it the prompt and the
images; after every generation `execute` gets the generated text and returns `(observation, reward, done, info)`:

- `observation`: what the policy reads next, in one of these forms
    ""  or None             nothing to add
    str                     appended as it is: `<|im_start|>`, `<|im_end|>` and tags such as `<tool_response>` in it count,
                            vision tokens stay plain text. The tool answers for it: no text of others in here
    [{role, content}, ...]  chat messages, put between turn markers; whatever the text of a user's message says, it is
                            plain text: this is the form for search results and the like
    {"prompt": str or "chat": messages, "multi_modal_data": {"image": [PIL images]}}
                            the two forms above with images: one `<image>` in the text for each
- `reward`: goes to the last sampled token of the turn.
- `done`: True ends the trajectory.
- `info`: for logs and rewards. `{"call": name, "ok": bool, ...}` says that a call was made and whether it was executed.

A tool that raises costs its trajectory one text observation and nothing else.
"""

import json
import math
from dataclasses import dataclass

from PIL import Image


class ToolError(Exception):
    """A call that cannot be carried out; the message is shown to the policy."""


class ToolBase:
    """Base class with a registry: a subclass with a `name` is found by `ToolBase.create(name)`."""

    registry: dict[str, type["ToolBase"]] = {}
    name: str = ""
    description: str = ""
    parameters: dict = {}  # JSON schema

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls) or not cls.name:
            return  # a helper class
        other = ToolBase.registry.get(cls.name)
        if other and other.__qualname__ != cls.__qualname__:
            both = " and ".join(f"{c.__module__}.{c.__qualname__}" for c in (other, cls))
            raise ValueError(f"two tools are named {cls.name!r}: {both}")
        ToolBase.registry[cls.name] = cls

    def __init__(self, name: str = "", description: str = "", parameters: dict | None = None, **kwargs):
        self.name = name or self.name
        self.description = description or self.description
        self.parameters = parameters or self.parameters

    @classmethod
    def create(cls, name: str, **kwargs) -> "ToolBase":
        """A fresh instance of the tool called `name`. Raises ValueError naming the tools there are."""
        if name not in cls.registry:
            raise ValueError(f"unknown tool {name!r}; there are {', '.join(sorted(cls.registry))}")
        tool = cls.registry[name]
        return tool(name, tool.description, tool.parameters, **kwargs)

    def reset(self, raw_prompt, multi_modal_data, origin_multi_modal_data, **kwargs) -> None:
        """Once per trajectory. `multi_modal_data["image"]` are the model's views, `origin_...` the unmodified images."""

    def execute(self, action_string: str, **kwargs) -> tuple:
        """After every generation: (observation, reward, done, info)."""
        raise NotImplementedError


def extract_tool_call_contents(start: str, end: str, text: str) -> list[str]:
    """What stands between each `start` and the next `end`.

    >>> extract_tool_call_contents("<a>", "</a>", "x<a>1</a><a>2</a><a>3")
    ['1', '2']
    """
    contents, at = [], text.find(start)
    while at >= 0:
        stop = text.find(end, at + len(start))
        if stop < 0:
            break
        contents.append(text[at + len(start) : stop])
        at = text.find(start, stop + len(end))
    return contents


@dataclass(frozen=True)
class Observation:
    """An observation in one shape: `text` is a str (markers count) or chat messages (plain text)."""

    text: str | list[dict]
    images: list[Image.Image]
    slots: bool = True  # False: `<image>` in the text is not an image slot but seven characters

    @classmethod
    def parse(cls, raw) -> "Observation":
        """Any of the forms above. Raises ToolError where the form is none of them or slots and images disagree."""
        images = []
        if isinstance(raw, dict):
            images = list((raw.get("multi_modal_data") or {}).get("image") or [])
            raw = raw.get("prompt", raw.get("chat"))
        raw = raw or ""
        if isinstance(raw, list):
            if not all(
                isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
                for m in raw
            ):
                raise ToolError("a chat observation must be a list of {role, content} with text contents")
            slots = sum(m["content"].count("<image>") for m in raw)
        elif isinstance(raw, str):
            slots = raw.count("<image>")
        else:
            raise ToolError(f"an observation cannot be a {type(raw).__name__}")
        if slots != len(images):
            raise ToolError(f"an observation has {slots} <image> slots and {len(images)} images")
        if not all(isinstance(i, Image.Image) for i in images):
            raise ToolError("observation images must be PIL images")
        return cls(raw, images)


def error_observation(message: str) -> Observation:
    """What the policy reads after a call that failed: a bounded message, nothing in it taken for more than text."""
    message = message[:1000].encode("utf-8", "replace").decode()
    content = f"<tool_response>Error: {message}</tool_response>"
    return Observation([{"role": "user", "content": content}], [], slots=False)


def _is_number(value) -> bool:
    """An int or float that can be computed with: not NaN, not infinite, not an int beyond all floats."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


# ---------------------------------------------------------------------------------------------------- boxes
def box_to_original(
    box, *, frame: str, view_size: tuple[int, int], original_size: tuple[int, int]
) -> tuple[float, ...]:
    """Four numbers from the policy -> (x1, y1, x2, y2) in pixels of the original, ordered and clipped to it.

    `frame` says what the numbers mean: "model_pixels" (pixels of the view, Qwen2.5-VL), "rel1000" (thousandths of each
    side, Qwen2-VL and Qwen3-VL) or "original". Raises ToolError on anything else than four finite numbers, and on a box
    with no part of the image in it.

    >>> box_to_original([28, 0, 14, 56], frame="model_pixels", view_size=(56, 56), original_size=(112, 224))
    (28.0, 0.0, 56.0, 224.0)
    """
    if not isinstance(box, list | tuple) or len(box) != 4 or not all(map(_is_number, box)):
        raise ToolError("bbox_2d must be four numbers [x1, y1, x2, y2]")
    unit = {"model_pixels": view_size, "rel1000": (1000, 1000), "original": original_size}[frame]
    xs = sorted(min(max(v / unit[0], 0.0), 1.0) * original_size[0] for v in (box[0], box[2]))
    ys = sorted(min(max(v / unit[1], 0.0), 1.0) * original_size[1] for v in (box[1], box[3]))
    if xs[0] == xs[1] or ys[0] == ys[1]:
        raise ToolError(f"the box {list(box)} holds no part of the image")
    return xs[0], ys[0], xs[1], ys[1]


def crop_box(
    box: tuple[float, ...], size: tuple[int, int], *, min_side: int, max_aspect: float
) -> tuple[int, int, int, int]:
    """The whole pixels to cut out: a thin or tiny box grows around its centre, and moves inside the image.

    Each side gets at least `min_side` pixels and at least the other side / `max_aspect`, as far as the image has them.
    """

    def grow(low: float, high: float, least: float, limit: int) -> tuple[int, int]:
        low, high = math.floor(low), math.ceil(high)
        length = min(max(high - low, math.ceil(least)), limit)
        low = min(max(round((low + high - length) / 2), 0), limit - length)
        return low, low + length

    w, h = box[2] - box[0], box[3] - box[1]
    left, right = grow(box[0], box[2], max(min_side, h / max_aspect), size[0])
    top, bottom = grow(box[1], box[3], max(min_side, w / max_aspect), size[1])
    return left, top, right, bottom


# ---------------------------------------------------------------------------------------------------- visual toolbox
TOOL_TURN = "\n<|im_start|>user\n<tool_response>{}</tool_response><|im_end|>\n<|im_start|>assistant\n"
REMINDER = (
    "\nReason inside <think>...</think> first. Then either call one more tool inside <tool_call>...</tool_call>"
    " or give the final answer inside <answer>...</answer>."
)


def _function(name: str, description: str, properties: dict) -> dict:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


class VisualToolboxV2(ToolBase):
    """Zoom and rotate, on the original image. `<answer>` ends the episode, as does a turn with neither answer nor call.

    The policy writes `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. If one turn holds both a call and an
    answer, the one that comes first counts. `image_index` picks among several prompt images (default 0).
    """

    name = "visual_toolbox_v2"
    description = "Zoom into the image or rotate it."
    parameters = {
        "image_zoom_in_tool": _function(
            "image_zoom_in_tool",
            "Cut a box out of the original image and show it enlarged.",
            {"bbox_2d": {"type": "array", "items": {"type": "number"}, "minItems": 4, "maxItems": 4}},
        ),
        "image_rotate_tool": _function(
            "image_rotate_tool",
            "Turn the original image counter-clockwise by an angle in degrees.",
            {"angle": {"type": "number"}},
        ),
    }

    def __init__(
        self,
        *args,
        box_frame: str = "model_pixels",
        reminder: str = REMINDER,
        min_side: int = 28,
        max_aspect: float = 100.0,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.box_frame, self.reminder, self.min_side, self.max_aspect = box_frame, reminder, min_side, max_aspect

    def reset(self, raw_prompt, multi_modal_data, origin_multi_modal_data, **kwargs) -> None:
        self.view_sizes = [i.size for i in multi_modal_data["image"]]
        self.originals = origin_multi_modal_data["image"]

    def execute(self, action_string: str, **kwargs) -> tuple:
        answer, call = action_string.find("<answer>"), action_string.find("<tool_call>")
        if answer >= 0 and (call < 0 or answer < call):
            return "", 0.0, True, {"finish_reason": "answer"}
        if call < 0:
            return "", 0.0, True, {"finish_reason": "stop"}
        info = {"call": "unknown", "ok": False}
        try:
            image = self._carry_out(action_string, info)
        except ToolError as e:
            # The messages are ours and quote nothing but numbers: safe in this form.
            return TOOL_TURN.format(f"Error: {e}{self.reminder}"), 0.0, False, info | {"error": str(e)}
        info["ok"] = True
        prompt = TOOL_TURN.format(f"<image>{self.reminder}")
        return {"prompt": prompt, "multi_modal_data": {"image": [image]}}, 0.0, False, info

    def _carry_out(self, text: str, info: dict) -> Image.Image:
        blocks = extract_tool_call_contents("<tool_call>", "</tool_call>", text)
        if not blocks:
            raise ToolError("<tool_call> is not closed")
        try:
            call = json.loads(blocks[0])
            name, arguments = call["name"], call["arguments"]
            missing = [k for k in self.parameters[name]["function"]["parameters"]["required"] if k not in arguments]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ToolError(
                f'a call must be {{"name": ..., "arguments": {{...}}}} with one of {", ".join(self.parameters)}'
            ) from None
        info["call"] = name
        if missing:
            raise ToolError(f"{name} lacks {', '.join(missing)}")
        index = arguments.get("image_index", 0)
        if not isinstance(index, int) or not 0 <= index < len(self.originals):
            raise ToolError(
                f"image_index must be between 0 and {len(self.originals) - 1}"
                if self.originals
                else "there is no image"
            )
        image = self.originals[index]
        if name == "image_zoom_in_tool":
            box = box_to_original(
                arguments["bbox_2d"], frame=self.box_frame, view_size=self.view_sizes[index], original_size=image.size
            )
            info["box"] = box  # in pixels of the original, before it grows
            return image.crop(crop_box(box, image.size, min_side=self.min_side, max_aspect=self.max_aspect))
        angle = arguments["angle"]
        if not _is_number(angle):
            raise ToolError("angle must be a number of degrees")
        return image.rotate(angle, expand=True)
