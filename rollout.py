"""The multi-turn loop: generate, parse, run the tool, append, again. Every trajectory is a coroutine of its own.

    tokens            | prompt: text + image pads | turn 1: sampled ... stop | observation: text + image pads | turn 2 ... stop |
    response_mask     | 0 0 0 0 0 0 0 0 0 0 0 0 0 | 1 1 1 1 1 1 1 1 1 1 1 1 | 0 0 0 0 0 0 0 0 0 0 0 0 0 0  | 1 1 1 1 1 1 1 1 |
    rollout_logprobs  |             0             |       from vLLM         |               0               |    from vLLM     |
    rewards           |             0             | 0 0 0 ..... tool reward |               0               | 0 ...... outcome |

Tokens in, tokens out: what the engine sampled is what is trained on, id for id; text is decoded to find a call and to
show, and never encoded again. A sequence has two views: the engine's, with ONE pad per image, and the trainer's, with as
many as the image takes. All budgets count the trainer's.
"""

import asyncio
import contextlib
import inspect
import math
import os
import queue
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from PIL import Image

from data import Codec, DataError, ImageRules, Sample, View, decode_image
from tools import Observation, ToolBase, ToolError, error_observation

FINISH_REASONS = (
    "answer",  # the tool said that the episode is over, with an answer
    "stop",  # the turn ended and there was nothing to carry out (or no tool at all)
    "length",  # a turn reached its limit, or the response did
    "max_turns",
    "obs_overflow",  # an observation did not fit and was dropped whole
    "tool_error_limit",
    "timeout",
    "invalid",  # broke an invariant, or its tool or reward did not work; leaves the batch
)

HEARTBEAT_SECONDS = 30.0


class InvariantError(Exception):
    """A trajectory is not what it must be; it leaves the batch, alone, and the reason is counted."""


@dataclass(frozen=True)
class RolloutLimits:
    """Bounds of a trajectory. Lengths are trainer tokens, times are seconds."""

    max_prompt_len: int
    max_response_len: int  # observations included
    max_turn_len: int  # sampled tokens
    max_turns: int
    max_images: int  # those of the prompt included
    max_tool_errors: int
    tool_timeout: float
    trajectory_timeout: float


@dataclass(frozen=True)
class Piece:
    """A stretch of a sequence in both views, with the images in it."""

    engine_ids: list[int]
    tokens: list[int]
    views: list[View]


@dataclass(frozen=True)
class Prompt(Piece):
    """A sample made ready once for all trajectories of its group."""

    sample: Sample
    originals: list[Image.Image]


