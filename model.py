"""Policy and critic under accelerate: their forward passes, LoRA, the weights for the engine, loading and saving."""

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin, init_empty_weights
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import is_flash_attn_2_available
from transformers.utils import logging as transformers_logging

import dist
from data import DataError, MicroBatch
from losses import token_logprobs, token_values

transformers_logging.disable_progress_bar()  # one bar per loaded or saved folder would tear the run's own display


# ---------------------------------------------------------------------------------------------------- CPU fast paths
def _varlen_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    is_causal=None,
    sliding_window=None,
    cu_seq_lens_q=None,
    **_,
):
    """Attention within the segments of one packed row, (1, H, T, D) -> (1, T, H, D): images, or trajectories.

    Costs the sum of the squared lengths; sdpa with transformers' mask costs T x T, and is called once per image. A run
    of neighbours of equal length is one batch.
    """
    if cu_seq_lens_q is None or sliding_window is not None:
        raise NotImplementedError("the packed attention needs segment bounds (see Policy.hidden) and no sliding window")
    lengths = cu_seq_lens_q.diff().tolist()
    runs = [(n, len(list(same)) * n) for n, same in itertools.groupby(lengths)]  # (length of each, tokens of all)
    pieces = zip(*(x.split([total for _, total in runs], 2) for x in (query, key, value)), strict=True)
    out = []
    for (n, _), qkv in zip(runs, pieces, strict=True):
        q, k, v = (x[0].unflatten(1, (-1, n)).transpose(0, 1) for x in qkv)  # (segments, H, n, D)
        causal = module.is_causal if is_causal is None else is_causal
        gqa = q.shape[1] != k.shape[1]
        o = F.scaled_dot_product_attention(q, k, v, scale=scaling, is_causal=causal, enable_gqa=gqa)
        out.append(o.transpose(1, 2).flatten(0, 1))  # (tokens, H, D)
    return torch.cat(out)[None], None


# One function under two names: vision towers hand the bounds of images to functions whose name contains "flash", and to
# no other; for a whole model such a name stands for a package to be imported.
AttentionInterface.register("cpu_varlen", _varlen_attention)
AttentionInterface.register("cpu_flash_varlen", _varlen_attention)


def _linear_patch_embed(patch_embed: nn.Module) -> None:
    """The patch embedding as a matmul: its Conv3d has one output position per patch, and is much slower on CPU."""
    proj = patch_embed.proj
    patch_embed.forward = lambda x: F.linear(x.flatten(1).to(proj.weight.dtype), proj.weight.flatten(1), proj.bias)


def use_cpu_fast_paths(lm: nn.Module) -> None:
    """Same mathematics, faster without a GPU (tests/test_model.py compares)."""
    parts = {"": "cpu_varlen", "text_config": "cpu_varlen", "vision_config": "cpu_flash_varlen"}
    lm.set_attn_implementation(parts)
    if hasattr(lm.config, "vision_config"):
        _linear_patch_embed(lm.model.visual.patch_embed)


def load_lm(folder: str, dtype: torch.dtype, *, weights: bool = True) -> nn.Module:
    """The model of a Hugging Face folder, ready to train; on a machine without a GPU with the fast paths above.

    Without `weights` its parameters have no values yet, and take no memory until they get some.
    """
    attention = "flash_attention_2" if is_flash_attn_2_available() else "sdpa"
    try:
        config = AutoConfig.from_pretrained(folder)
        auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        if weights:
            lm = auto.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
        else:
            with init_empty_weights(include_buffers=False):  # on the meta device
                lm = auto.from_config(config, dtype=dtype, attn_implementation=attention).eval()
            for module in lm.modules():
                for name, p in module._parameters.items():
                    if p is not None:
                        module._parameters[name] = nn.Parameter(torch.empty_like(p, device="cpu"))
            lm.tie_weights()
    except (OSError, ValueError) as e:
        raise DataError(f"model folder {folder!r}: {str(e).splitlines()[0]}") from None
    if not torch.cuda.is_available():
        use_cpu_fast_paths(lm)
    return lm


def checkpoint_layers(lm: nn.Module) -> None:
    """Gradient checkpointing: the backward pass computes the insides of decoder layers and vision blocks once more.

    transformers does so in training mode alone, and a loaded model is in evaluation mode. Only the layers themselves
    change it: what is inside them, dropout too, stays as it was, or engine and trainer would compute different things.
    """
    lm.gradient_checkpointing_enable({"use_reentrant": False})
    for m in lm.modules():
        if isinstance(m, GradientCheckpointingLayer):
            m.training = True


