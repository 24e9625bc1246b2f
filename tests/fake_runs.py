"""Finished runs of made-up numbers, for the tests of what reads them."""

import numpy as np

from jaxattn import experiments
from jaxattn.engine import training
from jaxattn.measures import trajectory
from jaxattn.runs import write


def write_run(folder, config, curves, maps=None, target=None):
    """Writes a finished run of made-up curves, by metric, and attention maps.

    Without a grid all else that is recorded is made up too, of `maps` or of none.

    Args:
      folder: to write to; there is no summary yet.
      config: to resolve.
      curves: metric -> (arm, seed, evaluation), or with points of a grid.
      maps: attention (arm, snapshot seed, snapshot, query, source), if any.
      target: of each query at every snapshot; else random.

    Returns:
      The run as it is read, with `wall_seconds`.
    """
    experiment = experiments.resolve(config)
    steps = experiment.evaluation_steps()
    finite = np.all([np.isfinite(curve) for curve in curves.values()], axis=0)
    since = np.where(finite.all(axis=-1), -1, steps[np.argmin(finite, axis=-1)])
    traits, snapshots = {}, {}
    if experiment.grid is None:
        rng = np.random.default_rng(1)
        falling = np.linspace(1, 0, len(steps)) * np.ones((*since.shape, 1))
        curves = {n: 0.2 + 0.5 * falling for n in trajectory.CURVES} | curves
        curves = {"attention_drift": falling} | curves
        traits = {n: rng.uniform(0.3, 0.9, since.shape) for n in trajectory.TRAITS}
        traits |= {"bayes_accuracy": np.full(since.shape, 0.3)}
        if maps is not None:
            leading, widths = maps.shape[:-1], {"query": 4, "key": 4}
            snapshots = {"attention": maps, "target": rng.integers(0, 8, leading)}
            if target is not None:
                snapshots["target"][:] = target
            for name in ("query", "key", "value", "upstream"):
                snapshots[name] = rng.normal(size=(*leading, widths.get(name, 3)))
            allowed = np.tri(maps.shape[-1], dtype=bool)
            constants = {"attention_allowed": allowed}
    seeds = np.arange(experiment.seeds)
    found = training.Records(seeds, curves, since, traits, snapshots)
    arrays, axes, coordinates = training.labelled(experiment, found)
    if maps is not None:
        arrays |= constants
    elif experiment.snapshots is not None:
        left = {*experiment.snapshots.axes}
        arrays = {n: a for n, a in arrays.items() if n not in left}
        axes = {n: a for n, a in axes.items() if n not in left}
        coordinates = {n: c for n, c in coordinates.items() if "snapshot" not in n}
    record = training.recorded(experiment)
    run = write.write_metrics(folder, record, arrays, axes, coordinates)
    return run.assign_attrs(wall_seconds={"compile": 1.0, "run": 2.0})


def write_records(folder, experiment, found):
    """Writes the records of a finished run; there is no summary yet."""
    labelled = training.labelled(experiment, found)
    run = write.write_metrics(folder, training.recorded(experiment), *labelled)
    return run.assign_attrs(wall_seconds={"compile": 1.0, "run": 2.0})
