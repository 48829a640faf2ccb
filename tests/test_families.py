"""Real vLLM and plain transformers on a tiny random model of every family, head tied and not: positions and weights."""

import dataclasses
import hashlib
import io
import itertools
from types import SimpleNamespace

import families
import pytest
import torch
from PIL import Image

from data import Codec, ImageRules, Sample, pack_rows
from engine import VLLMEngine
from model import Policy, use_cpu_fast_paths
from rollout import Rollout, RolloutLimits
from tools import ToolBase

pytestmark = pytest.mark.slow
LIMITS = RolloutLimits(
    max_prompt_len=200,
    max_response_len=400,
    max_turn_len=12,
    max_turns=4,
    max_images=9,
    max_tool_errors=3,
    tool_timeout=30,
    trajectory_timeout=120,
)
TEMPERATURE = 0.8


def digests(worker) -> dict[str, str]:
    """Runs in the engine's process: {parameter: checksum} of what the engine computes with.

    vLLM's CPU backend packs the weights of its linear layers and drops the originals: read back by multiplying with 1. An
    output head keeps both, and both are told.
    """
    found = {}
    for layer_name, layer in worker.model_runner.get_model().named_modules():
        for name, p in layer.named_parameters(recurse=False):
            value = p.detach()
            if name == "weight" and hasattr(layer, "cpu_linear"):
                inputs = getattr(layer, "input_size_per_partition", None) or layer.embedding_dim
                packed = layer.cpu_linear(torch.eye(inputs), p, None)
                if len(value):
                    found[f"{layer_name}.{name} packed"] = hashlib.sha256(packed.contiguous().numpy()).hexdigest()
                else:
                    value = packed
            assert len(value), f"{layer_name}.{name} is empty"
            found[f"{layer_name}.{name}"] = hashlib.sha256(value.contiguous().numpy()).hexdigest()
    return found