# ---------------------------------------------------------------------------------------------------- LoRA
def add_lora(lm: nn.Module, rank: int, alpha: float) -> None:
    """Freezes the model and puts a low-rank adapter beside every projection of its decoder layers (LoRA, arXiv:2106.09685).

    In place, through peft: the names of all other parameters stay. A fresh adapter changes nothing (B is 0).
    """
    projections = r".*\blayers\.\d+\..*_proj"  # the vision tower's blocks are not called layers
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules=projections), lm)


class MergedWeights:
    """The weights under the names that they have without adapters, each adapter added to its own: for the engine and for
    saving. With several ranks all of them walk through it together: gathering is a collective.
    """

    def __init__(self, lm: nn.Module, device: torch.device):
        self.lm, self.device = lm, device

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, p in self.lm.named_parameters():
            if ".lora_" in name:
                continue
            p = p.detach().to(self.device)  # with offload it lives on the host
            if ".base_layer." not in name:
                yield name, p
                continue
            path, _, kind = name.rpartition(".base_layer.")
            if kind == "weight":
                layer = self.lm.get_submodule(path)
                a, b = (_whole(m["default"].weight.to(self.device)) for m in (layer.lora_A, layer.lora_B))
                p = _whole(p) + layer.scaling["default"] * (b @ a)
            yield f"{path}.{kind}", p


def _whole(p: torch.Tensor) -> torch.Tensor:
    p = p.detach()
    return p.full_tensor() if isinstance(p, DTensor) else p


# ---------------------------------------------------------------------------------------------------- policy and critic
def hidden_states(backbone: nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Last hidden states of a packed row, (1, T, H). Each distinct image passes the vision tower once."""
    images, unused = {}, 0.0
    if batch.views and batch.pixel_values is None:
        raise ValueError("the micro-batch shows images, but their pixels are not made: see data.load_pixels")
    if batch.pixel_values is not None:
        features = backbone.get_image_features(batch.pixel_values, batch.image_grid_thw)
        layers = [features.pooler_output, *getattr(features, "deepstack_features", [])]  # layer -> image -> (n, H)
        # A blank image (data.add_blank_image), which no token shows, takes part all the same.
        unused = 0 * sum(f.sum() for layer in layers for f in layer)
        if len(batch.image_index):
            shown = [tuple(layer[i] for i in batch.image_index.tolist()) for layer in layers]
            features.pooler_output = shown[0]
            if len(shown) > 1:  # Qwen3-VL
                features.deepstack_features = shown[1:]
            images["mm_encoder_outputs"] = {"image": features}
    # The segments are told twice: by bounds, for our attention on CPU and for flash attention, and by positions that
    # restart, from which transformers makes a mask for sdpa. It does so only without a mask and without a cache.
    longest = max(batch.lengths)
    hidden = backbone(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=None,
        use_cache=False,
        cu_seq_lens_q=batch.cu_seqlens,
        cu_seq_lens_k=batch.cu_seqlens,
        max_length_q=longest,
        max_length_k=longest,
        **images,
    ).last_hidden_state
    return hidden + unused


class Policy(nn.Module):
    """A Hugging Face model whose forward gives the log-probabilities of a micro-batch's response tokens.

    One root module: under FSDP every parameter must be reached through the root's forward.
    """

    def __init__(self, lm: nn.Module, banned_ids: list[int]):
        super().__init__()
        self.lm = lm
        self.register_buffer("banned", torch.tensor(banned_ids, dtype=torch.long), persistent=False)

    def forward(self, batch: MicroBatch, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """(logprobs, entropy), each (1, T), aligned with the tokens; see `losses.token_logprobs`."""
        hidden, head = hidden_states(self.lm.model, batch), self.lm.get_output_embeddings().weight
        return token_logprobs(
            hidden, batch.input_ids, batch.response_mask, head, temperature=temperature, banned=self.banned
        )

    def weights(self) -> MergedWeights:
        """What the engine takes and `save_hf` writes."""
        return MergedWeights(self.lm, self.banned.device)

    @contextlib.contextmanager
    def without_lora(self):
        """The weights as they were before training."""
        adapted = [m for m in self.lm.modules() if isinstance(m, BaseTunerLayer)]
        for m in adapted:
            m.enable_adapters(False)
        try:
            yield
        finally:
            for m in adapted:
                m.enable_adapters(True)


class Critic(nn.Module):
    """The same backbone with a value head, which starts at 0."""

    def __init__(self, lm: nn.Module):
        super().__init__()
        self.backbone = lm.model
        self.head = nn.Linear(lm.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Values of the sampled tokens, (1, T), aligned with the tokens; see `losses.token_values`."""
        return token_values(hidden_states(self.backbone, batch), batch.response_mask, self.head)


# ---------------------------------------------------------------------------------------------------- accelerate
def make_accelerator(lm: nn.Module, *, world_size: int, dtype: torch.dtype, offload: bool = False) -> Accelerator:
    """Plain on one process, FSDP2 on several, on GPUs as on CPUs.

    Master weights stay float32; compute runs in `dtype`, gradients are reduced in float32. The decoder layers and vision
    blocks of `lm` are the units of sharding, the rest (embeddings, heads) belongs to the root. With `offload` parameters,
    gradients and optimizer states live on the host, where the optimizer then runs; FSDP2 brings each unit to the device
    when it is due, on one process as well.
    """
    on_cpu = not torch.cuda.is_available()
    if world_size == 1 and offload:
        dist.init_alone()
    elif world_size == 1:
        accelerator = Accelerator(cpu=on_cpu, mixed_precision="bf16" if dtype == torch.bfloat16 else "no")
        # Under torchrun accelerate would wrap even one process, in DDP.
        PartialState._shared_state["distributed_type"] = accelerator.state.distributed_type = DistributedType.NO
        return accelerator
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=sorted(lm._no_split_modules),
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        cpu_offload=CPUOffloadPolicy(pin_memory=not on_cpu) if offload else False,
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=on_cpu, fsdp_plugin=plugin)
    if on_cpu or world_size == 1:  # accelerate takes FSDP for a matter of several GPUs and would go without, silently
        PartialState._shared_state["distributed_type"] = accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    if accelerator.num_processes != world_size:
        raise RuntimeError(f"accelerate runs {accelerator.num_processes} processes, torchrun started {world_size}")
    return accelerator


