"""The engine: one vLLM `AsyncLLM`, started, fed token ids, given new weights.

The rollout talks to it through `generate` and `check` alone, so that a scripted engine (tests) or a remote one can stand
in. Weights travel through vLLM's weight-transfer interface: its own `ipc` backend on a GPU, and the small `shm` backend
below on CPU, registered the same way and driven by the same four calls.
"""

import asyncio
import contextlib
import ctypes
import math
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch

# vLLM reads its environment at import. Passive waiting: idle OpenMP threads leave the cores to whoever works.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")  # its own business with torch

from pydantic import ValidationError
from vllm import SamplingParams, TokensPrompt
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    ModuleSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from data import Codec, View


class EngineError(Exception):
    """The engine did not start, does not answer or has died; its own words stand above in the terminal."""


@dataclass
class Generation:
    """One turn as the engine sampled it; the stop token, if there is one, is the last id."""

    prompt_ids: list[int]  # what the engine made of the prompt: its images expanded
    ids: list[int]
    logprobs: list[float]  # of the distribution that was sampled from: temperature and bans included
    stopped: bool  # False: the length limit ended it
    version: int  # of the weights that sampled it
    prefilled: int = 0  # prompt tokens that were computed; the others came from the prefix cache


_starting = False


def _die_with_parent() -> None:
    if _starting:  # in a forked engine
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a trainer that is killed leaves no engine behind


os.register_at_fork(after_in_child=_die_with_parent)