@dataclass
class Trajectory:
    """One rollout. The lists per token are parallel; entry t speaks about token t."""

    sample: Sample
    group_id: int
    engine_ids: list[int]  # engine view
    tokens: list[int]  # trainer view
    response_mask: list[int]
    rollout_logprobs: list[float]
    rewards: list[float]
    views: list[View]  # in order of appearance, prompt images first
    prompt_len: int
    turn_texts: list[str] = field(default_factory=list)  # what was sampled, for parsing and for people
    calls: list[dict] = field(default_factory=list)  # info of each call, with `turn` and `num_images`
    versions: list[int] = field(default_factory=list)  # policy_version that sampled each turn
    state: str = "waiting"  # for the heartbeat
    finish_reason: str = ""
    reward_parts: dict = field(default_factory=dict)
    why_invalid: str = ""
    # Per token too, as far as the objective asks for them (learner.py); None = not known.
    old_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    values: list[float] | None = None
    advantages: list[float] | None = None
    returns: list[float] | None = None
    weights: list[float] | None = None

    @classmethod
    def start(cls, prompt: Prompt, group_id: int) -> "Trajectory":
        n = len(prompt.tokens)
        return cls(
            prompt.sample, group_id, list(prompt.engine_ids), list(prompt.tokens), [0] * n, [0.0] * n, [0.0] * n,
            list(prompt.views), n,
        )  # fmt: skip

    @property
    def response_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def num_sampled(self) -> int:
        return sum(self.response_mask)

    @property
    def sampled_text(self) -> str:
        return "".join(self.turn_texts)

    @property
    def reward(self) -> float:
        return sum(self.rewards)

    def append_sampled(self, ids: list[int], logprobs: list[float], version: int) -> None:
        self.engine_ids += ids
        self.tokens += ids
        self.response_mask += [1] * len(ids)
        self.rollout_logprobs += logprobs
        self.rewards += [0.0] * len(ids)
        self.versions.append(version)

    def append_observation(self, piece: Piece) -> None:
        n = len(piece.tokens)
        self.engine_ids += piece.engine_ids
        self.tokens += piece.tokens
        self.response_mask += [0] * n
        self.rollout_logprobs += [0.0] * n
        self.rewards += [0.0] * n
        self.views += piece.views

    def check(self, codec: Codec) -> str:
        """The first broken invariant in words, "" if all hold."""
        lengths = {len(self.tokens), len(self.response_mask), len(self.rollout_logprobs), len(self.rewards)}
        if len(lengths) != 1:
            return f"parallel lists have lengths {sorted(lengths)}"
        if self.response_mask[0] != 0 or self.response_mask[-1] != 1:
            return "the response mask must start at 0 and end at 1"
        sampled = [(t, p) for t, p, m in zip(self.tokens, self.rollout_logprobs, self.response_mask, strict=True) if m]
        if not all(math.isfinite(p) for _, p in sampled):
            return "a sampled token has no finite logprob"
        if not codec.banned.isdisjoint(t for t, _ in sampled):
            return "a banned token was sampled"
        if codec.has_vision:
            pads = self.tokens.count(codec.image_token_id)
            need = sum(codec.num_image_tokens(v.image.size) for v in self.views)
            if pads != need:
                return f"{pads} image pads, but the images take {need}"
            if self.tokens != codec.expand(self.engine_ids, [v.image.size for v in self.views]):
                return "the trainer's view is not the engine's, expanded"
        return ""


@dataclass(eq=False)
class _Call:
    function: Callable
    args: tuple
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future
    state: str = "waiting"  # then running, done; or abandoned, when nobody waits any more


class ToolThreads:
    """`num` threads for code of others (tools, rewards) that is not async; a call waits while all of them are busy.

    Daemons: one that hangs does not keep the program from ending, as a ThreadPoolExecutor's would. A thread cannot be
    ended: whoever gives up a running call gets another thread in its place, and the old one goes when its call returns.
    Started at once: a thread that starts waits for Python's lock, and a burst of starts would stop the event loop.
    """

    def __init__(self, num: int):
        self.calls: queue.SimpleQueue = queue.SimpleQueue()
        self.lock = threading.Lock()  # of the calls' states
        for _ in range(num):
            self._start_thread()
        weakref.finalize(self, lambda calls: [calls.put(None) for _ in range(num)], self.calls)

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, args=(self.calls, self.lock), name="tool", daemon=True).start()

    @staticmethod
    def _work(calls: queue.SimpleQueue, lock: threading.Lock) -> None:
        while (call := calls.get()) is not None:
            with lock:
                if call.state == "abandoned":
                    continue
                call.state = "running"
            try:
                outcome, error = call.function(*call.args), None
            except BaseException as e:  # a future takes no StopIteration, and a SystemExit in it would end the run
                ordinary = isinstance(e, Exception) and not isinstance(e, StopIteration)
                outcome, error = None, e if ordinary else RuntimeError(repr(e))
            with lock:
                if call.state == "abandoned":
                    return
                call.state = "done"
            with contextlib.suppress(RuntimeError):  # the loop is closed: the run has ended
                call.loop.call_soon_threadsafe(ToolThreads._deliver, call.future, outcome, error)

    @staticmethod
    def _deliver(future: asyncio.Future, outcome, error) -> None:
        if future.done():
            return  # given up in this very moment
        if error is None:
            future.set_result(outcome)
        else:
            future.set_exception(error)

    async def run(self, function: Callable, *args):
        """What `function(*args)` returns or raises."""
        loop = asyncio.get_running_loop()
        call = _Call(function, args, loop, loop.create_future())
        self.calls.put(call)
        try:
            return await call.future
        except asyncio.CancelledError:
            with self.lock:
                hangs = call.state == "running"
                if call.state != "done":
                    call.state = "abandoned"
            if hangs:
                self._start_thread()
            raise


