"""The embedded task: a 1 M-parameter Qwen2.5-VL learns to zoom, on two CPU cores, through a real vLLM.

Batch: 16 prompts x 8 samples = 128 trajectories per step, one update each, 80 steps: about 270k sampled tokens.
Tokens: prompt up to 64, response up to 128 with observations, 24 a turn, 3 turns: 128 x 192 = 24,576 a step at most, in
micro-batches of 8,192. An image has 16, a trajectory of 3 turns 3 images.
Memory, measured (`memory/*` in the log, results/bench.md): trainer 1.8 GB, engine 1.8 GB. Most of it is libraries: weights,
gradients and Adam take 16 bytes x 1.04 M, the KV cache 256 MB, a micro-batch of 8,192 tokens 0.8 GB at most (`--plan`).
Expected on the held-out set: accuracy 0.2 -> 0.8 or more, tool rate 0.25 -> 0.97, IoU of the boxes +0.1 or more.
Without the tool (--env_name="") accuracy stays at the guessing floor of 0.1.
"""

model = "assets/toy_base"  # made by: python toy.py base assets/toy_base
train_files = ["out/toy/data/train.parquet"]
eval_files = ["out/toy/data/eval.parquet"]
prepare = "toy.py data out/toy/data"  # run once, if the files are missing
out_dir = "out/toy"

# The picture is 672 x 672, the view 112 x 112 (16 tokens) by averaging 6 x 6 blocks; crops are shown at about 16 tokens.
# (113: the size rule divides by a rounded root, and at 112 many a crop would fall just short of it and be shown at 84.)
min_pixels = 112 * 112
max_pixels = 113 * 113
resampling = "box"

prompts_per_step = 16
group_size = 8
max_turns = 3
max_prompt_len = 64
max_response_len = 128
max_turn_len = 24  # a call is 23 tokens, an answer 8
tool_kwargs = {"visual_toolbox_v2": {"reminder": ""}}  # the tiny tokenizer would spell it letter by letter

engine_dtype = "float32"
engine_kv_cache_mb = 256
dtype = "float32"

eval_temperature = 1.0  # the base model guesses when greedy: only sampling shows what it calls before training

steps = 80
lr = 3e-4
warmup_steps = 5
adam_betas = [0.9, 0.95]
clip_high = 0.28
microbatch_tokens = 8192
