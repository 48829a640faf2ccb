"""Tiny random models of every family, with complete folders: the toy's tokenizer, the family's own config and processor.

Two query heads share a key-value head; windows (Qwen2.5-VL) are smaller than the images; DeepStack (Qwen3-VL) enters at two
layers. Text heads have 32 dimensions, the least that vLLM takes on a CPU.
"""

import json
import os
import shutil

import torch
from conftest import TOY
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
FAMILIES = ("qwen2", "qwen3", *VISION_FAMILIES)
PATCH = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16}
FACTOR = {family: 2 * patch for family, patch in PATCH.items()}  # the side of an image token in pixels
_CLASSES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
}
# How each family's released processors name themselves: (processor, video processor).
_PROCESSORS = {
    "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen3_vl": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
}


def make_config(family: str, *, tied: bool = False):
    text = dict(
        vocab_size=238,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        initializer_range=0.1,
        bos_token_id=96,
        eos_token_id=98,
        pad_token_id=96,
        tie_word_embeddings=tied,
    )
    config_class = _CLASSES[family][0]
    if "qwen3" in family:
        text["head_dim"] = 32
    if "vl" not in family:
        return config_class(**text)
    text["rope_parameters"] = dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 6, 6])
    vision = dict(depth=2, num_heads=2, patch_size=PATCH[family], spatial_merge_size=2, initializer_range=0.1)
    if family == "qwen2_vl":
        vision |= dict(embed_dim=64, hidden_size=64, mlp_ratio=2)
    else:
        vision |= dict(hidden_size=64, intermediate_size=96, out_hidden_size=64)
    if family == "qwen2_5_vl":
        vision |= dict(window_size=56, fullatt_block_indexes=[1])
    if family == "qwen3_vl":
        text["rope_parameters"]["mrope_interleaved"] = True
        vision |= dict(num_position_embeddings=64, deepstack_visual_indexes=[0, 1])
    ids = dict(image_token_id=101, video_token_id=102, vision_start_token_id=99, vision_end_token_id=100)
    return config_class(text_config=text, vision_config=vision, tie_word_embeddings=tied, **ids)


def make_lm(family: str, *, tied: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    lm = _CLASSES[family][1](make_config(family, tied=tied)).eval()
    with torch.no_grad():
        for p in lm.parameters():  # a fresh bias is 0 and a fresh norm 1: mixed up, they would not show
            if p.ndim == 1:
                p.add_(0.1 * torch.randn_like(p))
    return lm


def write_folder(family: str, folder: str) -> str:
    """Everything of a model folder but the weights."""
    os.makedirs(folder, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(os.path.join(TOY, name), folder)
    make_config(family).save_pretrained(folder)
    if family in VISION_FAMILIES:
        with open(os.path.join(TOY, "processor_config.json"), encoding="utf-8") as f:
            processor = json.load(f)
        processor["processor_class"], processor["video_processor"]["video_processor_type"] = _PROCESSORS[family]
        for part in ("image_processor", "video_processor"):
            processor[part]["patch_size"] = PATCH[family]
        with open(os.path.join(folder, "processor_config.json"), "w", encoding="utf-8") as f:
            json.dump(processor, f)
    return folder


def save(family: str, lm: torch.nn.Module, folder: str) -> str:
    write_folder(family, folder)
    lm.save_pretrained(folder)
    return folder
