"""The configuration: one flat dataclass. `configs/*.py` are plain assignments, `--key=value` on the command line wins.

A config file may name another one to start from: `base = "toy.py"` (relative to itself). Only literals are allowed
(numbers, strings, lists, dicts and arithmetic on numbers), so that a file can be read without running anything.
"""

import ast
import difflib
import operator
import os
import typing
from dataclasses import dataclass, field


class ConfigError(Exception):
    """A mistake in a config file or on the command line, in one sentence."""


@dataclass
class Config:
    # model and data
    model: str = ""  # Hugging Face folder of the policy to start from (required)
    train_files: list[str] = field(default_factory=list)  # VeRL-format parquet files
    eval_files: list[str] = field(default_factory=list)  # held-out parquet files; [] = no evaluation
    prepare: str = ""  # arguments for python, run once if a data file is missing ("toy.py data ..."); "" = off
    env_name: str | None = None  # replaces every row's env_name ("" = no tool anywhere); None = as in the data
    out_dir: str = "out/run"  # log, curve and checkpoints
    seed: int = 0  # data order, sampling and initialisation
    # images: the model's view of every image is made by us, once
    min_pixels: int = 56 * 56  # area of a view at least
    max_pixels: int = 1280 * 28 * 28  # area of a view at most; observation images too
    resampling: str = (
        "bicubic"  # how PIL shrinks or enlarges an image to its view: "box", "bilinear", "bicubic", "lanczos"
    )
    box_frame: str = (
        "auto"  # what box numbers mean: "model_pixels", "rel1000", "original"; "auto" = the model family's own
    )
    # rollout
    prompts_per_step: int = 16  # over all ranks
    group_size: int = 8  # trajectories per prompt
    temperature: float = (
        1.0  # top_p 1 and top_k off, always: the engine's logprobs must be those of the full distribution
    )
    max_turns: int = 5  # generations per trajectory at most; 1 = plain single-turn RL
    max_images: int = 16  # per trajectory, those of the prompt included
    max_prompt_len: int = 8192  # trainer tokens; a longer prompt stops the run, naming the row
    max_response_len: int = 20480  # trainer tokens after the prompt, observations included
    max_turn_len: int = 10240  # sampled tokens per turn
    stop: list[str] = field(
        default_factory=list
    )  # extra stop strings such as "</tool_call>"; [] = end-of-turn token alone
    max_tool_errors: int = 3  # failed calls in a row before a trajectory ends as tool_error_limit
    max_invalid_frac: float = 0.1  # share of a step's trajectories that may break an invariant before the run stops
    tool_kwargs: dict = field(default_factory=dict)  # {env_name: {argument: value}} for the tools' constructors
    max_inflight: int = 0  # trajectories a rank runs at a time; 0 = its even share of the step
    tool_threads: int = 64  # plain (not async) tool calls a rank runs at a time
    tool_timeout: float = 30.0  # seconds per tool call
    trajectory_timeout: float = 600.0  # seconds per trajectory; then it ends as "timeout"
    engine_timeout: float = 300.0  # seconds until an engine that does not answer stops the run
    # engine (vLLM)
    engine_dtype: str = "bfloat16"  # "float32" on CPU: parity with the trainer to 1e-5
    engine_kv_cache_mb: int = 0  # explicit KV cache size; 0 = vLLM's own choice from gpu_memory_utilization
    engine_gpu_frac: float = 0.6  # share of the device's memory for the engine
    engine_block_size: int = 32  # KV block in tokens; prefix-cache hits come in whole blocks
    engine_threads: int = 1  # OpenMP threads of the engine on CPU
    rollout_tp: int = 1  # tensor-parallel size of an engine: so many neighbouring ranks of a host share one
    # objective: formulas in losses.py
    advantage: str = (
        "grpo"  # "grpo", "rloo", "remax", "reinforce_pp", "reinforce_pp_baseline", "gae" (PPO: with a critic)
    )
    norm_by_std: bool = True  # GRPO divides by the group's standard deviation; False = Dr. GRPO's advantage
    gamma: float = 1.0  # discount per sampled token (gae, reinforce_pp)
    lam: float = 1.0  # GAE's lambda
    policy_loss: str = "clip"  # "clip" (PPO), "gspo", "cispo"
    aggregation: str = "token"  # "token", "seq-mean-token-mean", "seq-mean-token-sum", "dr-grpo"
    clip_low: float = 0.2  # ratio clipped below at 1 - clip_low
    clip_high: float = 0.2  # ratio clipped above at 1 + clip_high
    clip_dual: float = 3.0  # bound on the ratio for negative advantages (dual clip); 0 = off
    entropy_coef: float = 0.0  # bonus
    kl_coef: float = 0.0  # of the KL to the starting policy, as a term of the loss
    kl_reward_coef: float = 0.0  # of the same, subtracted from each token's reward
    kl_target: float = 0.0  # kl_reward_coef adapts to hold this KL per token; 0 = it stays
    kl_estimator: str = "k3"  # "k1", "k2", "k3", "abs", "mse"
    old_logprobs: str = "trainer"  # what the ratio compares with: the trainer's logprobs, or the engine's ("rollout")
    mismatch: str = (
        "token"  # weight of a token by trainer / engine probability: "token" (TIS), "mask" (IcePop), "sequence", "none"
    )
    mismatch_cap: float = 2.0
    # critic
    critic_lr: float = 1e-5
    critic_warmup_steps: int = 0  # steps in which the critic learns alone
    value_clip: float = 0.5  # how far a value may move from the one that made the returns, as a clipped loss
    # reward and judge
    reward_fn: str = ""  # "file.py:name" takes the place of reward.REWARDS for every data_source
    reward_kwargs: dict = field(default_factory=dict)  # {data_source: {argument: value}}: weights and variants
    judge_model: str = ""  # "" = the first model that each server of LLM_AS_A_JUDGE_BASE lists
    judge_concurrency: int = 64  # calls in flight per rank
    judge_timeout: float = 60.0  # seconds per call
    judge_tries: int = 6  # calls per question, over all servers; pauses of 1, 2, 4, ... seconds between them
    judge_extra_body: dict = field(default_factory=dict)  # into every request, such as Qwen3's enable_thinking
    max_judge_fail_frac: float = 0.1  # share of a step's questions without a verdict, past which the run stops
    overlong_buffer: int = (
        0  # the last so many tokens of max_response_len cost up to 1 (DAPO, arXiv:2503.14476, eq. 13); 0 = off
    )
    refill_rounds: int = (
        0  # groups with equal rewards are dropped and drawn anew, so many times (DAPO's dynamic sampling)
    )
    # update
    steps: int = 80
    lr: float = 1e-6
    warmup_steps: int = 0  # linear
    num_minibatches: int = 1  # optimizer updates per pass over a step's trajectories
    num_epochs: int = 1  # passes
    lora_rank: int = 0  # 0 = all weights are trained; else low-rank adapters of the language model's layers alone
    lora_alpha: float = 32.0  # an adapter counts lora_alpha / lora_rank
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # 0 = no clipping
    microbatch_tokens: int = 16384  # tokens per backward on one rank; a longer trajectory is alone
    freeze_vision: bool = False  # the vision tower keeps its weights
    gradient_checkpointing: bool = False
    offload: bool = False  # parameters, gradients and optimizer states live on the host; slower, for small devices
    device_gb: float = 80.0  # memory of one GPU in GB (2^30), for `train.py --plan` alone
    dtype: str = "bfloat16"  # compute; master weights are always float32
    # once in a while
    eval_every: int = 0  # steps; evaluation also runs before the first step and after the last; 0 = only then
    eval_temperature: float = 0.0  # 0 = greedy
    save_every: int = (
        0  # steps between checkpoints; 0 = none. The last step's weights are always written to out_dir/final
    )
    keep_checkpoints: int = 2  # the newest so many
    resume: str = ""  # a checkpoint to go on from; "auto" = the newest whole one in out_dir; "" = begin anew
    show: int = 3  # trajectories printed at the end
    # ranks
    comm_timeout: float = 1800.0  # seconds that a rank waits for the others; must outlast the slowest trajectory


