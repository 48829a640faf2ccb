"""The learner's steps on a real tiny model, against the objective written out with plain transformers."""

import dataclasses
import math
import os
from types import SimpleNamespace

import families
import pytest
import torch
from conftest import TOY
from PIL import Image
from test_model import make_rows, plain_logits, plain_toy, relative_error, text_row

from config import Config
from data import Codec, Sample, View, pack_rows
from engine import Generation
from learner import Learner, ParityError, filler
from model import MergedWeights, Policy, load_lm, save_hf
from rollout import Prompt, Trajectory

BASE = Config(model=TOY, dtype="float32", lr=1e-3, max_grad_norm=0.0, mismatch="none", temperature=1.0)
REWARDS = [2.0, 0.0, 0.8, -0.2, 1.0, 1.0]  # two groups of three


def trajectories(codec, num=6):
    """Traces as trajectories in groups of three; the first has its reward on two turns."""
    rows = []
    for k, trace in enumerate(make_rows(codec, num)):
        n = len(trace.tokens)
        t = Trajectory(
            Sample("row", "", [], (), "", ""), k // 3, [], trace.tokens, trace.response_mask, [0.0] * n, [0.0] * n,
            trace.views, trace.response_mask.index(1),
        )  # fmt: skip
        t.rewards[-1] = REWARDS[k]
        rows.append(t)
    first = rows[1]
    first.rewards[first.response_mask.index(0, first.prompt_len) - 1] = 0.5  # a tool's reward, at the end of its turn
    return rows


def learner_for(codec, tmp_path, **changes):
    return Learner(dataclasses.replace(BASE, out_dir=str(tmp_path), **changes), codec)


def spare_row(codec):
    row = text_row(codec)
    return filler(Prompt([], row.tokens, [], None, []))


def one_step(learner, rows, step=0, baselines=None):
    spare = spare_row(learner.codec)
    learner.annotate(rows, spare)
    log = learner.advantages(rows, baselines)
    return log | learner.update(learner.minibatches(rows, spare, step), step)


def gradients(learner, rows, baselines=None):
    """The policy's gradient at the moment of the (first) update."""
    seen = {}

    def catch(module, optimizer, lr, batches, name):
        if module is learner.policy:
            seen.update({n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})
        module.zero_grad()
        return 0.0

    learner._optimize = catch
    one_step(learner, rows, baselines=baselines)
    return seen


def plain_logprobs(lm, codec, t):
    """Of the sampled tokens of one trajectory, 0 elsewhere, banned ids left out, and the entropies."""
    logits = plain_logits(lm, codec, t)
    logits[:, codec.banned_ids] = -math.inf
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp.clamp(min=-1e9)).sum(-1)
    picked = [logp[i - 1, t.tokens[i]] for i in range(1, len(t.tokens))]
    picked = torch.where(torch.tensor(t.response_mask) == 1, torch.stack([logp.new_zeros(()), *picked]), 0.0)
    return picked, torch.cat([entropy.new_zeros(1), entropy[:-1]])


def by_hand(codec, rows, advantages, weight, *, entropy_coef=0.0, kl_coef=0.0, start=None):
    """Gradient of sum over trajectories and sampled tokens of weight (-A p / p_old - c H + k k3), one by one."""
    lm = start or plain_toy()
    lm.zero_grad()
    reference = plain_toy()
    for t, a in zip(rows, advantages, strict=True):
        logp, entropy = plain_logprobs(lm, codec, t)
        with torch.no_grad():
            ref, _ = plain_logprobs(reference, codec, t)
        loss = 0.0
        for i, m in enumerate(t.response_mask):
            if m:
                r = (ref[i] - logp[i]).exp()
                k3 = r - 1 - (ref[i] - logp[i])
                loss = loss - a * (logp[i] - logp[i].detach()).exp() - entropy_coef * entropy[i] + kl_coef * k3
        (loss * weight(t)).backward()
    return {f"lm.{n}": p.grad.clone() for n, p in lm.named_parameters() if p.grad is not None}


