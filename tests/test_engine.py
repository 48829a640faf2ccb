"""The real vLLM on the tiny model: parity with transformers before and after a weight push, and every parameter arrives."""

import asyncio
import itertools

import pytest
import torch
from conftest import TOY

from data import ImageRules, ParquetData, pack_rows
from model import Policy, load_lm
from reward import toy_zoom
from rollout import Rollout, RolloutLimits, Trajectory

pytestmark = pytest.mark.slow
LIMITS = RolloutLimits(
    max_prompt_len=64,
    max_response_len=200,
    max_turn_len=24,
    max_turns=4,
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


def test_a_shifted_position_breaks_parity(codec, policy, trajectories):
    batch = pack_rows(trajectories(), codec)
    batch.position_ids[2] += (batch.input_ids == codec.image_token_id).long()
    with torch.no_grad():
        logprobs, _ = policy(batch)
    assert (logprobs - batch.rollout_logprobs)[batch.response_mask].abs().max() > 1e-3


def test_every_parameter_arrives(vllm_engine, codec, policy, trajectories, toy_data):
    """Changes one parameter at a time: the engine must move away from the trainer, and a push must bring it back."""
    rollout = Rollout(vllm_engine, codec, RULES, LIMITS, toy_zoom, {}, seed=5)
    prompt = rollout.prepare(next(iter(ParquetData([str(toy_data / "train.parquet")]))))

    def error():
        t = Trajectory.start(prompt, 0)
        g = vllm_engine.run(vllm_engine.generate(t.engine_ids, t.views, max_tokens=8, temperature=1.0, seed=1))
        t.append_sampled(g.ids, g.logprobs, g.version)
        return float(gaps(policy, codec, [t]).max())

    torch.manual_seed(0)
    vllm_engine.push(policy.lm, 0)
    assert error() < 2e-5
    for name, p in policy.lm.named_parameters():
        old = p.detach().clone()
        with torch.no_grad():
            p.add_((0.5 if p.ndim == 1 else p.std()) * torch.randn_like(p))
        moved = error()
        vllm_engine.push(policy.lm, 0)
        back = error()
        with torch.no_grad():
            p.copy_(old)
        vllm_engine.push(policy.lm, 0)
        assert moved > 1e-4 > back, f"{name}: error {moved} before the push, {back} after it"


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