# Arithmetic that a config may use: batch products read better as 256 * 16 than as 4096.
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}


def _literal(node: ast.AST):
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_literal(node.left), _literal(node.right))
    return ast.literal_eval(node)


def _read(path: str) -> dict:
    """The assignments of a config file, those of its base first."""
    try:
        with open(path, encoding="utf-8") as f:
            tree = ast.parse(f.read(), path)
    except OSError as e:
        raise ConfigError(f"config file {path!r}: {e.strerror.lower()}") from None
    except SyntaxError as e:
        raise ConfigError(f"{path}:{e.lineno}: not valid Python ({e.msg})") from None
    own, where = {}, {}
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            continue  # docstring
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
            raise ConfigError(f"{path}:{node.lineno}: a config file holds only assignments `key = value`")
        name = node.targets[0].id
        try:
            own[name] = _literal(node.value)
        except (ValueError, TypeError, ZeroDivisionError):
            raise ConfigError(f"{path}:{node.lineno}: the value of {name!r} is not a literal") from None
        where[name] = f"{path}:{node.lineno}"
    base = own.pop("base", None)
    values = _read(os.path.join(os.path.dirname(path), base)) if base else {}
    for name, value in own.items():
        values[name] = (value, where[name])
    return values


def _fits(value, hint) -> bool:
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return isinstance(value, list) and all(_fits(v, args[0]) for v in value)
    if args:  # X | None
        return any(_fits(value, a) for a in args)
    return isinstance(value, hint)


