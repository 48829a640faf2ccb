"""Mistakes in a configuration: one sentence each, naming the place."""

import pytest

from config import ConfigError, load_config


def write(tmp_path, text, name="c.py"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model = 'm'\nlearning_rat = 1", ":2: unknown key 'learning_rat'"),
        ("model = 'm'\nstepz = 1", ":2: unknown key 'stepz'; did you mean 'steps'?"),
        ("model = 'm'\nsteps = 'ten'", ":2: steps must be int, but is 'ten'"),
        ("model = 'm'\nsteps = 1.5", ":2: steps must be int, but is 1.5"),
        ("model = 'm'\nsteps = True", ":2: steps must be int, but is True"),
        ("model = 'm'\ntrain_files = ['a', 3]", ":2: train_files must be list[str], but is ['a', 3]"),
        ("model = 'm'\nlr = open('x')", ":2: the value of 'lr' is not a literal"),
        ("import os", ":1: a config file holds only assignments `key = value`"),
        ("model = ", ":1: not valid Python"),
        ("steps = 3", "model is not set"),
        (
            "model = 'm'\nresampling = 'nearest'",
            "resampling must be one of box, bilinear, bicubic, lanczos, but is 'nearest'",
        ),
        ("model = 'm'\nmin_pixels = 9\nmax_pixels = 4", "min_pixels 9 is above max_pixels 4"),
        ("model = 'm'\ngroup_size = 0", "group_size must be at least 1, but is 0"),
    ],
)
def test_mistakes_are_named(tmp_path, text, expected):
    with pytest.raises(ConfigError) as e:
        load_config([write(tmp_path, text)])
    assert expected in str(e.value)
    assert "\n" not in str(e.value)


def test_missing_file_and_command_line(tmp_path):
    with pytest.raises(ConfigError, match="config file 'nowhere.py': no such file or directory"):
        load_config(["nowhere.py"])
    good = write(tmp_path, "model = 'm'")
    with pytest.raises(ConfigError, match="'--steps' on the command line lacks a value"):
        load_config([good, "--steps"])
    with pytest.raises(ConfigError, match="--step: unknown key 'step'; did you mean 'steps'"):
        load_config([good, "--step=3"])
    with pytest.raises(ConfigError, match="usage"):
        load_config([])


def test_inheritance_and_precedence(tmp_path):
    write(tmp_path, "'''doc'''\nmodel = 'm'\nsteps = 4\nlr = 2e-4\nprompts_per_step = 4 * 8", "base.py")
    child = write(tmp_path, "base = 'base.py'\nsteps = 5\nenv_name = ''")
    cfg = load_config([child, "--lr=1", "--model=123", "--stop=['</tool_call>']"])
    assert (cfg.model, cfg.steps, cfg.lr, cfg.prompts_per_step) == ("123", 5, 1.0, 32)
    assert isinstance(cfg.lr, float)
    assert cfg.env_name == "" and cfg.stop == ["</tool_call>"]
    with pytest.raises(ConfigError, match="base.py:4: lr must be float"):
        write(tmp_path, "model = 'm'\n\n\nlr = 'x'", "base.py")
        load_config([child])


@pytest.mark.parametrize("name", ["toy", "3b_1gpu", "7b", "32b"])
def test_shipped_configs_load(name):
    assert load_config([f"configs/{name}.py"]).steps > 0


def test_published_numbers_of_the_7b_recipe():
    cfg = load_config(
        ["configs/7b.py"]
    )  # DeepEyes: 256 prompts x 16, lr 1e-6, prompt 8192, response 20480, 10240 a turn, 5 turns
    assert (cfg.prompts_per_step, cfg.group_size, cfg.lr) == (256, 16, 1e-6)
    assert (cfg.max_prompt_len, cfg.max_response_len, cfg.max_turn_len, cfg.max_turns, cfg.rollout_tp) == (
        8192,
        20480,
        10240,
        5,
        1,
    )
    cfg = load_config(["configs/32b.py"])
    assert (cfg.rollout_tp, cfg.max_turns, cfg.prompts_per_step) == (4, 20, 256)