def gpu_environment(first: int, num: int) -> dict[str, str]:
    """What an engine's processes inherit on a GPU machine: they see `num` of this process's devices, from `first` on."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(torch.cuda.device_count())] if seen is None else seen.split(",")
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(names[first : first + num]),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked process cannot use CUDA after its parent has
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # CUDA's handles of a weight push are pickled; both ends are ours
    }


class VLLMEngine:
    """An `AsyncLLM` on the devices of `tensor_parallel` neighbouring ranks of a host. The first of them leads: the engine
    is its child and it alone samples; the others (`leads=False`) take part in `push`, where all ranks gather the weights.

    Create it before torch.distributed, whose group forked children would inherit, and before torch has computed anything
    in several threads: a forked child cannot use them and would wait for ever (`threads=1` is safe at any time).
    """

    def __init__(
        self,
        folder: str,
        codec: Codec,
        *,
        max_len: int,
        max_images: int,
        max_num_seqs: int,
        dtype: str = "float32",
        seed: int = 0,
        block_size: int = 32,
        kv_cache_mb: int = 0,
        gpu_frac: float = 0.6,
        tensor_parallel: int = 1,
        first_device: int = 0,  # this host's number of the first of its devices
        leads: bool = True,
        threads: int = 1,
        stop: tuple[str, ...] = (),
        timeout: float = 300.0,  # seconds that an answer to a call other than `generate` may take
    ):
        self.codec, self.stop, self.timeout, self.leads = codec, list(stop), timeout, leads
        self.loop = asyncio.new_event_loop()
        self.version = 0
        self.busy = 0.0  # seconds in which at least one generation was in flight
        self.llm = None
        self._requests = 0
        self._inflight, self._since = 0, 0.0  # generations, and when the first of them began
        self._asleep = False
        self._sender = None
        if not leads:
            return
        on_cpu = not torch.cuda.is_available()
        options = {}
        if codec.has_vision:
            # Views come in their final size: the processor must not resize again. The processor cache makes one image
            # pass preprocessing once per step; prompts of a group share it.
            options = dict(
                limit_mm_per_prompt={"image": max_images, "video": 0},
                mm_processor_kwargs={"do_resize": False},
                mm_processor_cache_gb=0.5,
            )
        if on_cpu:
            # Eager: nothing to compile or warm up, the engine starts in seconds. Whole prompts: a seeded request whose
            # prompt is prefilled in chunks kills the CPU worker ("CPU Generator does not use offset").
            options |= dict(
                enforce_eager=True, enable_chunked_prefill=False, max_num_batched_tokens=max(16384, max_len)
            )
        else:
            options |= dict(gpu_memory_utilization=gpu_frac, enable_sleep_mode=True)
        args = AsyncEngineArgs(
            model=folder,
            dtype=dtype,
            max_model_len=max_len,
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            kv_cache_memory_bytes=kv_cache_mb << 20 or None,
            tensor_parallel_size=tensor_parallel,
            seed=seed,
            logprobs_mode="processed_logprobs",  # after temperature and bans; raw ones would not match what was sampled
            generation_config="vllm",  # the folder's own sampling defaults (top_p, ...) must not leak into training
            weight_transfer_config=WeightTransferConfig(backend="shm" if on_cpu else "ipc"),
            disable_log_stats=True,
            use_tqdm_on_load=False,
            **options,
        )
        before = dict(os.environ)
        if not on_cpu:
            os.environ.update(gpu_environment(first_device, tensor_parallel))
        try:
            config = args.create_engine_config()
        except ValidationError as e:
            raise EngineError(f"vLLM refuses {folder!r}: {e.errors()[0]['msg']}") from None
        if config.model_config.logprobs_mode != "processed_logprobs":
            raise RuntimeError(f"the engine reports {config.model_config.logprobs_mode}, not processed_logprobs")
        if on_cpu:
            # Forked engine processes start in a fifth of the time of spawned ones, and a single worker can live in the
            # engine's own process; vLLM sets both otherwise while it makes the config.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
            if tensor_parallel == 1:
                config.parallel_config.distributed_executor_backend = "uni"

        async def start():
            return AsyncLLM.from_vllm_config(config, disable_log_stats=True)

        global _starting
        own_threads = torch.get_num_threads()
        if on_cpu:
            torch.set_num_threads(threads)  # the forked child inherits it
        try:
            _starting = True
            self.llm = self.loop.run_until_complete(start())
        except RuntimeError as e:
            raise EngineError(f"vLLM did not start on {folder!r}: {e}") from None
        finally:
            _starting = False
        torch.set_num_threads(own_threads)
        for key in ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):  # changed for the engine's processes
            if key in before:
                os.environ[key] = before[key]
            else:
                os.environ.pop(key, None)

    async def generate(
        self, ids: list[int], views: list[View], *, max_tokens: int, temperature: float, seed: int
    ) -> Generation:
        """Samples one turn after `ids` (engine view: one pad per image). Temperature 0 is greedy."""
        pads = ids.count(self.codec.image_token_id) if self.codec.has_vision else 0
        if pads != len(views):  # vLLM would go on silently with wrong positions
            raise ValueError(f"{pads} image pads, but {len(views)} images")
        prompt = TokensPrompt(prompt_token_ids=ids)
        if views:
            prompt["multi_modal_data"] = {"image": [v.image for v in views]}
            prompt["multi_modal_uuids"] = {"image": [v.uuid for v in views]}
        params = self._sampling_params(max_tokens, temperature, seed)
        self._requests += 1
        with self._counted():
            async for final in self.llm.generate(prompt, params, str(self._requests)):
                out = final.outputs[0]
        if out.finish_reason not in ("stop", "length"):
            raise EngineError(f"the engine ended a generation with {out.finish_reason!r}")
        return Generation(
            list(final.prompt_token_ids),
            list(out.token_ids),
            list(out.logprobs.logprobs),
            out.finish_reason == "stop",
            self.version,
            len(final.prompt_token_ids) - final.num_cached_tokens,
        )

    @contextlib.contextmanager
    def _counted(self):
        if self._inflight == 0:
            self._since = time.perf_counter()
        self._inflight += 1
        try:
            yield
        finally:
            self._inflight -= 1
            if self._inflight == 0:
                self.busy += time.perf_counter() - self._since

    async def check(self) -> None:
        """Raises EngineError if the engine's loop has stopped: it answers small questions between two of its steps."""
        await self._answer(self.llm.is_sleeping())

    async def _answer(self, call):
        try:
            return await asyncio.wait_for(call, self.timeout)
        except TimeoutError:
            raise EngineError(f"the vLLM engine has not answered for {self.timeout:g} seconds: it is stuck") from None

    def _sampling_params(self, max_tokens: int, temperature: float, seed: int) -> SamplingParams:
        """top_p 1 and top_k off, vLLM's defaults: the logprobs are those of the full distribution, bans apart."""
        return SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=max_tokens,
            logprobs=0,  # the sampled token's alone
            flat_logprobs=True,
            stop_token_ids=self.codec.stop_ids,
            stop=self.stop or None,
            include_stop_str_in_output=True,
            detokenize=bool(self.stop),
            logit_bias={i: -100.0 for i in self.codec.banned_ids} or None,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

    def run(self, coroutine):
        """Runs a coroutine on the engine's event loop from the training thread."""
        try:
            return self.loop.run_until_complete(coroutine)
        except EngineDeadError:
            raise EngineError("the vLLM engine has died; its own words stand above") from None

    # ------------------------------------------------------------------------------------------------ weights
    def sleep(self) -> None:
        """Leaves the device's memory to the update: weights and KV cache are dropped. The next push wakes the engine.

        On CPU vLLM stops scheduling and keeps its memory.
        """
        if self.leads:
            self.run(self._answer(self.llm.sleep(level=2)))
            self._asleep = True

    def _wake(self, part: str) -> None:
        """Leaves memory that torch only keeps in reserve to the engine, on all its devices, and wakes a part of it."""
        torch.cuda.empty_cache()
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        if self._asleep:
            self.run(self._answer(self.llm.wake_up([part])))

    def push(self, module, version: int) -> None:
        """Streams all that `module.named_parameters()` gives (Hugging Face names) into the engine and resets its caches.

        With several ranks all of them call this together: gathering a sharded parameter is a collective.
        """
        source = ModuleSource(module)
        if self._sender is None:
            if torch.cuda.is_available():
                from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

                # Its buffer, 1 GB, must hold the largest parameter, which in float32 may be more.
                sizes = [m.dtype.itemsize * math.prod(m.shape) for m in source.metadata()]
                options = {"packed": True, "packed_buffer_size_bytes": max(1 << 30, *sizes)}
                kind = IPCTrainerInitInfo
            else:
                kind, options = ShmTrainerInitInfo, {}
            info = kind(rank=0 if self.leads else 1, **options)  # rank 0 sends: each leader, to its own engine
            self._sender = WeightTransferTrainerFactory.trainer_init(info, client=self, source=source)
        self._sender.source = source
        self.version = version
        # Room for the weights first, the weights, and then, when the trainer's copies are gone, for the KV cache.
        self._wake("weights")
        self._sender.send_weights()
        self._wake("kv_cache")
        self._asleep = False
        if self.leads:
            self.run(self._reset_caches())

    async def _reset_caches(self) -> None:
        # All three: keys and values, image features and processed images computed with the old weights are wrong now.
        if not await self._answer(self.llm.reset_prefix_cache()):
            raise RuntimeError("the engine refused to reset its prefix cache: requests are still running")
        if self.codec.has_vision:
            await self._answer(self.llm.reset_mm_cache())
            await self._answer(self.llm.reset_encoder_cache())

    # vLLM's VLLMWeightSyncClient protocol: what a sender needs of its engine.
    def init_weight_transfer_engine(self, init_info: dict) -> None:
        self.run(self._answer(self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))))

    def start_weight_update(self) -> None:
        self.run(self._answer(self.llm.start_weight_update()))

    def update_weights(self, update_info) -> None:
        self.run(self._answer(self.llm.update_weights(WeightTransferUpdateRequest(update_info=update_info))))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.run(self._answer(self.llm.finish_weight_update(str(self.version))))

    def close(self) -> None:
        """Stops the engine's processes; safe to call twice."""
        if self.llm is not None:
            self.llm.shutdown()
            self.llm = None
        if not self.loop.is_closed():
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))  # lets them end
            self.loop.close()


