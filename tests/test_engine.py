"""The real vLLM on the tiny model: parity with transformers before and after a weight push, caches, limits, failures."""

import asyncio
import dataclasses
import functools
import io
import itertools
import random
import types

import psutil
import pytest
import torch
from conftest import TOY
from PIL import Image
from transformers import AutoModelForImageTextToText
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

import engine
from data import ImageRules, ParquetData, Sample, pack_rows
from engine import EngineError
from model import Policy, load_lm
from reward import toy_zoom
from rollout import Rollout, RolloutLimits
from tools import ToolBase

pytestmark = pytest.mark.slow
LIMITS = RolloutLimits(
    max_prompt_len=64,
    max_response_len=200,
    max_turn_len=24,
    max_turns=4,
    max_images=8,
    max_tool_errors=3,
    tool_timeout=30,
    trajectory_timeout=120,
)
RULES = ImageRules(factor=28, min_pixels=112 * 112, max_pixels=112 * 112, resampling="box")


@pytest.fixture(scope="module")
def policy(codec):
    return Policy(load_lm(TOY, torch.float32), codec.banned_ids)


@pytest.fixture
def trajectories(vllm_engine, codec, toy_data):
    """Four groups of four, several turns with images; calls the engine afresh each time."""
    rollout = Rollout(vllm_engine, codec, RULES, LIMITS, toy_zoom, {"visual_toolbox_v2": {"reminder": ""}}, seed=5)
    samples = list(ParquetData([str(toy_data / "train.parquet")]))[:4]
    return lambda temperature=1.0: vllm_engine.run(
        rollout.run(samples, 4, temperature, take=itertools.count().__next__)
    )


def gaps(policy, codec, rows, temperature=1.0):
    batch = pack_rows(rows, codec)
    with torch.no_grad():
        logprobs, _ = policy(batch, temperature)
    return (logprobs - batch.rollout_logprobs)[batch.response_mask].abs()


def restore(policy, engine, saved):
    policy.lm.load_state_dict(saved)
    engine.push(policy.lm, 0)


def test_parity_before_and_after_a_push(vllm_engine, codec, policy, trajectories):
    rows = trajectories()
    assert all(t.why_invalid == "" for t in rows)
    assert max(len(t.views) for t in rows) >= 2, "some trajectory must have zoomed"
    assert gaps(policy, codec, rows).max() < 2e-5
    saved = {k: v.clone() for k, v in policy.lm.state_dict().items()}
    torch.manual_seed(0)
    with torch.no_grad():
        for p in policy.lm.parameters():
            p.add_(0.02 * p.std().nan_to_num() * torch.randn_like(p))
    try:
        assert gaps(policy, codec, trajectories()).max() > 1e-2, "the engine still samples with the old weights"
        vllm_engine.push(policy.lm, 3)
        rows = trajectories()
        assert gaps(policy, codec, rows).max() < 5e-5
        assert {v for t in rows for v in t.versions} == {3}
        # A second round hits the prefix cache and the image cache; the numbers stay.
        assert gaps(policy, codec, trajectories()).max() < 5e-5
    finally:
        restore(policy, vllm_engine, saved)


class Pictures(ToolBase):
    """Shows pictures of several sizes, a few in a turn, whatever the policy says."""

    name = "pictures"

    def reset(self, raw_prompt, multi_modal_data, origin_multi_modal_data, **kwargs):
        self.image, self.turn = origin_multi_modal_data["image"][0], 0

    def execute(self, text, **kwargs):
        self.turn += 1
        boxes = [(10, 10, 60, 60), (200, 20, 500, 90), (0, 0, 90, 300)][: self.turn]
        crops = [self.image.crop(b) for b in boxes[::-1]]
        content = "see " + " and <image> ".join([""] * (len(crops) + 1)) + "!"
        return {"chat": [{"role": "user", "content": content}], "multi_modal_data": {"image": crops}}, 0.0, False, {}


def teacher_forced(lm, codec, t, temperature):
    """Logprobs of the sampled tokens from plain transformers, one trajectory alone: its own positions, no code of ours."""
    ids = torch.tensor([t.tokens])
    pixels = codec.image_processor(images=[v.image for v in t.views], do_resize=False, return_tensors="pt")
    with torch.no_grad():
        logits = lm(input_ids=ids, mm_token_type_ids=(ids == codec.image_token_id).int(), **pixels).logits[0]
    logits = logits.double() / temperature
    logits[:, codec.banned_ids] = -torch.inf
    logprobs = torch.log_softmax(logits, -1)
    return torch.tensor([logprobs[i - 1, t.tokens[i]] for i, m in enumerate(t.response_mask) if m])


