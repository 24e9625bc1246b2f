"""The proof's settings: typed, frozen, and what a config of them may say."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxattn import experiments
from jaxattn.experiments import head
from jaxattn.experiments.experiment import stream
from jaxattn.experiments.proof import Bounds, ProofSettings, Shares
from jaxattn.fields import ConfigError

CONFIG = str(Path(__file__).parents[2] / "configs" / "gradients.py:smoke")


@pytest.fixture
def config():
    return experiments.load(CONFIG).config


def test_settings_are_typed_and_frozen(config):
    settings = experiments.resolve(config)
    assert isinstance(settings, ProofSettings)
    assert settings.bounds == Bounds(1e-12, 1e-5, 1e-6)
    assert settings.shares == Shares(seeds=2, steps=6)
    assert list(settings.arms) == ["sgd"]
    assert settings.config == config.to_dict()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.seeds = 3
    config.seeds = 3
    assert settings.seeds == 8


def test_a_short_run_is_of_fresh_sequences(config):
    """One for each step, other than those of the slopes and the held-out one."""
    config.task.length = 20
    settings = experiments.resolve(config)
    drawn = jax.jit(settings.draw)(jax.random.key(0))
    assert drawn.batches.inputs.shape == (6, 19, 20)
    problem = drawn.problem
    all_of_them = [*drawn.batches.inputs, problem.heldout.inputs]
    assert len({np.asarray(inputs).tobytes() for inputs in all_of_them}) == 7
    start = head.initial(config, experiments.Catalogue().tasks["sticky"])
    params = start(stream(jax.random.key(0), "init"))
    np.testing.assert_allclose(drawn.params.w_q, params.w_q, rtol=1e-6)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("task.length", 2001, "must be an integer from 2 to 2000"),
        ("model.d_k", 1001, "must be an integer from 1 to 1000"),
        ("arms.sgd.value_norm", True, "no such field"),
        ("arms.sgd.dropout_rate", 0.1, "no such field"),
        ("arms.sgd.algorithm", "sgd", "must be one of"),
        ("bounds.float32", 2.0, "must be a number from 0 to 1"),
        ("steps", 3, "no such field"),
    ],
)
def test_what_a_proof_may_not_be_is_one_line(config, field, value, said):
    *outer, last = field.split(".")
    inner = config
    for name in outer:
        inner = inner[name]
    with inner.unlocked():
        inner[last] = value
    with pytest.raises(ConfigError) as error:
        experiments.resolve(config)
    assert said in str(error.value)
    assert str(error.value).startswith(f"{field}={value!r}: ")
    assert "\n" not in str(error.value)
