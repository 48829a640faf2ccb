"""DeepEyes' 7B recipe (arXiv:2505.14362 and its published scripts): Qwen2.5-VL-7B on 8, 16 or 32 80 GB GPUs. NOT YET RUN.

Batch: 256 prompts x 16 samples = 4,096 trajectories a step, one update each, 80 steps. Per GPU that is 512 trajectories on
8, 256 on 16, 128 on 32; nothing else here depends on their number.
Tokens: prompt up to 8,192, response up to 20,480 with observations, 10,240 a turn, 5 turns: 4,096 x 28,672 = 117 M a step at
most, 448 full micro-batches of 32,768 on each of 8 GPUs, 112 on each of 32. An image has 1,280 tokens at most.

Memory, from `python train.py --plan configs/7b.py` with the published shape (8.29 B parameters), GB:

                             8 GPUs   16   32
    GPU, rollout                 65   59   56   weights and Adam (12 bytes a parameter / GPUs) + engine 48 + reserve 5
    GPU, update                  55   47   43   the same, gradients, gathered units 9, activations 24, the engine asleep
    GPU, push                    36   30   27
    host, while loading          79   79   79   the first one: 4 bytes a parameter, beside 6 for each rank's processes
    host, in a step             202  136  103   at most, 5 images of the largest size in every trajectory: 93, 47, 23 of it
                                                are those images. DeepEyes asks for 1,200

An engine's KV cache of 28.6 GB holds 18 full-length trajectories at a time (56 KB a token).

From DeepEyes' scripts: batch, samples, lengths, turns, tensor-parallel size 1, lr, KL and entropy coefficients 0, GRPO, a
checkpoint every 8 steps, 80 steps, 32 GPUs. Ours, by the plan: micro-batches by tokens, the engine's share of the GPU.
The data are the 47k set: a visual-search file, a chart file and a reasoning file. Their rewards need a judge:
LLM_AS_A_JUDGE_BASE names its server (judge.py).
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