def test_every_turn_equals_plain_transformers(vllm_engine, codec, policy, toy_data):
    """Four turns with 1, 2 and 3 pictures between them, weights as of a fresh initialisation, float32: 1e-5.

    (The trained toy has large weights: there float32 itself is off by up to 4e-5 on both sides, see docs/log.md.)
    """
    prompts = list(ParquetData([str(toy_data / "train.parquet")], "pictures"))[:4]
    limits = dataclasses.replace(LIMITS, max_response_len=250)

    class Stops:
        """Takes every turn for ended: fresh weights seldom sample the end of a turn."""

        check = vllm_engine.check
        prefilled = 0

        async def generate(self, ids, views, **kwargs):
            g = await vllm_engine.generate(ids, views, **kwargs)
            self.prefilled += g.prefilled
            return dataclasses.replace(g, stopped=True)

    def run(seed):
        engine = Stops()
        rollout = Rollout(engine, codec, RULES, limits, lambda t: {"score": 0.0}, {}, seed=seed)
        rows = vllm_engine.run(rollout.run(prompts, 2, 0.8, take=itertools.count().__next__))
        assert [t.why_invalid for t in rows] == [""] * 8 and {len(t.views) for t in rows} == {7}
        return rows, engine.prefilled

    def worst(rows):
        said = [torch.tensor([p for p, m in zip(t.rollout_logprobs, t.response_mask, strict=True) if m]) for t in rows]
        return max(float((s - teacher_forced(lm, codec, t, 0.8)).abs().max()) for s, t in zip(said, rows, strict=True))

    torch.manual_seed(0)
    lm = AutoModelForImageTextToText.from_config(codec.config).float().eval()
    try:
        vllm_engine.push(lm, 1)
        rows, cold = run(0)
        assert worst(rows) < 1e-5
        again, warm = run(0)
        assert [t.tokens for t in again] == [t.tokens for t in rows] and warm < 0.7 * cold, "the prefix cache was hit"
        assert worst(again) < 1e-5
        with torch.no_grad():
            for p in lm.parameters():
                p.add_(0.1 * p.std().nan_to_num() * torch.randn_like(p))
        assert worst(rows) > 1e-3, "the comparison can fail"
        vllm_engine.sleep()
        assert vllm_engine.run(vllm_engine.llm.is_sleeping())
        vllm_engine.push(lm, 2)
        assert not vllm_engine.run(vllm_engine.llm.is_sleeping())
        rows, after = run(0)
        assert worst(rows) < 1e-5 and after > 0.9 * cold, "a push empties the prefix cache"
        assert worst(run(0)[0]) < 1e-5
    finally:
        vllm_engine.push(policy.lm, 0)


def test_each_image_is_processed_once(vllm_engine, codec, toy_data, monkeypatch):
    """A group of four over three turns: every distinct picture passes the processor, and the way to the engine, once."""
    passed = []
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    original = Qwen2VLImageProcessor._preprocess

    def count(self, images, *args, **kwargs):
        passed.append(len(images))
        return original(self, images, *args, **kwargs)

    monkeypatch.setattr(Qwen2VLImageProcessor, "_preprocess", count)
    vllm_engine.run(vllm_engine._reset_caches())
    prompts = list(ParquetData([str(toy_data / "train.parquet")], "pictures"))[:2]
    limits = dataclasses.replace(LIMITS, max_turns=3)
    rollout = Rollout(vllm_engine, codec, RULES, limits, lambda t: {"score": 0.0}, {}, seed=3)
    rows = vllm_engine.run(rollout.run(prompts, 4, 1.0, take=itertools.count().__next__))
    distinct = {v.uuid for t in rows for v in t.views}
    shown = sum(len(t.views) for t in rows)
    assert sum(passed) == len(distinct) < shown / 2


def test_engine_memory_is_flat_over_fresh_images(vllm_engine, codec):
    """Forty pushes' worth of rounds with fresh pictures; what a round leaves behind must be far less than its images."""
    limits = dataclasses.replace(LIMITS, max_response_len=8, max_turn_len=2, max_turns=1, max_prompt_len=300)
    rules = ImageRules(factor=28, min_pixels=392 * 392, max_pixels=392 * 392, resampling="box")
    rollout = Rollout(vllm_engine, codec, rules, limits, lambda t: {"score": 0.0}, {}, seed=3)
    rng, rss = random.Random(0), []
    worker = vllm_engine.process
    for _ in range(40):
        samples = []
        for i in range(16):
            buffer = io.BytesIO()
            Image.frombytes("RGB", (392, 392), rng.randbytes(392 * 392 * 3)).save(buffer, "BMP")
            samples.append(
                Sample(f"row {i}", "", [{"role": "user", "content": "<image>"}], (buffer.getvalue(),), "", "")
            )
        rows = vllm_engine.run(rollout.run(samples, 1, 1.0, take=itertools.count().__next__))
        assert all(t.why_invalid == "" for t in rows)
        vllm_engine.run(vllm_engine._reset_caches())
        rss.append([p.memory_info().rss / 2**20 for p in (psutil.Process(), worker)])
    # 16 images x 784 patches x 1176 float32 values = 59 MB a round of what the processor makes of them.
    growth = [b - a for a, b in zip(rss[19], rss[-1], strict=True)]
    assert max(growth) < 150, f"20 rounds processed 1180 MB, memory grew by {growth} MB"


