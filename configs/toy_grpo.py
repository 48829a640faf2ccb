"""GRPO on the embedded task: the base configuration itself."""

base = "toy.py"
out_dir = "out/toy_grpo"
advantage = "grpo"