def load_config(argv: list[str]) -> Config:
    """`[config.py, --key=value, ...]` -> Config. Raises ConfigError naming the file and line, the key or the value."""
    files = [a for a in argv if not a.startswith("--")]
    if len(files) != 1:
        raise ConfigError("usage: train.py configs/NAME.py [--key=value ...]")
    values = _read(files[0])
    hints = typing.get_type_hints(Config)
    for arg in (a for a in argv if a.startswith("--")):
        name, eq, text = arg[2:].partition("=")
        if not eq:
            raise ConfigError(f"{arg!r} on the command line lacks a value: write --{name}=value")
        try:
            value = _literal(ast.parse(text, mode="eval").body)
        except (ValueError, SyntaxError, TypeError):
            value = text  # a bare word is a string
        values[name] = (text if hints.get(name) is str else value, f"--{name}")
    cfg = Config()
    for name, (value, where) in values.items():
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            raise ConfigError(f"{where}: unknown key {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        if not _fits(value, hints[name]):
            want = (
                getattr(hints[name], "__name__", str(hints[name]))
                if not typing.get_args(hints[name])
                else str(hints[name])
            )
            raise ConfigError(f"{where}: {name} must be {want}, but is {value!r}")
        setattr(cfg, name, float(value) if hints[name] is float else value)
    _check(cfg)
    return cfg


def _check(cfg: Config) -> None:
    for name, options in {
        "resampling": ("box", "bilinear", "bicubic", "lanczos"),
        "box_frame": ("auto", "model_pixels", "rel1000", "original"),
        "dtype": ("float32", "bfloat16"),
        "engine_dtype": ("float32", "bfloat16"),
        "advantage": ("grpo", "rloo", "remax", "reinforce_pp", "reinforce_pp_baseline", "gae"),
        "policy_loss": ("clip", "gspo", "cispo"),
        "aggregation": ("token", "seq-mean-token-mean", "seq-mean-token-sum", "dr-grpo"),
        "kl_estimator": ("k1", "k2", "k3", "abs", "mse"),
        "old_logprobs": ("trainer", "rollout"),
        "mismatch": ("token", "mask", "sequence", "none"),
    }.items():
        if getattr(cfg, name) not in options:
            raise ConfigError(f"{name} must be one of {', '.join(options)}, but is {getattr(cfg, name)!r}")
    for name in (
        "prompts_per_step",
        "group_size",
        "max_turns",
        "max_images",
        "max_prompt_len",
        "max_response_len",
        "max_turn_len",
        "num_minibatches",
        "num_epochs",
        "keep_checkpoints",
    ):
        if getattr(cfg, name) < 1:
            raise ConfigError(f"{name} must be at least 1, but is {getattr(cfg, name)}")
    if cfg.refill_rounds and cfg.advantage == "remax":
        raise ConfigError("refill_rounds drops groups with equal rewards; remax has no groups to compare in")
    if cfg.kl_target and not cfg.kl_reward_coef:
        raise ConfigError("kl_target adapts kl_reward_coef, which is 0: give it a value to start from")
    if not cfg.model:
        raise ConfigError("model is not set: it names the Hugging Face folder to start from")
    if cfg.min_pixels > cfg.max_pixels:
        raise ConfigError(f"min_pixels {cfg.min_pixels} is above max_pixels {cfg.max_pixels}")
