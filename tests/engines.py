"""Small experiments, compiled, for the tests of the engine."""

import jax

from jaxattn import experiments
from jaxattn.engine import Settings, plan, rounds

FEW = {
    "run_arms": ("sgd_10x", "sgd"),
    "snapshot_seeds": (),
    "diagnostics_length": 0,
    # Autodiff of short sequences compiles in less time.
    "gradient": "autodiff",
    "task.length": 60,
}


def small_source(**changes):
    """A config of two arms that share a program: compiling is what takes the time.

    Not in the order of the alphabet, in which JAX gives back what is in a dict;
    analysed by those tests alone that say so.
    """
    config = experiments.load("configs/sticky.py:smoke").config
    config.update_from_flattened_dict(FEW | changes)
    config.baseline = config.run_arms[0]
    return config.unlock()


def small_config(**changes):
    """Resolves `small_source`."""
    return experiments.resolve(small_source(**changes))


def small_grid(**changes):
    """Resolves one arm on the grid of the smoke variant."""
    config = experiments.load("configs/rates.py:smoke").config
    few = {"run_arms": ("two_timescale",), "steps": 6, "eval_every": 3}
    config.update_from_flattened_dict(few | {"gradient": "autodiff"} | changes)
    return experiments.resolve(config)


def build(experiment, workers=1, devices=1, **settings):
    """Compiles an experiment."""
    where = jax.devices()[:devices]
    programs, _ = plan.compiled(
        experiment, where, Settings(workers=workers, **settings)
    )
    return programs


def advance_all(programs, carry):
    """Trains to the end."""
    while not rounds.is_done(programs.experiment, carry):
        carry = rounds.advance(programs, carry)
    return rounds.finished(programs.experiment, carry)


def run(experiment, workers=1, **settings):
    """Compiles and trains."""
    return advance_all(build(experiment, workers, **settings), rounds.start())
