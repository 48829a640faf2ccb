"""DeepEyes' 32B recipe: Qwen2.5-VL-32B on 64 GPUs, engines over 4 GPUs each, 20 turns. NOT YET RUN HERE.

Batch arithmetic as in 7b.py: 256 prompts x 16 samples, one update per step.
"""

base = "7b.py"
model = "Qwen2.5-VL-32B-Instruct"
out_dir = "out/32b"
rollout_tp = 4
max_turns = 20
max_images = 32
