"""DeepEyes' task on one 80 GB GPU: Qwen2.5-VL-3B, all of the language model trained, the vision tower frozen. NOT YET RUN.

Batch: 32 prompts x 8 samples = 256 trajectories a step, one update each (DeepEyes: 256 x 16 on 32 GPUs).
Tokens: prompt up to 4,096, response up to 8,192 with observations, 2,048 a turn, 5 turns: 256 x 12,288 = 3.1 M a step
at most, in micro-batches of 16,384 (192 if all were full-length). An image has 1,280 at most, a trajectory of 5 turns 5 images.

Memory, from `python train.py --plan configs/3b_1gpu.py --num_gpus=1` with the published shape (3.75 B parameters):

    GPU, rollout   74 GB = weights 14 + Adam 23 + engine 32 (weights 7, KV cache 21: 49 full-length trajectories) + reserve 5
    GPU, update    70 GB = weights 14 + gradients 12 + Adam 23 + bfloat16 copies 7 + activations 7 + the rest 2 + reserve 5
    host           20 GB while loading, 12 in a step

Why so: with the vision tower trained as well the update takes 88 GB. With --offload=True, which keeps weights and moments on
the host (104 GB there at most) and is slower, it fits, on a 48 GB GPU too (--freeze_vision=False --engine_gpu_frac=0.6). With
LoRA (--lora_rank=32 --lr=1e-5 --engine_gpu_frac=0.6) the fullest phase takes 68 GB and the update 28, which leaves room for
longer responses; all weights are the default since that is what DeepEyes trains. Batch and lengths are ours, scaled down from
DeepEyes' scripts; image sizes, turns, learning rate, clipping and the objective are theirs, through 7b.py.
"""

base = "7b.py"
model = "Qwen2.5-VL-3B-Instruct"  # a local Hugging Face folder
out_dir = "out/3b_1gpu"

prompts_per_step = 32
group_size = 8
max_prompt_len = 4096
max_response_len = 8192
max_turn_len = 2048
microbatch_tokens = 16384

freeze_vision = True
engine_gpu_frac = 0.4  # the trainer's 37 GB of weights and moments stay on the GPU during the rollout
keep_checkpoints = 1  # 37 GB each
