"""REINFORCE++ on the embedded task: no critic and no group baseline; returns are whitened over the whole batch."""

base = "toy.py"
out_dir = "out/toy_reinforce"
advantage = "reinforce_pp"
