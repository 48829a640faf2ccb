"""DeepEyes' 7B recipe (arXiv:2505.14362 and its published scripts): Qwen2.5-VL-7B on 32 GPUs. NOT YET RUN HERE.

256 prompts x 16 samples = 4,096 trajectories per step, one update each. Prompt up to 8,192 tokens, response up to 20,480
with observations, 10,240 per turn, 5 turns. GRPO without KL or entropy terms, lr 1e-6, a checkpoint every 8 steps.
The published run takes 80 steps; its data are the 47k set: a visual-search file, a chart file and a reasoning file.
Their rewards need a judge model, which this version does not have yet.
"""

model = "Qwen2.5-VL-7B-Instruct"  # a local Hugging Face folder
train_files = ["data/visual_toolbox_v2.parquet", "data/chart.parquet", "data/thinklite.parquet"]
out_dir = "out/7b"

prompts_per_step = 256
group_size = 16
max_turns = 5
max_prompt_len = 8192
max_response_len = 20480
max_turn_len = 10240
rollout_tp = 1

steps = 80
lr = 1e-6
clip_low = 0.2
clip_high = 0.2
weight_decay = 0.01
microbatch_tokens = 32768
gradient_checkpointing = True
save_every = 8