# ---------------------------------------------------------------------------------------------------- the shm backend
@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    path: str  # a file in shared memory, mapped by both sides
    num_params: int  # that one whole update brings


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """One bucket: where each parameter lies in the file."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]


@dataclass
class ShmTrainerInitInfo(TrainerInitInfo):
    backend: ClassVar[str] = "shm"
    bucket_bytes: int = 256 << 20  # bound on the memory that a push takes, unless one parameter is larger


class ShmWeightReceiver(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Engine side: copies parameters out of the shared file. A parameter not sent, or not taken, is an error."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        self.info = init_info
        # A push replaces every packed matrix by one of the same size. Blocks given back to the system in between return
        # as fresh pages, whose faults take longer than all the rest of a push: from now on the heap keeps them.
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: never
        # Mapped once: mapping it anew for each bucket would mean a page fault for every 4 KB of it, each time.
        self.memory = torch.UntypedStorage.from_file(init_info.path, True, os.path.getsize(init_info.path))

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.wanted = {name for name, _ in self.model.named_parameters()}
        self.received: set[str] = set()
        self.taken: set[str] = set()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for name, dtype, shape, offset in zip(
                update_info.names, update_info.dtypes, update_info.shapes, update_info.offsets, strict=True
            ):
                self.received.add(name)
                view = torch.empty(0, dtype=getattr(torch, dtype))
                yield name, view.set_(self.memory, offset // view.element_size(), shape)

        self.taken |= self.model.load_weights(weights())
        self._keep_unfinished_layers()

    def _keep_unfinished_layers(self) -> None:
        """The next bucket overwrites the memory: copies what the reload still holds of it, for layers not whole yet."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for layer in self.model.modules():
            for _, call in get_layerwise_info(layer).loaded_weights:
                for key, value in call.arguments.items():
                    if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == self.memory.data_ptr():
                        call.arguments[key] = value.clone()

    def finish_weight_update(self) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        missing = self.wanted - self.taken
        for name, layer in self.model.named_modules():
            # The engine holds q, k and v as one parameter, gate and up as well; vLLM fills what was not sent of it with
            # anything, without a word. (An embedding is padded with rows that nobody sends.)
            info = get_layerwise_info(layer)
            partly = 0 < info.load_numel < (info.load_numel_total or 0) and not isinstance(
                layer, VocabParallelEmbedding
            )
            if partly and not any(m.startswith(f"{name}.") for m in missing):
                missing.add(f"a part of {name}")
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self.model.modules():
            # vLLM's CPU matmul keeps a packed copy of an output head. A tied head gets no weights of its own, and its
            # copy would stay that of the old embedding.
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)
        if len(self.received) != self.info.num_params:
            raise RuntimeError(
                f"weight push: {len(self.received)} parameters came, {self.info.num_params} were announced"
            )
        if missing:
            raise RuntimeError(
                f"weight push: {len(missing)} of the engine's parameters were not sent, such as {sorted(missing)[:3]}"
            )

    def shutdown(self) -> None:
        pass