# Group one: sums 2, 0.5, 0.8 with mean 1.1; group two: -0.2, 1, 1 with mean 0.6. Deviations with ddof 1.
CENTRED = [0.9, -0.6, -0.3, -0.8, 0.4, 0.4]
STDS = [math.sqrt((0.81 + 0.36 + 0.09) / 2)] * 3 + [math.sqrt((0.64 + 0.16 + 0.16) / 2)] * 3


@pytest.mark.parametrize(
    ("changes", "advantages", "how"),
    [
        ({}, [c / (s + 1e-6) for c, s in zip(CENTRED, STDS, strict=True)], "token"),
        ({"norm_by_std": False, "aggregation": "dr-grpo", "max_response_len": 50}, CENTRED, "dr-grpo"),
        ({"advantage": "rloo", "aggregation": "seq-mean-token-mean"}, [1.5 * c for c in CENTRED], "mean"),
        ({"advantage": "remax", "aggregation": "seq-mean-token-sum"}, [1.0, -0.5, -0.2, -0.7, 0.5, 0.5], "sum"),
        ({"norm_by_std": False, "entropy_coef": 0.1}, CENTRED, "token"),
        ({"norm_by_std": False, "policy_loss": "cispo"}, CENTRED, "token"),
        ({"norm_by_std": False, "policy_loss": "gspo"}, CENTRED, "token"),
    ],
)
def test_gradient_of_the_objective_by_hand(codec, tmp_path, changes, advantages, how):
    """From rewards to the gradient, with ratio 1: every estimator, loss and aggregation against plain transformers."""
    rows = trajectories(codec)
    total, num = sum(t.num_sampled for t in rows), len(rows)
    weights = {
        "token": lambda t: 1 / total,
        "mean": lambda t: 1 / (num * t.num_sampled),
        "sum": lambda t: 1 / num,
        "dr-grpo": lambda t: 1 / (num * 50),
    }
    seen = gradients(learner_for(codec, tmp_path, **changes), rows, baselines={0: 1.0, 1: 0.5})
    expected = by_hand(codec, rows, advantages, weights[how], entropy_coef=changes.get("entropy_coef", 0.0))
    assert relative_error(expected, seen) < 1e-5


def test_kl_term_and_reference(codec, tmp_path):
    """At the starting weights the KL has no gradient; away from them it pulls back, as k3's derivative says."""
    rows = trajectories(codec)
    total = sum(t.num_sampled for t in rows)
    plain = gradients(learner_for(codec, tmp_path, norm_by_std=False), rows)
    learner = learner_for(codec, tmp_path, norm_by_std=False, kl_coef=0.7)
    assert relative_error(plain, gradients(learner, trajectories(codec))) < 1e-5
    moved = plain_toy()
    torch.manual_seed(0)
    with torch.no_grad():
        for p in moved.parameters():
            p.add_(0.02 * p.std().nan_to_num() * torch.randn_like(p))
    learner.policy.lm.load_state_dict(moved.state_dict())
    seen = gradients(learner, trajectories(codec))
    expected = by_hand(codec, rows, CENTRED, lambda t: 1 / total, kl_coef=0.7, start=moved)
    assert relative_error(expected, seen) < 1e-5
    without = by_hand(codec, rows, CENTRED, lambda t: 1 / total, start=moved)
    assert relative_error(without, seen) > 1e-2, "the term matters here"


def test_annotations_are_what_the_models_say(codec, tmp_path):
    rows = trajectories(codec)
    learner = learner_for(codec, tmp_path, advantage="gae", kl_reward_coef=0.1, microbatch_tokens=250)
    with torch.no_grad():
        for p in learner.policy.lm.parameters():
            p.mul_(1.01)
        learner.critic.head.bias.fill_(0.25)
    learner.annotate(rows, spare_row(codec))
    for t in rows:
        with torch.no_grad():
            ref, _ = plain_logprobs(plain_toy(), codec, t)
            lm = plain_toy()
            lm.load_state_dict(learner.policy.lm.state_dict())
            old, _ = plain_logprobs(lm, codec, t)
        assert torch.allclose(torch.tensor(t.ref_logprobs), ref, atol=1e-4)
        assert torch.allclose(torch.tensor(t.old_logprobs), old, atol=1e-4)
        assert (old - ref).abs().max() > 1e-3
        assert t.values == [0.25 * m for m in t.response_mask], "a fresh value head says its bias"


