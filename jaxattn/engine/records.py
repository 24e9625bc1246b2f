"""What is recorded of seeds: joined, picked and filled up, by rising ids."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxattn.experiments import Experiment

Shapes = Mapping[str, tuple[int, ...]]


class Records(NamedTuple):
    """What is recorded of some seeds; on a grid its points are the second axis."""

    seeds: np.ndarray  # (seed,) their ids, rising
    # metric -> (arm, seed, evaluation, ...), NaN if to come, or if an arm has no such.
    curves: dict[str, np.ndarray]
    # (arm, seed): the last step after which all weights were finite, if the next undid
    # it; or where a judged metric was not finite, if that was before; -1: neither.
    diverged_step: np.ndarray
    # What is recorded once, of a finished seed.
    traits: dict[str, np.ndarray]  # (arm, seed, ...)
    # (arm, snapshot seed, snapshot, ...), of the snapshot seeds that are among these.
    snapshots: dict[str, np.ndarray]
    # What arms ended with, lead with seed, if it is to be recorded; else ().
    weights: Any = ()


class Layout(NamedTuple):
    """Shapes of what is recorded of a seed, after the axes of arms and seeds."""

    curves: Shapes  # with the evaluation
    traits: Shapes
    snapshots: Shapes


def seed_axis(experiment: Experiment) -> int:
    """Of curves and traits: after that of arms, and of points."""
    return 1 + len(experiment.over_points)


def is_snapshot_seed(experiment: Experiment, seeds: np.ndarray) -> np.ndarray:
    """Whether snapshots are recorded of each of some seeds."""
    chosen = () if experiment.snapshots is None else experiment.snapshots.seeds
    return np.isin(seeds, chosen)


def empty(experiment: Experiment, layout: Layout, seeds: np.ndarray) -> Records:
    """Records of seeds before anything is recorded.

    Args:
      experiment: that they are of.
      layout: of what there will be.
      seeds: their ids.
    """
    num_arms = len(experiment.arms)
    of_seed = (num_arms, *experiment.over_points, len(seeds))
    chosen = num_arms, int(is_snapshot_seed(experiment, seeds).sum())

    def unknown(leading: tuple[int, ...], shapes: Shapes) -> dict[str, np.ndarray]:
        return {
            name: np.full((*leading, *shape), np.nan, np.float32)
            for name, shape in shapes.items()
        }

    return Records(
        seeds,
        unknown(of_seed, layout.curves),
        np.full(of_seed, -1, np.int32),
        unknown(of_seed, layout.traits),
        unknown(chosen, layout.snapshots),
    )


def join(experiment: Experiment, parts: Sequence[Records]) -> Records:
    """Joins records of several groups of seeds, by rising ids."""
    seeds = np.concatenate([part.seeds for part in parts])

    def together(field: str, axis: int) -> dict[str, np.ndarray]:
        fields = [getattr(part, field) for part in parts]
        return {n: np.concatenate([f[n] for f in fields], axis) for n in fields[0]}

    joined = Records(
        seeds,
        together("curves", seed_axis(experiment)),
        np.concatenate([part.diverged_step for part in parts], axis=-1),
        together("traits", seed_axis(experiment)),
        together("snapshots", 1),
        jax.tree.map(lambda *own: np.concatenate(own), *[p.weights for p in parts]),
    )
    return pick(experiment, joined, np.argsort(seeds))


def pick(experiment: Experiment, records: Records, which: np.ndarray) -> Records:
    """Selects some of the seeds, by their places."""
    chosen = is_snapshot_seed(experiment, records.seeds)
    place = np.cumsum(chosen) - 1  # of a snapshot seed among its likes
    places = place[which][chosen[which]]
    axis = seed_axis(experiment)
    return Records(
        records.seeds[which],
        {name: np.take(curve, which, axis) for name, curve in records.curves.items()},
        records.diverged_step[..., which],
        {name: np.take(trait, which, axis) for name, trait in records.traits.items()},
        {name: array[:, places] for name, array in records.snapshots.items()},
        jax.tree.map(lambda leaf: leaf[which], records.weights),
    )
