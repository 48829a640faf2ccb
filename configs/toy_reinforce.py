"""REINFORCE++ on the embedded task: no groups, no critic; returns whitened over the batch."""

base = "toy.py"
out_dir = "out/toy_reinforce"
advantage = "reinforce_pp"
group_size = 1
prompts_per_step = 16 * 8