def test_an_engine_that_stands_still_is_told(vllm_engine, codec, monkeypatch):
    worker = vllm_engine.process
    vllm_engine.run(vllm_engine.check())
    monkeypatch.setattr(vllm_engine, "timeout", 1.0)
    worker.suspend()
    try:
        with pytest.raises(EngineError, match="has not answered for 1 seconds"):
            vllm_engine.run(vllm_engine.check())
    finally:
        worker.resume()
    vllm_engine.run(vllm_engine.check())


def test_greedy_is_deterministic_and_sampling_has_seeds(vllm_engine, codec, trajectories):
    texts = lambda rows: [t.turn_texts for t in rows]  # noqa: E731
    greedy = texts(trajectories(0.0))
    assert greedy == texts(trajectories(0.0))
    assert all(greedy[4 * g] == greedy[4 * g + k] for g in range(4) for k in range(4))
    sampled = texts(trajectories())
    assert sampled == texts(trajectories())
    assert any(sampled[0] != sampled[k] for k in range(1, 4)), "members of a group must differ"


def test_banned_ids_are_never_sampled_even_when_they_are_likely(vllm_engine, codec, policy, trajectories):
    saved = {k: v.clone() for k, v in policy.lm.state_dict().items()}
    embedding = policy.lm.get_output_embeddings().weight
    try:
        with torch.no_grad():
            embedding[codec.banned_ids] += 3.0 * embedding[codec.im_end]  # now they score above the end of a turn
        vllm_engine.push(policy.lm, 0)
        rows = trajectories()
        sampled = [i for t in rows for i, m in zip(t.tokens, t.response_mask, strict=True) if m]
        assert not set(sampled) & set(codec.banned_ids)
        assert gaps(policy, codec, rows).max() < 5e-5, "both sides leave the banned ids out of the softmax"
        unbanned = Policy(policy.lm, [])
        assert gaps(unbanned, codec, rows).max() > 1e-2, "it matters"
    finally:
        restore(policy, vllm_engine, saved)


def test_a_stop_string_ends_a_turn_and_stays_in_it(vllm_engine, codec, policy, trajectories, monkeypatch):
    monkeypatch.setattr(vllm_engine, "stop", ["</tool_call>"])
    rows = trajectories()
    assert all(t.why_invalid == "" for t in rows)
    ended = [text for t in rows for text in t.turn_texts if "</tool_call>" in text]
    assert ended and all(text.endswith("</tool_call>") for text in ended), "sampled, and nothing after it"
    assert any(t.calls and t.calls[0]["ok"] and len(t.turn_texts) > 1 for t in rows), "the call is carried out"
    assert gaps(policy, codec, rows).max() < 5e-5


def test_pads_and_images_must_agree(vllm_engine, codec):
    with pytest.raises(ValueError, match="1 image pads, but 0 images"):
        vllm_engine.run(vllm_engine.generate(codec.image_ids(), [], max_tokens=1, temperature=1.0, seed=0))


def test_temperature_is_in_the_logprobs(codec, policy, trajectories):
    rows = trajectories(0.6)
    assert gaps(policy, codec, rows, temperature=0.6).max() < 5e-5
    assert gaps(policy, codec, rows, temperature=1.0).max() > 1e-2


def test_timeouts_leave_the_engine_usable(vllm_engine, codec, toy_data):
    async def cancelled():
        ids = codec.encode("What is the digit")
        task = asyncio.create_task(vllm_engine.generate(ids, [], max_tokens=200, temperature=1.0, seed=0))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await vllm_engine.generate(ids, [], max_tokens=2, temperature=1.0, seed=0)

    assert len(vllm_engine.run(cancelled()).ids) >= 1


