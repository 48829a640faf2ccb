"""The budget on paper: parameter counts against real models and published totals, formulas against typed-out numbers."""

import re

import pytest
import torch
from conftest import TOY
from transformers import AutoConfig, AutoModel, Qwen2_5_VLConfig

import plan
from config import Config, ConfigError, load_config
from model import add_lora, load_lm

# hidden, layers, heads, kv heads, intermediate, vocabulary, vision intermediate, tied; published total
PUBLISHED = {
    "3b": (2048, 36, 16, 2, 11008, 151936, 3420, True, 3.75e9),
    "7b": (3584, 28, 28, 4, 18944, 152064, 3420, False, 8.29e9),
    "32b": (5120, 64, 40, 8, 27648, 152064, 3456, False, 33.45e9),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """folder("7b"): a folder that holds nothing but the config.json of the published Qwen2.5-VL of that size."""

    def make(name):
        hidden, layers, heads, kv_heads, inner, vocabulary, vision_inner, tied, _ = PUBLISHED[name]
        text = dict(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=inner,
            vocab_size=vocabulary,
        )
        vision = dict(depth=32, hidden_size=1280, intermediate_size=vision_inner, num_heads=16, out_hidden_size=hidden)
        path = tmp_path_factory.mktemp(name)
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied).save_pretrained(path)
        return str(path)

    return make


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals(folder, name):
    s = plan.read_shape(folder(name))
    assert s.total == pytest.approx(PUBLISHED[name][-1], rel=0.01)
    assert s.tied == PUBLISHED[name][-2] and s.head == PUBLISHED[name][0] * PUBLISHED[name][5]
    assert s.vision == pytest.approx(0.67e9, rel=0.05)