class Rollout:
    """Everything a trajectory needs, apart from its prompt: engine, codec, image rules, limits, tools and reward.

    `reward` maps a finished trajectory to {"score", parts...}, plain or async; a score of None takes it out of the batch.
    """

    def __init__(
        self,
        engine,
        codec: Codec,
        rules: ImageRules,
        limits: RolloutLimits,
        reward,
        tool_kwargs: dict,
        seed: int,
        max_inflight: int = 1024,
        tool_threads: int = 64,
    ):
        self.engine, self.codec, self.rules, self.limits = engine, codec, rules, limits
        self.reward, self.tool_kwargs, self.seed = reward, tool_kwargs, seed
        self.max_inflight = max_inflight
        # Off the event loop: image work in a few threads, since it computes; tools in many, since they mostly wait.
        self.images = ThreadPoolExecutor(os.cpu_count(), "images")
        self.tool_threads = ToolThreads(tool_threads)

    # ------------------------------------------------------------------------------------------------ prompts
    def prepare(self, sample: Sample) -> Prompt:
        """Decodes the images, makes their views and tokenises: once per group. Raises DataError naming the row."""
        originals = [decode_image(data, sample.where) for data in sample.images]
        if originals and not self.codec.has_vision:
            raise DataError(f"{sample.where}: the row has images, but the model has no vision tower")
        if len(originals) > self.limits.max_images:
            raise DataError(f"{sample.where}: {len(originals)} images, max_images is {self.limits.max_images}")
        try:
            views = [View.of(self.rules.make_view(i)) for i in originals]
        except ValueError as e:
            raise DataError(f"{sample.where}: {e}") from None
        engine_ids = self.codec.encode_prompt(sample.prompt)
        tokens = self.codec.expand(engine_ids, [v.image.size for v in views])
        if len(tokens) > self.limits.max_prompt_len:
            most = self.limits.max_prompt_len
            raise DataError(
                f"{sample.where}: the prompt has {len(tokens)} tokens with its images, max_prompt_len is {most}"
            )
        return Prompt(engine_ids, tokens, views, sample, originals)

    # ------------------------------------------------------------------------------------------------ groups
    async def run(
        self,
        samples: Sequence[Sample],
        group_size: int,
        temperature: float,
        *,
        take: Callable[[], int],
        first_group: int = 0,
        on_end: Callable[[Trajectory], None] | None = None,
        heartbeat: Callable[[str], None] | None = None,
    ) -> list[Trajectory]:
        """The trajectories of those groups that this rank took, in order. Nothing waits for anything but its own turn.

        `samples` are the step's prompts, the same on every rank; a rank reads those that it takes. `take()` gives the number
        of the next one to whichever rank asks, each number once (`dist.take`); a rank asks while it has fewer than
        `max_inflight` trajectories running, so that a rank with short trajectories takes more groups. Seeds depend on the
        group's number and the member's alone: a group's trajectories do not depend on who rolls them out. `on_end` hears
        of each that ends, `heartbeat` every half minute of what the trajectories are doing; as often the engine is asked
        whether it lives.
        """
        loop = asyncio.get_running_loop()
        room = asyncio.Condition()
        running, started = 0, []

        async def beat() -> None:
            while True:
                await asyncio.sleep(HEARTBEAT_SECONDS)
                if heartbeat:
                    states = Counter(t.state for t in started)
                    heartbeat("trajectories: " + ", ".join(f"{n} {state}" for state, n in sorted(states.items())))
                await self.engine.check()

        def has_room() -> bool:
            return running + group_size <= max(self.max_inflight, group_size)

        async def member(prompt: Prompt, number: int, k: int) -> Trajectory:
            nonlocal running
            t = Trajectory.start(prompt, number)
            started.append(t)
            await self.one(t, prompt, self.seed + number * group_size + k, temperature)
            running -= 1
            async with room:
                room.notify()
            if on_end:
                on_end(t)
            return t

        async def group(number: int, sample: Sample) -> list[Trajectory]:
            prompt = await loop.run_in_executor(self.images, self.prepare, sample)
            return await asyncio.gather(*(member(prompt, number, k) for k in range(group_size)))

        groups = []
        try:
            async with asyncio.TaskGroup() as tasks:
                pulse = tasks.create_task(beat())
                while (i := take()) < len(samples):
                    running += group_size  # a whole group starts at once: its members share images and prefix
                    sample = await loop.run_in_executor(self.images, samples.__getitem__, i)  # reads it from disk
                    groups.append(tasks.create_task(group(first_group + i, sample)))
                    async with room:
                        await room.wait_for(has_room)
                await asyncio.gather(*groups)
                pulse.cancel()
        except BaseExceptionGroup as e:  # the first failure has cancelled the other groups: it alone is the news
            cause: BaseException = e
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            raise cause from None
        return [t for g in groups for t in g.result()]

    async def one(self, t: Trajectory, prompt: Prompt, seed: int, temperature: float) -> None:
        """Rolls out one trajectory and rewards it."""
        try:
            async with asyncio.timeout(self.limits.trajectory_timeout):
                t.finish_reason = await self._turns(t, prompt, seed, temperature)
        except TimeoutError:
            t.finish_reason = "timeout"
        except InvariantError as e:
            t.why_invalid = str(e)
        t.why_invalid = t.why_invalid or t.check(self.codec)
        if not t.why_invalid:
            t.state = "in reward"
            await self._reward(t)
        if t.why_invalid:
            t.finish_reason, t.reward_parts = "invalid", {"score": None}
        t.state = "done"

    async def _reward(self, t: Trajectory) -> None:
        """Adds the score to the last token, which is a sampled one. A reward that raises is no reward, and no zero."""
        try:
            async with asyncio.timeout(self.limits.trajectory_timeout):
                parts = await self.tool_threads.run(self.reward, t)
                t.reward_parts = dict(await parts if inspect.isawaitable(parts) else parts)
                score = t.reward_parts["score"]
                if score is not None:
                    if not math.isfinite(score):
                        raise ValueError(f"the score is {score}")
                    t.rewards[-1] += score
        except Exception as e:  # anyone's code, as a tool is
            t.why_invalid = f"reward: {_in_words(e, self.limits.trajectory_timeout)}"

    async def _make_tool(self, prompt: Prompt) -> ToolBase | None:
        """The trajectory's own tool, reset; None for a row without `env_name`."""
        name = prompt.sample.env_name
        if not name:
            return None

        def make() -> ToolBase:
            tool = ToolBase.create(name, **self.tool_kwargs.get(name, {}))
            views = {"image": [v.image for v in prompt.views]}
            tool.reset(prompt.sample.prompt, views, {"image": prompt.originals})
            return tool

        try:
            async with asyncio.timeout(self.limits.tool_timeout):
                return await self.tool_threads.run(make)
        except Exception as e:  # there is no turn yet that could tell the policy
            raise InvariantError(f"{name} cannot start: {_in_words(e, self.limits.tool_timeout)}") from None

    async def _turns(self, t: Trajectory, prompt: Prompt, seed: int, temperature: float) -> str:
        """Appends turns to `t` until something ends it; returns the finish reason."""
        limits, errors, known = self.limits, 0, []
        observation = Piece([], [], [])
        tool = await self._make_tool(prompt)
        for turn in range(limits.max_turns):
            room = limits.max_response_len - t.response_len - len(observation.tokens)
            if room < 1 or len(t.views) + len(observation.views) > limits.max_images:
                return "obs_overflow" if turn else "length"
            # The observation joins the trajectory together with the turn that answers it, whatever happens in between:
            # a trajectory never ends on an observation.
            t.state = "generating"
            g = await self.engine.generate(
                t.engine_ids + observation.engine_ids,
                t.views + observation.views,
                max_tokens=min(limits.max_turn_len, room),
                temperature=temperature,
                seed=seed + (turn << 32),
            )
            t.append_observation(observation)
            # What the engine saw is what will be trained on, and nothing that it saw before has changed.
            if g.prompt_ids != t.tokens:
                raise InvariantError("the engine expanded the prompt to other tokens than the trainer's view")
            if g.prompt_ids[: len(known)] != known:
                raise InvariantError("the tokens of a turn are no prefix of the next turn's")
            known = g.prompt_ids + g.ids
            t.append_sampled(g.ids, g.logprobs, g.version)
            t.turn_texts.append(self.codec.decode(g.ids))
            if not g.stopped:
                return "length"
            if tool is None:
                return "stop"
            t.state = "in a tool"
            observation, reward, done, info = await self.execute_tool(tool, t.turn_texts[-1], g.ids[-1])
            t.rewards[-1] += reward
            if "call" in info:
                t.calls.append({"ok": True} | info | {"turn": turn, "num_images": len(observation.views)})
                errors = 0 if t.calls[-1]["ok"] else errors + 1
            if done:
                return info.get("finish_reason", "answer")
            if errors >= limits.max_tool_errors:
                return "tool_error_limit"
            if turn == limits.max_turns - 1:
                return "max_turns"
        raise AssertionError("unreachable: the last turn returns")

    async def execute_tool(self, tool: ToolBase, text: str, last_id: int) -> tuple[Piece, float, bool, dict]:
        """One tool call under its time limit, its observation rendered. Whatever goes wrong, the policy reads it."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.limits.tool_timeout):
                if inspect.iscoroutinefunction(tool.execute):
                    raw, reward, done, info = await tool.execute(text)
                else:
                    raw, reward, done, info = await self.tool_threads.run(tool.execute, text)
            observation, reward, info = Observation.parse(raw), float(reward), dict(info or {})
            if not math.isfinite(reward):
                raise ToolError(f"the tool's reward is {reward}")
            piece = await loop.run_in_executor(self.images, self.render, observation, last_id)
            return piece, reward, bool(done), info
        except (asyncio.CancelledError, SystemExit) as e:
            if asyncio.current_task().cancelling():
                raise  # it is the trajectory that is cancelled, not something within the tool
            message = repr(e)
        except Exception as e:  # a tool is anyone's code: its failure is counted and shown to the policy
            message = _in_words(e, self.limits.tool_timeout)
        piece = await loop.run_in_executor(self.images, self.render, error_observation(message), last_id)
        return piece, 0.0, False, {"call": tool.name, "ok": False, "error": message}

    def render(self, observation: Observation, last_id: int) -> Piece:
        """What follows `last_id`, as tokens and views. Runs in a thread."""
        views = [View.of(self.rules.make_view(i)) for i in observation.images]
        if isinstance(observation.text, str):
            ids = self.codec.encode_slots(observation.text, tags=True, markers=True)
            opens_turn = observation.text.lstrip().startswith("<|im_start|>")
        else:
            ids = [*self.codec.newline, *self.codec.encode_chat(observation.text, slots=observation.slots)]
            opens_turn = True
        if opens_turn and last_id != self.codec.im_end:  # a stop string ended the turn: it is still open
            ids = [self.codec.im_end, *ids]
        return Piece(ids, self.codec.expand(ids, [v.image.size for v in views]), views)


def _in_words(e: Exception, seconds: float) -> str:
    if isinstance(e, TimeoutError) and not e.args:
        return f"no answer within {seconds:g} seconds"
    return str(e) if isinstance(e, ToolError) else f"{type(e).__name__}: {e}"


def rollout_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """Sums over this rank's trajectories with a reward as {"name": (sum, count)}, to be added over ranks and divided once."""
    sums: dict[str, tuple[float, float]] = {}

    def add(name: str, value) -> None:
        if value is not None:
            s, n = sums.get(name, (0.0, 0))
            sums[name] = (s + float(value), n + 1)

    for t in trajectories:
        for reason in FINISH_REASONS:
            add(f"finish/{reason}", t.finish_reason == reason)
        if t.reward_parts["score"] is None:
            continue
        add("reward/mean", t.reward)
        for part, value in t.reward_parts.items():
            if part != "score":
                add(f"{part}/mean", value)
        executed = [c for c in t.calls if c["ok"] and c["num_images"]]
        add("tool/rate", bool(executed))
        add("tool/calls", len(t.calls))
        add("tool/error_frac", sum(not c["ok"] for c in t.calls) / len(t.calls) if t.calls else None)
        add("reward/with_tool" if executed else "reward/without_tool", t.reward)
        add("turns/mean", len(t.turn_texts))
        add("response_len/mean", t.response_len)
        add("sampled_len/mean", t.num_sampled)
    return sums


def reasons_left(trajectories: list[Trajectory]) -> Counter:
    """Why trajectories leave the batch, counted: those that do not are not in it."""
    why = (t.why_invalid or ("no reward" if t.reward_parts["score"] is None else "") for t in trajectories)
    return Counter(filter(None, why))