def shard(accelerator: Accelerator, module: nn.Module, optimizer: torch.optim.Optimizer):
    """(module, optimizer), ready to train; with several ranks every parameter is sharded over them.

    All ranks get the first one's values: it alone has loaded any, and a host holds one whole model, not one per rank.
    """
    whole = {name: p.detach() for name, p in module.named_parameters()} if accelerator.is_main_process else {}
    module, optimizer = accelerator.prepare(module, optimizer)
    if accelerator.distributed_type != DistributedType.FSDP:
        return module, optimizer
    for name, p in module.named_parameters():
        if not isinstance(p, DTensor):
            raise RuntimeError(f"{name} is not sharded: FSDP2 did not take effect")
        value = whole.pop(name) if whole else torch.empty(p.shape, dtype=p.dtype)
        shares = distribute_tensor(value.to(p.device_mesh.device_type), p.device_mesh, p.placements)  # from rank 0
        p.detach().to_local().copy_(shares.to_local())
    return module, optimizer


def clip_grad_norm(module: nn.Module, max_norm: float) -> float:
    """Clips the gradient to `max_norm` (0 = no clipping) and returns its global norm before that."""
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm or float("inf"))
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def save_hf(policy: Policy, accelerator: Accelerator, source: str, folder: str) -> None:
    """Writes a Hugging Face folder that transformers and vLLM load. All ranks call it; the first one writes.

    Everything but the weights is copied from `source`, the folder the policy came from.
    """
    full = {}
    for name, p in policy.weights().named_parameters():  # one whole parameter on the device at a time
        whole = _whole(p)
        if accelerator.is_main_process:
            full[name] = whole.cpu().contiguous()
    if accelerator.is_main_process:
        tmp = f"{folder}.tmp"
        shutil.rmtree(tmp, ignore_errors=True)
        os.makedirs(tmp)
        for name in os.listdir(source):
            if os.path.isfile(os.path.join(source, name)) and not name.endswith(
                (".safetensors", ".bin", ".index.json")
            ):
                shutil.copy(os.path.join(source, name), tmp)
        policy.lm.save_pretrained(tmp, state_dict=full)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(tmp, folder)
