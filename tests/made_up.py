"""A finished run of one head with made-up numbers, as fixtures."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from fake_runs import write_run

from jaxattn import experiments
from jaxattn.analysis import entries, head

ARMS = ("sgd", "values_fast", "adam")
SEEDS = 8
WALL = {"compile": 1.0, "run": 2.0}


class Made(NamedTuple):
    """Numbers of a run."""

    curves: dict
    maps: np.ndarray | None


@pytest.fixture
def config():
    config = experiments.load("configs/sticky.py:smoke").config
    config.update({"seeds": SEEDS, "steps": 100, "eval_every": 50, "run_arms": ARMS})
    config.update({"snapshots": 2})
    return config


@pytest.fixture
def made():
    """values_fast twice as fast as sgd, adam over-fits, its seed 3 diverges."""
    rng = np.random.default_rng(0)
    start = 2.1 + 0.01 * rng.random(SEEDS)
    fall = {
        "sgd": [0, 0.02, 0.04],
        "values_fast": [0, 0.05, 0.1],
        "adam": [0, 0.3, 0.5],
    }
    train = np.stack([start[:, None] - np.array(fall[arm]) for arm in ARMS])
    curves = {name: np.ones((3, SEEDS, 3)) for name in entries.METRICS}
    curves |= {
        "train_loss": train,
        "train_bayes_nll": np.full_like(train, 1.9),
        "heldout_bayes_nll": np.full_like(train, 1.91),
        "heldout_kl": train - 1.5,
        "heldout_loss": train + np.array([0, 0, 1])[:, None, None],
    }
    for curve in curves.values():
        curve[2, 3, 2] = np.nan  # though at 50 steps it was below sgd's last
    maps = np.stack([np.tri(6) / np.arange(1, 7)[:, None], np.eye(6)])
    return Made(curves, np.stack([maps[None]] * 3))


@pytest.fixture
def run(tmp_path, config, made):
    run = write_run(tmp_path, config, *made)
    return run.assign_attrs(summary=head.summarise(run, WALL))


def path_of(run):
    return Path(run.attrs["path"])
