"""Start-up of several ranks and the few collectives; on one process each of them does nothing."""

import datetime
import os
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import torch
import torch.distributed as torch_dist

# Read once, at import: vLLM overwrites LOCAL_WORLD_SIZE while it starts.
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
LOCAL_WORLD_SIZE = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
IS_MAIN = RANK == 0

_store: torch_dist.Store | None = None  # of the shared counters
_counters: dict[str, int] = {}  # the same on one process
_seconds = 1800.0  # that a rank waits for the others


def init(seconds: float = _seconds) -> None:
    """Joins the ranks that torchrun started, each of which then waits at most so many seconds for the others.

    Call it after the engine exists: its forked children must not inherit the group.
    """
    global _store, _seconds
    _seconds = seconds
    if WORLD_SIZE > 1:
        _store = _bounded(_join)


def _join() -> torch_dist.Store:
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's agent holds the store, or rank 0
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = datetime.timedelta(seconds=_seconds)
    store = torch_dist.TCPStore(*address, WORLD_SIZE, is_master=IS_MAIN and not agents, timeout=timeout)
    # The agent's store outlives a restart of the ranks: what an earlier try has left in it must not be met again.
    store = torch_dist.PrefixStore(f"try {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    torch_dist.init_process_group(_backend(), store=store, rank=RANK, world_size=WORLD_SIZE, timeout=timeout)
    return torch_dist.PrefixStore("counters", store)


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _bounded(call: Callable):
    """`call()`, given up after the seconds that a rank waits for the others.

    A TCP store that gets no answer because the link is cut waits for ever, whatever its own timeout. The thread that is
    left behind is a daemon: it does not keep the process.
    """
    future: Future = Future()

    def answer() -> None:
        try:
            future.set_result(call())
        except Exception as e:  # the caller's, who waits for it
            future.set_exception(e)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    thread.join(_seconds)
    if not future.done():
        raise torch_dist.DistStoreError(f"the ranks' store has not answered for {_seconds:g} seconds")
    return future.result()


def is_gone(error: BaseException) -> bool:
    """Whether an error says that another rank, or the way to it, is gone. gloo has no class for that, only its words."""
    # The first error names gloo's source file; what is called after it, how the connection ended.
    words = ("gloo", "Application timeout caused pair closure")
    known = isinstance(error, RuntimeError) and any(w in str(error) for w in words)
    return known or isinstance(error, torch_dist.DistError)


def init_alone() -> None:
    """A group of one process, for what works on groups alone (FSDP2 with offload)."""
    if not torch_dist.is_initialized():
        torch_dist.init_process_group(_backend(), store=torch_dist.HashStore(), rank=0, world_size=1)


def take(counter: str) -> int:
    """The next number of a counter that all ranks share: 0, 1, 2, ... each given out once."""
    if _store is not None:
        return _bounded(lambda: _store.add(counter, 1)) - 1
    _counters[counter] = _counters.get(counter, -1) + 1
    return _counters[counter]


def tell(event: str) -> None:
    """Ends `wait(event)` on all ranks, for good."""
    if _store is not None:
        _bounded(lambda: _store.set(event, "1"))


def wait(event: str) -> None:
    """Until some rank tells of the event, however long that takes; each question must be answered in time."""
    while not _bounded(lambda: _store.check([event])):
        time.sleep(0.2)


def first_of(num: int) -> int:
    """The first of the `num` neighbouring ranks to which this one belongs: 0, num, 2 x num, ..."""
    return RANK - RANK % num


def finish() -> None:
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()


def gather(value) -> list:
    """Everyone's value (anything that pickles), in rank order, on every rank."""
    if WORLD_SIZE == 1:
        return [value]
    values = [None] * WORLD_SIZE
    torch_dist.all_gather_object(values, value)
    return values


def exchange(outgoing: list[list], at_a_time: int = 32) -> list:
    """`outgoing[r]` goes to rank r; returns what all ranks had for this one, in rank order. Anything that pickles.

    In messages of a few items, so that never all of them are in memory a second and third time. What shares an object
    within one message (the images of a group) still shares it after it. What a rank keeps for itself is not copied.
    """
    if WORLD_SIZE == 1:
        return outgoing[0]
    parts: list[list] = [[] for _ in outgoing]
    parts[RANK] = outgoing[RANK]
    longest = max(len(items) for rank, items in enumerate(outgoing) if rank != RANK)
    for first in range(0, int(largest(longest)), at_a_time):
        sent, sizes = bytearray(), []
        for rank, items in enumerate(outgoing):
            message = b"" if rank == RANK else pickle.dumps(items[first : first + at_a_time])
            sent += message
            sizes.append(len(message))
        incoming = [s[RANK] for s in gather(sizes)]
        received = torch.empty(sum(incoming), dtype=torch.uint8)
        torch_dist.all_to_all_single(received, torch.frombuffer(sent, dtype=torch.uint8), incoming, sizes)
        del sent
        for rank, message in enumerate(received.split(incoming)):
            if rank != RANK:
                parts[rank] += pickle.loads(message.numpy())
    return [item for part in parts for item in part]


def total(value: float) -> float:
    """Sum over ranks."""
    return sum(gather(value))


def largest(value: float) -> float:
    """Maximum over ranks."""
    return max(gather(value))


def merge_means(sums: dict[str, tuple[float, float]]) -> dict[str, float]:
    """{"name": (sum, count)} of every rank -> {"name": mean}: added over ranks first, divided once."""
    merged: dict[str, tuple[float, float]] = {}
    for part in gather(sums):
        for name, (s, n) in part.items():
            before = merged.get(name, (0.0, 0.0))
            merged[name] = (before[0] + s, before[1] + n)
    return {name: s / n for name, (s, n) in merged.items() if n}