class ShmWeightSender(TrainerWeightTransferEngine[ShmTrainerInitInfo]):
    """Trainer side: parameters go into a file in shared memory, bucket by bucket, then one call per bucket.

    Ranks that are no sender only help to gather the parameters.
    """

    init_info_cls = ShmTrainerInitInfo

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        sender = cls(client=client, source=source, is_sender=init_info.is_sender)
        meta = source.metadata()  # on all ranks: with LoRA it gathers
        if not sender.is_sender:
            return sender
        sizes = [_aligned(m.dtype.itemsize * torch.Size(m.shape).numel()) for m in meta]
        sender.capacity = max(min(sum(sizes), init_info.bucket_bytes), max(sizes))
        in_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        # Both sides map the file at once, and it has no name any more: a run that is killed leaves nothing behind.
        with tempfile.NamedTemporaryFile(prefix="nanoeyes-", dir=in_memory) as file:
            os.truncate(file.name, sender.capacity)
            sender.memory = torch.UntypedStorage.from_file(file.name, True, sender.capacity)
            client.init_weight_transfer_engine(asdict(ShmInitInfo(file.name, len(meta))))
        return sender

    def send_weights(self) -> None:
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        self.client.start_weight_update()
        bucket, used = ShmUpdateInfo([], [], [], []), 0
        for name, tensor in self.source:  # gathers shards: the same order on every rank
            size = _aligned(tensor.nbytes)
            if used + size > self.capacity:
                self.client.update_weights(asdict(bucket))
                bucket, used = ShmUpdateInfo([], [], [], []), 0
            target = torch.empty(0, dtype=tensor.dtype)
            target.set_(self.memory, used // target.element_size(), tensor.shape)
            target.copy_(tensor.detach())
            bucket.names.append(name)
            bucket.dtypes.append(str(tensor.dtype).removeprefix("torch."))
            bucket.shapes.append(list(tensor.shape))
            bucket.offsets.append(used)
            used += size
        self.client.update_weights(asdict(bucket))
        self.client.finish_weight_update()


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


WeightTransferEngineFactory.register_engine("shm", "engine", "ShmWeightReceiver")
WeightTransferTrainerFactory.register_engine("shm", "engine", "ShmWeightSender")