@pytest.fixture(
    scope="module", params=itertools.product(families.FAMILIES, (False, True)), ids=lambda p: f"{p[0]}-{p[1]}"
)
def setup(request, tmp_path_factory):
    """A model of a family, its folder, a real engine on the folder, and the policy on the same parameters."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    family, tied = request.param
    lm = families.make_lm(family, tied=tied)
    folder = families.save(family, lm, str(tmp_path_factory.mktemp(family)))
    codec = Codec(folder)
    CPUWorker.digests = digests  # the engine's process is forked and has it too
    engine = VLLMEngine(folder, codec, max_len=600, max_images=9, max_num_seqs=8, kv_cache_mb=32, threads=1)
    del CPUWorker.digests
    fast = families.make_lm(family, tied=tied)
    fast.load_state_dict(lm.state_dict())
    use_cpu_fast_paths(fast)
    yield SimpleNamespace(
        family=family, tied=tied, lm=lm, codec=codec, engine=engine, policy=Policy(fast, codec.banned_ids),
        digests=lambda: engine.run(engine.llm.collective_rpc("digests"))[0],
    )  # fmt: skip
    engine.close()


# ---------------------------------------------------------------------------------------------------- positions
class Shows(ToolBase):
    """Shows pictures of several sizes, a few in a turn, whatever the policy says; words alone without any image."""

    name = "shows"

    def reset(self, raw_prompt, multi_modal_data, origin_multi_modal_data, **kwargs):
        self.images, self.turn = origin_multi_modal_data["image"], 0

    def execute(self, text, **kwargs):
        self.turn += 1
        if not self.images:
            return [{"role": "user", "content": "see " * self.turn}], 0.0, False, {}
        boxes = [(10, 10, 60, 60), (200, 20, 500, 90), (0, 0, 90, 300)][: self.turn]
        crops = [self.images[0].crop(b) for b in boxes[::-1]]
        content = "see " + " and <image> ".join([""] * (len(crops) + 1)) + "!"
        return {"chat": [{"role": "user", "content": content}], "multi_modal_data": {"image": crops}}, 0.0, False, {}


class EveryTurnEnds:
    """The engine, but every turn counts as ended: random weights seldom sample the end of one."""

    def __init__(self, engine):
        self.engine, self.check = engine, engine.check

    async def generate(self, ids, views, **kwargs):
        return dataclasses.replace(await self.engine.generate(ids, views, **kwargs), stopped=True)


def make_rollout(s):
    factor = families.FACTOR.get(s.family, 28)
    rules = ImageRules(factor, (2 * factor) ** 2, (5 * factor) ** 2, "bicubic")
    return Rollout(EveryTurnEnds(s.engine), s.codec, rules, LIMITS, lambda t: {"score": 0.0}, {}, seed=0)


def samples(s):
    found = []
    for i, num_images in enumerate((2, 1, 3) if s.codec.has_vision else (0, 0)):
        images = []
        for size in [(500, 300), (60, 400), (200, 200)][:num_images]:
            buffer = io.BytesIO()
            Image.effect_noise(size, 60).convert("RGB").save(buffer, "PNG")
            images.append(buffer.getvalue())
        text = "a <image> digit <image> is <image>".replace("<image>", "", 3 - num_images)
        found.append(Sample(f"row {i}", "", [{"role": "user", "content": text}], tuple(images), "shows", ""))
    return found


def told(rows):
    return [torch.tensor([p for p, m in zip(t.rollout_logprobs, t.response_mask, strict=True) if m]) for t in rows]


def plain(s, t):
    """Logprobs of the sampled tokens from plain transformers, one trajectory alone: its own positions, no code of ours."""
    ids, images = torch.tensor([t.tokens]), {}
    if t.views:
        images = s.codec.image_processor(images=[v.image for v in t.views], do_resize=False, return_tensors="pt")
        images["mm_token_type_ids"] = (ids == s.codec.image_token_id).int()
    with torch.no_grad():
        logits = s.lm(input_ids=ids, **images).logits[0].double() / TEMPERATURE
    logits[:, s.codec.banned_ids] = -torch.inf
    logprobs = torch.log_softmax(logits, -1)
    return torch.tensor([logprobs[i - 1, t.tokens[i]] for i, m in enumerate(t.response_mask) if m])


def gap(s, rows):
    """Engine against transformers, one by one."""
    return max(float((a - plain(s, t)).abs().max()) for a, t in zip(told(rows), rows, strict=True))


def packed_gap(s, rows, shift=lambda batch: None):
    """Engine against the policy on one packed row, whose positions `shift` may spoil."""
    batch = pack_rows(rows, s.codec)
    shift(batch)
    with torch.no_grad():
        logprobs, _ = s.policy(batch, TEMPERATURE)
    return float((logprobs - batch.rollout_logprobs)[batch.response_mask].abs().max())


def test_every_turn_equals_transformers_one_by_one_and_packed(setup):
    """Four turns with 1, 2 and 3 pictures between them after prompts with 1 to 3: within 1e-5 in float32."""
    s = setup
    rows = s.engine.run(make_rollout(s).run(samples(s), 2, TEMPERATURE, take=itertools.count().__next__))
    assert [t.why_invalid for t in rows] == [""] * len(rows) and {len(t.versions) for t in rows} == {4}
    assert max(len(t.views) for t in rows) >= (7 if s.codec.has_vision else 0)
    assert gap(s, rows) < 1e-5
    assert packed_gap(s, rows) < 1e-5

    # The comparison can fail: one wrong position is seen.
    if s.codec.has_vision:
        pads = (pack_rows(rows, s.codec).input_ids == s.codec.image_token_id).long()

        def columns(batch):
            batch.position_ids[3] += pads

        def after_the_last_image(batch):  # as if it had taken one position more
            batch.position_ids[1:, 0, int(pads[0].nonzero()[-1]) + 1 :] += 1

        assert packed_gap(s, rows, columns) > 1e-4
        assert packed_gap(s, rows, after_the_last_image) > 1e-4
    else:

        def one_more(batch):
            batch.position_ids[0, len(rows[0].tokens) - 20 : len(rows[0].tokens)] += 1

        assert packed_gap(s, rows, one_more) > 1e-4


# ---------------------------------------------------------------------------------------------------- weights
EMBEDDING = {False: "model.embed_tokens.weight", True: "model.language_model.embed_tokens.weight"}  # by has_vision


def one_turn(s, prompt):
    from rollout import Trajectory

    t = Trajectory.start(prompt, 0)
    g = s.engine.run(s.engine.generate(t.engine_ids, t.views, max_tokens=6, temperature=TEMPERATURE, seed=1))
    t.append_sampled(g.ids, g.logprobs, g.version)
    return [t]


def test_every_parameter_arrives(setup):
    """Changes one parameter after the other. Before the push the engine must be seen to differ, after it to agree, and in
    its own memory exactly the parameter that holds this one has changed; in the end every one of its parameters has.

    A tied head differs from one that is not in the embedding alone: there the others change all at once.
    """
    s = setup
    from_disk = s.digests()
    original = {n: p.detach().clone() for n, p in s.lm.named_parameters()}
    s.engine.push(s.lm, 0)
    assert s.digests() == from_disk, "a push leaves what vLLM's own loader read from the same weights"
    prompt = make_rollout(s).prepare(samples(s)[0])
    torch.manual_seed(0)
    now, rows = from_disk, one_turn(s, prompt)
    assert gap(s, rows) < 1e-5
    named = s.lm.named_parameters()
    steps = [[n for n, _ in named]] if s.tied else [[n] for n, _ in named]
    for names in [*([[EMBEDDING[s.codec.has_vision]]] if s.tied else []), *steps]:
        with torch.no_grad():
            for p in map(s.lm.get_parameter, names):
                p.add_((0.3 if p.ndim == 1 else 0.5 * p.std()) * torch.randn_like(p))
        assert gap(s, rows) > 1e-4, f"{names} matter to nothing"
        s.engine.push(s.lm, 0)
        before, now, rows = now, s.digests(), one_turn(s, prompt)
        assert gap(s, rows) < 2e-5, f"{names} did not arrive"
        changed = {k.removesuffix(" packed") for k in now if now[k] != before[k]}
        if len(names) == 1:
            assert len(changed) == (2 if s.tied else 1), (names, changed)  # a tied head is listed beside the embedding
    assert not [k for k in now if now[k] == from_disk[k]], "every parameter of the engine was reached"
    with torch.no_grad():
        for name, p in s.lm.named_parameters():
            p.copy_(original[name])
    s.engine.push(s.lm, 0)
    assert s.digests() == from_disk


class Sends(torch.nn.Module):
    """A trainer's module with these parameters."""

    def __init__(self, named):
        super().__init__()
        for name, p in named.items():
            *path, last = name.split(".")
            module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]
            module.register_parameter(last, p)


def test_a_parameter_not_sent_or_not_taken_is_an_error(setup):
    """The last test on an engine: vLLM refuses further pushes after a failed one, and a run ends there."""
    s = setup
    named = dict(s.lm.named_parameters())
    if s.tied:
        named["model.surplus.weight"] = torch.nn.Parameter(torch.zeros(4, 4))
        message = "no module or parameter named"
    elif s.codec.has_vision:
        del named[next(n for n in named if "merger" in n and n.endswith("bias"))]
        message = "1 of the engine's parameters were not sent, such as .*visual.merger.*bias"
    else:  # a part of what the engine holds as one
        del named["model.layers.1.self_attn.q_proj.weight"]
        message = "1 of the engine's parameters were not sent, such as .*a part of model.layers.1.self_attn.qkv_proj"
    s.engine._sender = None
    with pytest.raises(Exception, match=message):
        s.engine.push(Sends(named), 0)