def test_rewards_minus_kl(codec, tmp_path):
    """k1 per sampled token at coefficient 0.5, then the group's statistics; the coefficient adapts."""
    rows = trajectories(codec, 3)
    for t in rows:
        t.old_logprobs, t.ref_logprobs = [-1.0] * len(t.tokens), [-1.1] * len(t.tokens)  # k1 = 0.1 a token
    learner = learner_for(
        codec, tmp_path, kl_reward_coef=0.5, kl_estimator="k1", kl_target=0.2, norm_by_std=False, old_logprobs="rollout"
    )
    log = learner.advantages(rows)
    scores = [sum(t.rewards) - 0.5 * 0.1 * t.num_sampled for t in rows]
    for t, score in zip(rows, scores, strict=True):
        assert t.advantages[-1] == pytest.approx(score - sum(scores) / 3)
        assert t.advantages[0] == 0.0
    assert log["kl"] == pytest.approx(0.1) and log["kl_reward_coef"] == 0.5
    assert learner.kl.coef == pytest.approx(0.5 * (1 - 0.1 * 0.2)), "half the target: the error is clipped at -0.2"


def test_several_updates_use_the_logprobs_of_the_first(codec, tmp_path):
    """Two epochs of two mini-batches: old_logprobs stay, the ratio moves and is clipped."""
    rows = trajectories(codec)
    learner = learner_for(codec, tmp_path, num_epochs=2, num_minibatches=2, clip_low=0.01, clip_high=0.01, lr=3e-3)
    steps = []
    learner.optimizer.step = lambda step=learner.optimizer.step: (steps.append(1), step())
    log = one_step(learner, rows)
    assert len(steps) == 4 and log["clip_frac"] > 0.05 and log["approx_kl"] > 1e-4
    with torch.no_grad():
        before = [plain_logprobs(plain_toy(), codec, t)[0] for t in rows]
    for t, expected in zip(rows, before, strict=True):
        assert torch.allclose(torch.tensor(t.old_logprobs), expected, atol=1e-4)


def test_old_logprobs_from_the_engine(codec, tmp_path):
    """The ratio is against the engine's probabilities, and no weight corrects it a second time."""
    rows = trajectories(codec)
    with torch.no_grad():
        said = [plain_logprobs(plain_toy(), codec, t)[0] - 0.1 for t in rows]
    for t, logp in zip(rows, said, strict=True):
        t.rollout_logprobs = (logp * torch.tensor(t.response_mask)).tolist()
    # Everywhere p / engine = e^0.1, within the bounds: the gradient is e^0.1 times that of ratio 1. As a weight: the same.
    one = gradients(learner_for(codec, tmp_path, norm_by_std=False), trajectories(codec))
    scaled = {n: math.exp(0.1) * g for n, g in one.items()}
    engine = learner_for(codec, tmp_path, norm_by_std=False, old_logprobs="rollout", mismatch="token")
    assert relative_error(scaled, gradients(engine, rows)) < 1e-4
    for t in rows:
        t.old_logprobs = None
    weighted = learner_for(codec, tmp_path, norm_by_std=False, mismatch="token")
    assert relative_error(scaled, gradients(weighted, rows)) < 1e-4
    capped = learner_for(codec, tmp_path, norm_by_std=False, mismatch="token", mismatch_cap=1.0)
    assert relative_error(one, gradients(capped, rows)) < 1e-4


def test_mismatch_is_told_by_number_of_images(codec, tmp_path):
    """The engine claims 0.1 too much on every token of those with two images, and the truth elsewhere."""
    rows = trajectories(codec)
    for t in rows:
        with torch.no_grad():
            logp, _ = plain_logprobs(plain_toy(), codec, t)
        off = 0.1 if len(t.views) == 2 else 0.0
        t.rollout_logprobs = [p + off * m for p, m in zip(logp.tolist(), t.response_mask, strict=True)]
    log = one_step(learner_for(codec, tmp_path), rows)
    assert {len(t.views) for t in rows} == {1, 2}
    assert log["mismatch/max_2_images"] == pytest.approx(0.1, abs=1e-3)
    assert log["mismatch/mean_2_images"] == pytest.approx(0.1, abs=1e-4)
    assert log["mismatch_kl_2_images"] == pytest.approx(math.exp(-0.1) - 1 + 0.1, abs=1e-4)
    assert log["mismatch/max_1_images"] < 1e-3 and log["mismatch_kl_1_images"] < 1e-5


