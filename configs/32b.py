"""DeepEyes' 32B recipe: Qwen2.5-VL-32B on 64 80 GB GPUs, engines over 4 GPUs each, 20 turns. NOT YET RUN.

Batch: as in 7b.py, 256 prompts x 16 samples = 4,096 trajectories a step, one update each: 64 per GPU, 256 per engine.
Tokens: the same lengths over up to 20 turns; 117 M a step at most, 56 full micro-batches of 32,768 on each GPU.

Memory, from `python train.py --plan configs/32b.py` with the published shape (33.5 B parameters), 64 GPUs:

    GPU, rollout   59 GB = weights and Adam 6 + engine 48 (weights 16, KV cache 28: 16 full-length trajectories) + reserve 5
    GPU, update    69 GB = weights, gradients, Adam 8 + gathered units 14 + activations 40 + the rest 2 + reserve 5
    host          173 GB while loading, the first one: it reads the whole model in float32, 125 GB; the others 48
    host          124 GB in a step at most, with 20 images of the largest size in every trajectory

32 GPUs fit too, with 3 GB to spare; 16 do not. From DeepEyes' scripts: 64 GPUs, tensor-parallel size 4, 20 turns, and all
that 7b.py says; max_images is ours.
"""

base = "7b.py"
model = "Qwen2.5-VL-32B-Instruct"  # a local Hugging Face folder
out_dir = "out/32b"
rollout_tp = 4
max_turns = 20
max_images = 32
