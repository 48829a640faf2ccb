"""PPO on the embedded task: generalised advantages from a critic of the policy's own size, 16 MB more with its moments."""

base = "toy.py"
out_dir = "out/toy_ppo"
advantage = "gae"
critic_lr = 1e-3
critic_warmup_steps = 3