def test_counts_of_a_real_model():
    lm, s = load_lm(TOY, torch.float32), plan.read_shape(TOY)
    count = lambda m: sum(p.numel() for p in m.parameters())  # noqa: E731
    assert (s.total, s.vision) == (count(lm), count(lm.model.visual))
    assert s.root == s.total - count(lm.model.visual.blocks) - count(lm.model.language_model.layers)
    assert s.tied and (s.layers, s.vision_layers, s.kv_width, s.factor, s.patch_dim) == (4, 2, 96, 28, 1176)
    add_lora(lm, 4, 32.0)
    assert plan.read_shape(TOY, 4).adapters == sum(p.numel() for p in lm.parameters() if p.requires_grad) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_keeps_what_the_formula_says(folder, dtype):
    """Bytes that autograd saves for one decoder layer of a quarter of the 7B's width, weights apart."""
    tokens, sizes = 256, []
    for layers in (1, 2):
        config = AutoConfig.from_pretrained(folder("7b")).text_config
        config.hidden_size, config.intermediate_size = 896, 4736
        config.num_attention_heads, config.num_key_value_heads = 7, 1
        config.num_hidden_layers, config.vocab_size, config.layer_types = layers, 64, ["full_attention"] * layers
        lm = AutoModel.from_config(config, dtype=dtype, attn_implementation="sdpa")
        weights, saved = {p.untyped_storage().data_ptr() for p in lm.parameters()}, {}

        def keep(tensor, weights=weights, saved=saved):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage  # held, so that no address comes twice
            return tensor

        embedded = torch.randn(1, tokens, 896, dtype=dtype, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            lm(inputs_embeds=embedded, use_cache=False)
        sizes.append(sum(s.nbytes() for s in saved.values()))
    compute, in_float32 = plan._saved_per_token(lm.layers[0])
    said = tokens * (dtype.itemsize * compute + 4 * in_float32)
    assert said == pytest.approx(sizes[1] - sizes[0], rel=0.1)


def test_the_7b_recipe_typed_out(folder):
    cfg, n = load_config(["configs/7b.py", f"--model={folder('7b')}"]), 8
    s = plan.read_shape(cfg.model)
    gb = {i.name: i.gb * 2**30 for i in plan.gpu_items(cfg, s, n)}
    p = 8292166656
    assert gb["policy: master weights"] == gb["policy: gradients"] == 4 * p / 8
    assert gb["policy: Adam's moments"] == p
    assert gb["engine: weights"] == 2 * p
    assert plan.kv_bytes(cfg, s) == 2 * 28 * 4 * 128 * 2
    assert gb["pixels of a micro-batch"] == 32768 * 4 * (3 * 2 * 14 * 14) * 4
    assert plan.verdict(cfg, s, 8).startswith("fits: ")
    assert plan.verdict(cfg, s, 1).startswith("NO: the update takes ")
    assert "more GPUs" in plan.verdict(cfg, s, 1)
    cfg.rollout_tp = 3
    assert plan.verdict(cfg, s, 8) == "no: rollout_tp 3 does not divide 8 GPUs"
    cfg.rollout_tp = 8
    assert plan.verdict(cfg, s, 16) == "no: rollout_tp 8 does not divide 28 heads"


@pytest.mark.parametrize(
    ("changes", "phase", "key"),
    [
        ({"gradient_checkpointing": False}, "update", "microbatch_tokens, or gradient_checkpointing = True"),
        ({"engine_gpu_frac": 0.95}, "rollout", "engine_gpu_frac"),
        ({"device_gb": 24.0, "engine_gpu_frac": 0.9}, "update", "microbatch_tokens"),
    ],
)
def test_what_does_not_fit_is_named(folder, changes, phase, key):
    cfg = load_config(["configs/7b.py", f"--model={folder('7b')}", *(f"--{k}={v}" for k, v in changes.items())])
    told = plan.verdict(cfg, plan.read_shape(cfg.model), 8)
    assert told.startswith(f"NO: the {phase} takes") and key in told


def test_objectives_and_lora_change_the_state(folder):
    path = folder("3b")
    state = lambda **more: {  # noqa: E731
        i.name: i.gb for i in plan.state_items(Config(model=path, **more), plan.read_shape(path, more.get("lora_rank", 0)), 4)
    }  # fmt: skip
    assert set(state(kl_coef=0.1)) - set(state()) == {"reference: weights"}
    assert set(state(advantage="gae")) - set(state()) == {"critic: weights and moments", "critic: gradients"}
    lora = state(lora_rank=32, kl_coef=0.1)
    assert "reference: weights" not in lora, "the reference is the policy without its adapters"
    assert lora["policy: gradients"] < 0.05 * state()["policy: gradients"]
    frozen = plan.read_shape(path).vision
    saved = state()["policy: Adam's moments"] - state(freeze_vision=True)["policy: Adam's moments"]
    assert saved == pytest.approx(8 * frozen / 4 / 2**30)


def test_offload_moves_the_state_to_the_host(folder):
    """7B on one GPU: 16 bytes a parameter more on the host, none of it on the device."""
    cfg = load_config(["configs/7b.py", f"--model={folder('7b')}"])
    s, policy = plan.read_shape(cfg.model), lambda items: sum(i.gb for i in items if "policy" in i.name)
    gpu, host = policy(plan.gpu_items(cfg, s, 1)), policy(plan.host_items(cfg, s, 1))
    assert gpu == pytest.approx(16 * s.total / 2**30) and host == 0
    cfg.offload = True
    gpu, host = policy(plan.gpu_items(cfg, s, 1)), policy(plan.host_items(cfg, s, 1))
    assert host == pytest.approx((2 * 8 + 8) * s.total / 2**30) and gpu == 0, "weights and gradients are pinned"
    assert plan.verdict(cfg, s, 1).startswith("fits: ")
    assert policy(plan.host_items(cfg, s, 8)) == pytest.approx(host), "eight ranks of a host hold an eighth each"


def test_the_script_prints_it_without_weights(folder, run_script):
    done = run_script("train.py", "--plan", "configs/7b.py", f"--model={folder('7b')}", "--num_gpus=[8,32]", check=True)
    assert "256 prompts x 16 samples = 4096 trajectories a step" in done.stdout
    assert re.search(r"^    8 GPUs: fits: ", done.stdout, re.M) and re.search(r"^   32 GPUs: fits: ", done.stdout, re.M)
    assert "16 GPUs" not in done.stdout
    done = run_script("train.py", "--plan", "configs/7b.py", "--model=no/such/folder")
    assert done.returncode == 1 and done.stderr.startswith("ConfigError: 'no/such/folder/config.json' does not exist")
    done = run_script("train.py", "--plan", "configs/7b.py", "--num_gpus=many")
    assert done.returncode == 1 and "--num_gpus must be a list of numbers" in done.stderr


@pytest.mark.parametrize(
    ("config", "size", "counts"), [("3b_1gpu", "3b", [1]), ("7b", "7b", [8, 16, 32]), ("32b", "32b", [64])]
)
def test_shipped_configs_fit_where_they_say(folder, config, size, counts):
    cfg = load_config([f"configs/{config}.py", f"--model={folder(size)}"])
    s = plan.read_shape(cfg.model, cfg.lora_rank)
    for n in counts:
        assert plan.verdict(cfg, s, n).startswith("fits: "), plan.verdict(cfg, s, n)


@pytest.mark.parametrize(
    ("config", "size", "counts"), [("7b", "7b", [8, 16, 32]), ("32b", "32b", [64]), ("3b_1gpu", "3b", [1])]
)
def test_the_docstrings_say_what_the_plan_says(folder, config, size, counts):
    cfg = load_config([f"configs/{config}.py", f"--model={folder(size)}"])
    s = plan.read_shape(cfg.model)
    with open(f"configs/{config}.py", encoding="utf-8") as f:
        text = f.read()
    for name, letter in (("GPU, rollout", "r"), ("GPU, update", "u"), ("host, in a step", "h")):
        found = re.search(rf"^    {name}((?:\s+\d+)+)", text, re.M)
        if found:
            items = [plan.host_items(cfg, s, n) if letter == "h" else plan.gpu_items(cfg, s, n) for n in counts]
            sums = [sum(i.gb for i in column if letter.replace("h", "r") in i.phases) for column in items]
            assert [int(n) for n in found[1].split()] == pytest.approx(sums, abs=0.6), name
        else:
            assert config != "7b"


def test_a_folder_that_is_no_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="model folder"):
        plan.read_shape(str(tmp_path))