def test_a_layer_may_come_in_two_buckets(vllm_engine, codec, policy, trajectories, monkeypatch):
    """A bucket overwrites the one before; what a layer that is not whole yet has got of that must have been copied."""
    saved = {k: v.clone() for k, v in policy.lm.state_dict().items()}
    small = functools.partial(engine.ShmTrainerInitInfo, bucket_bytes=1)  # = that of the largest parameter
    monkeypatch.setattr(engine, "ShmTrainerInitInfo", small)
    updates, update_weights = [], vllm_engine.update_weights
    monkeypatch.setattr(vllm_engine, "update_weights", lambda info: (updates.append(info), update_weights(info)))
    torch.manual_seed(0)
    with torch.no_grad():
        for p in policy.lm.parameters():
            p.add_(0.02 * p.std().nan_to_num() * torch.randn_like(p))
    try:
        vllm_engine._sender = None
        vllm_engine.push(policy.lm, 1)
        joined = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]  # each list is one layer in the engine
        cut = [
            names
            for a, b in itertools.pairwise(updates)
            for names in joined
            if any(n in a["names"][-1] for n in names[:-1]) and any(n in b["names"][0] for n in names[1:])
        ]
        assert len(updates) > 5 and cut, "a bucket must end within a layer"
        assert gaps(policy, codec, trajectories()).max() < 5e-5
    finally:
        vllm_engine._sender = None
        restore(policy, vllm_engine, saved)


def test_what_an_engine_sees_of_a_gpu_machine(monkeypatch):
    """Its ranks' devices, whatever this process may see itself."""
    seen = lambda first, num: engine.gpu_environment(first, num)["CUDA_VISIBLE_DEVICES"]  # noqa: E731
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert [seen(first, 1) for first in range(4)] == ["4", "5", "6", "7"]
    assert [seen(first, 2) for first in (0, 2)] == ["4,5", "6,7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-ab,GPU-cd")
    assert seen(1, 1) == "GPU-cd"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert [seen(first, 4) for first in (0, 4)] == ["0,1,2,3", "4,5,6,7"]


def test_handles_of_gpu_memory_pass_vllms_encoder(monkeypatch):
    """A weight push on a GPU hands vLLM what torch's reduce_tensor gives: types and numbers in a tuple."""
    update = {
        "names": ["w"],
        "ipc_handles": {"GPU-ab": (torch.Tensor, (2, 3), (3, 1), 0, torch.UntypedStorage, torch.float32)},
    }
    with pytest.raises(TypeError, match="not serializable"):
        MsgpackEncoder().encode(update)
    for name, value in engine.gpu_environment(0, 1).items():
        monkeypatch.setenv(name, value)
    assert MsgpackDecoder().decode(MsgpackEncoder().encode(update)) is not None


def test_a_gpus_push_has_room_for_the_largest_parameter(codec, monkeypatch):
    """The head of a 7B model in float32 is 2.2 GB; vLLM's packed buffer is 1 GB and refuses what is larger."""
    told = {}

    class Sender:
        def send_weights(self):
            pass

    def trainer_init(info, **kwargs):
        told["size"], told["sends"] = info.packed_buffer_size_bytes, info.is_sender
        return Sender()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(engine.WeightTransferTrainerFactory, "trainer_init", trainer_init)
    for ids, size in ((152064, 152064 * 3584 * 4), (1000, 1 << 30)):
        follower = engine.VLLMEngine("", codec, max_len=1, max_images=1, max_num_seqs=1, leads=False)
        follower.push(torch.nn.Linear(3584, ids, bias=False, device="meta"), 1)
        follower.close()
        assert told == {"size": size, "sends": False}


def test_the_engine_sleeps_and_wakes_in_order(codec):
    """Weights, the push, and only then the KV cache; then the caches are emptied. The second push finds it awake."""
    calls = []

    class LLM:
        def __getattr__(self, name):
            async def call(*args, **kwargs):
                calls.append((name, *args, *kwargs.values()))
                return True

            return call

    one = engine.VLLMEngine("", codec, max_len=1, max_images=1, max_num_seqs=1, leads=False)
    one.leads, one.llm = True, LLM()
    one._sender = types.SimpleNamespace(send_weights=lambda: calls.append(("send",)))
    one.sleep()
    one.push(torch.nn.Linear(2, 2), 1)
    caches = [("reset_prefix_cache",), ("reset_mm_cache",), ("reset_encoder_cache",)]
    asleep = [("sleep", 2), ("wake_up", ["weights"]), ("send",), ("wake_up", ["kv_cache"])]
    assert calls == [*asleep, *caches]
    calls.clear()
    one.push(torch.nn.Linear(2, 2), 2)
    assert calls == [("send",), *caches]
    one.llm = None
    one.close()


def test_a_config_that_vllm_refuses_is_told(codec):
    with pytest.raises(EngineError, match=r"heads \(3\) must be divisible by tensor parallel size \(2\)"):
        engine.VLLMEngine(TOY, codec, max_len=320, max_images=8, max_num_seqs=4, tensor_parallel=2)


def test_a_missing_parameter_is_an_error(vllm_engine, policy):
    """The last test of the file: vLLM refuses further pushes after a failed one, and a run ends there."""

    class VisionOnly(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Module()
            self.model.visual = policy.lm.model.visual

    vllm_engine._sender = None
    with pytest.raises(Exception, match="of the engine's parameters were not sent, such as .*embed_tokens"):
        vllm_engine.push(VisionOnly(), 0)