def test_engine_and_trainer_that_disagree_stop_the_run(codec, tmp_path):
    learner = learner_for(codec, tmp_path, engine_dtype="float32")
    (t, *_) = trajectories(codec)
    n = t.prompt_len
    prompt = Prompt([], t.tokens[:n], t.views[:1], t.sample, [])
    with torch.no_grad():
        logp, _ = plain_logprobs(plain_toy(), codec, t)

    class Engine:
        off, leads = 0.0, True

        def generate(self, ids, views, **kwargs):
            return Generation(
                t.tokens[:n], t.tokens[n : n + 4], [p + self.off for p in logp[n : n + 4].tolist()], False, 0
            )

        def run(self, generation):
            return generation

    assert learner.probe(Engine(), prompt) < 1e-4
    Engine.off = 2e-3
    with pytest.raises(
        ParityError, match="differ by 2.0e-03 on a fixed prompt, more than 0.001. Likely: a weight that"
    ):
        learner.probe(Engine(), prompt)
    learner.cfg.dtype = "bfloat16"  # rounding alone is larger there
    assert learner.probe(Engine(), prompt) == pytest.approx(2e-3, abs=1e-4)
    Engine.off = math.nan
    with pytest.raises(ParityError):
        learner.probe(Engine(), prompt)


def test_a_gradient_that_is_not_finite_is_skipped_saved_and_counted(codec, tmp_path):
    learner = learner_for(codec, tmp_path)
    before = {n: p.clone() for n, p in learner.policy.named_parameters()}
    rows, spare = trajectories(codec), spare_row(codec)
    learner.annotate(rows, spare)
    learner.advantages(rows)
    rows[0].advantages[-1] = math.inf
    log = learner.update(learner.minibatches(rows, spare, 4), 4)
    assert log["skipped_updates"] == 1 and not math.isfinite(log["grad_norm"])
    assert all(torch.equal(p, before[n]) for n, p in learner.policy.named_parameters())
    (saved,) = [f for f in os.listdir(tmp_path) if f.startswith("nonfinite")]
    assert saved == "nonfinite_step5_update0_rank0.pt"
    batch = torch.load(tmp_path / saved, weights_only=False)[0]
    assert len(batch["views"]) == len(batch["image_grid_thw"]) > 0, "what its pixels are made of"
    assert batch["advantages"].isinf().any() and sorted(len(t.tokens) for t in rows)[-1] <= batch["input_ids"].shape[1]
    log = one_step(learner, trajectories(codec), step=5)  # the next update is as good as ever
    assert log["skipped_updates"] == 1 and math.isfinite(log["grad_norm"])
    assert any(not torch.equal(p, before[n]) for n, p in learner.policy.named_parameters())


def test_critic_learns_alone_first(codec, tmp_path):
    learner = learner_for(codec, tmp_path, advantage="gae", critic_lr=3e-3, critic_warmup_steps=12, value_clip=1e9)
    before = {n: p.clone() for n, p in learner.policy.named_parameters()}
    logs = [one_step(learner, trajectories(codec), step) for step in range(13)]
    # Values start at 0, so that the first loss is half the mean square of the returns: rewards still to come.
    squares = [sum(t.rewards[i:]) ** 2 for t in trajectories(codec) for i, m in enumerate(t.response_mask) if m]
    assert logs[0]["critic/loss"] == pytest.approx(0.5 * sum(squares) / len(squares), rel=1e-5)
    assert logs[11]["critic/loss"] < 0.5 * logs[0]["critic/loss"] and logs[11]["critic/explained"] > 0.05
    assert "loss" not in logs[11] and "loss" in logs[12], "the policy waits for step 13"
    moved = [n for n, p in learner.policy.named_parameters() if not torch.equal(p, before[n])]
    assert len(moved) > 0.9 * len(before)


def test_lora_trains_adapters_and_merges_exactly(codec, tmp_path):
    learner = learner_for(codec, tmp_path, lora_rank=4, lora_alpha=8.0, kl_coef=0.1, lr=1e-2)
    base = {n: p for n, p in plain_toy().named_parameters()}
    merged = dict(learner.policy.weights().named_parameters())
    assert list(merged) == list(base) and all(torch.equal(merged[n], p) for n, p in base.items())
    trained = [n for n, p in learner.policy.named_parameters() if p.requires_grad]
    assert trained and all(".lora_" in n and "visual" not in n for n in trained)
    rows = trajectories(codec)
    for step in range(3):
        one_step(learner, rows, step)
    merged = dict(learner.policy.weights().named_parameters())
    changed = {n for n, p in base.items() if not torch.equal(merged[n], p)}
    assert changed == {n for n in base if "language_model.layers" in n and n.endswith("_proj.weight")}
    # The adapted model says what a plain one with the merged weights says; without adapters, what it said at the start.
    lm = plain_toy()
    lm.load_state_dict(merged, strict=False)
    (batch,) = learner._ready(learner._microbatches(rows, spare_row(codec), balance=False))
    with torch.no_grad():
        said = learner.policy(batch)[0][0].split(batch.lengths)
        with learner.policy.without_lora():
            start = learner.policy(batch)[0][0].split(batch.lengths)
        for t, a, b in zip(batch.rows, said, start, strict=True):
            assert torch.allclose(a, plain_logprobs(lm, codec, t)[0], atol=1e-4)
            assert torch.allclose(b, plain_logprobs(plain_toy(), codec, t)[0], atol=1e-4)
            assert (a - b).abs().max() > 1e-2
    save_hf(learner.policy, learner.accelerator, TOY, str(tmp_path / "hf"))
    saved = dict(load_lm(str(tmp_path / "hf"), torch.float32).named_parameters())
    assert all(torch.equal(saved[n], p) for n, p in merged.items())


def test_weights_without_adapters_are_the_models_own():
    lm = load_lm(TOY, torch.float32)
    weights = [p for _, p in MergedWeights(lm, torch.device("cpu")).named_parameters()]
    assert [p.data_ptr() for p in weights] == [p.data_ptr() for p in lm.parameters()], "no copies"
    assert [n for n, _ in Policy(lm, []).weights().named_parameters()] == [n for n, _ in lm.named_parameters()]


def test_freeze_vision(codec, tmp_path):
    learner = learner_for(codec, tmp_path, freeze_vision=True)
    seen = gradients(learner, trajectories(codec))
    assert seen and not any("visual" in n for n in seen)


@pytest.mark.parametrize("family", families.VISION_FAMILIES)
def test_gradient_checkpointing_saves_memory_and_changes_no_gradient(tmp_path, family):
    """Counted by autograd itself: what forward keeps for backward. Three decoder layers and two vision blocks."""
    folder = families.save(family, families.make_lm(family), str(tmp_path / family))
    codec = Codec(folder)
    side = families.FACTOR[family] * 8
    views = [View.of(Image.effect_noise((side, side), 90).convert("RGB")) for _ in range(2)]
    ids = codec.encode_slots("<image><image> What is the digit? ") + codec.encode("it is the seven " * 20)
    tokens = codec.expand(ids, [v.image.size for v in views])
    row = SimpleNamespace(tokens=tokens, response_mask=[0] * 150 + [1] * (len(tokens) - 150), views=views)
    batch, kept, gradients = pack_rows([row], codec), [], []
    for on in (False, True):
        learner = learner_for(codec, tmp_path, model=folder, gradient_checkpointing=on)
        saved = {}

        def keep(tensor, saved=saved):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()  # held: no address comes twice
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            logprobs, _ = learner.policy(batch)
        logprobs.sum().backward()
        weights = {p.untyped_storage().data_ptr() for p in learner.policy.parameters()}
        kept.append(sum(s.nbytes() for address, s in saved.items() if address not in weights))
        gradients.append(torch.cat([p.grad.flatten() for p in learner.policy.parameters()]))
    assert kept[1] < 0.5 * kept[0]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-5)
