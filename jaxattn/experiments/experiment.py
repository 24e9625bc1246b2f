"""An experiment: what a config asks for, resolved once into typed data and closures.

The engine calls the closures and knows nothing of tasks, models or measures. Closures
are of one seed; callers `vmap`. Random numbers derive from one root key, folded with
the seed's id and the name of a stream, so that a seed's numbers never depend on which
other seeds or arms run.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxattn.algorithms import Algorithm
from jaxattn.measures.trajectory import Retraced
from jaxattn.tasks import Batch

_STREAMS = ("init", "data", "eval", "step", "embedding", "walk")

Options = Mapping[str, jax.Array]  # of a point of a grid; empty without a grid
Metrics = dict[str, jax.Array]


class Problem(NamedTuple):
    """What one seed is given: what it trains on, and what it is evaluated on."""

    train: Batch  # (batch_size, ...)
    heldout: Batch  # one sequence, or (N, ...)
    log_bayes_train: jax.Array  # (batch_size, T, C), nats
    log_bayes_heldout: jax.Array  # (T, C), or (N, T, C), nats


class Scores(NamedTuple):
    """What an evaluation gives."""

    metrics: Metrics
    trail: Any  # recorded for `Arm.retrace`; None: the parameters


class Claim(NamedTuple):
    """A statement about two arms: the first has less, or more, of a metric."""

    text: str
    arm: str
    baseline: str
    metric: str
    direction: str  # "less" or "more"


class Need(NamedTuple):
    """Host memory that tracing needs, and the field that decides on it."""

    size: int  # bytes
    most: Callable[[int], str]  # bytes that there are -> "FIELD=VALUE: must be ..."


class Snapshots(NamedTuple):
    """Arrays that are recorded of some seeds at some evaluations."""

    seeds: tuple[int, ...]
    count: int  # of evaluations, evenly spaced from the first to the last
    axes: Mapping[str, tuple[str, ...]]  # array -> its axes after arm, seed, step
    constants: Callable[[], Mapping[str, np.ndarray]]  # the same for all
    field: str  # a smaller value of which makes them smaller


class Grid(NamedTuple):
    """Points at which every arm runs on every seed."""

    points: Mapping[str, np.ndarray]  # coordinate -> (P,)
    options: Mapping[str, np.ndarray]  # (P,), what `batch` and `score` are told


@dataclasses.dataclass(frozen=True)
class Arm:
    """An arm: how parameters are trained, as closures of one seed.

    Arms of equal `program` share what trains them, arms of equal `reading` what
    evaluates them; their closures must then do the same but for the rates.
    """

    name: str
    program: Hashable
    reading: Hashable
    rates: Mapping[str, np.ndarray]  # scalars, or (P,) at the points of a grid
    start: Callable[[jax.Array], Any]  # key -> parameters
    algorithm: Callable[[Mapping[str, Any]], Algorithm]  # of rates, maybe traced
    # (key, parameters, problem, step, options) -> Scores.
    score: Callable[[jax.Array, Any, Problem, jax.Array, Options], Scores]
    # (key, trail (E, ...), final parameters, problem) -> Retraced; None: nothing.
    retrace: Callable[[jax.Array, Any, Any, Problem], Retraced] | None = None
    # (parameters at some evaluations (K, ...), problem) -> arrays (K, ...).
    snapshots: Callable[[Any, Problem], Metrics] | None = None


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Arms, seeds and steps, and closures that say what happens in them."""

    name: str
    seeds: int
    root: int  # of every random key
    steps: int
    eval_every: int
    arms: tuple[Arm, ...]
    draw: Callable[[jax.Array], Problem]  # a seed's key -> its problem
    # (key, step, options, problem) -> the sequences of a step.
    batch: Callable[[jax.Array, jax.Array, Options, Problem], Batch]
    judged: tuple[str, ...]  # metrics; a seed has diverged where one is not finite
    axes: Mapping[str, tuple[str, ...]]  # metric -> its axes after arm, seed, step
    config: Mapping[str, Any]  # plain, as it is written to config.json
    facts: Mapping[str, Any]  # plain: what reports need to know beside it
    impossible: str  # what is wrong if exact Bayes gives NaN: evidence of probability 0
    grid: Grid | None = None
    snapshots: Snapshots | None = None
    needs: tuple[Need, ...] = ()

    @property
    def evaluation_count(self) -> int:
        """How many evaluations there are."""
        return -(-self.steps // self.eval_every) + 1

    @property
    def over_points(self) -> tuple[int, ...]:
        """(P,) on a grid, () without one."""
        if self.grid is None:
            return ()
        return np.shape(next(iter(self.grid.points.values())))

    def evaluation_steps(self) -> np.ndarray:
        """Steps after which metrics are taken: 0, every `eval_every`, and the last."""
        return np.append(np.arange(0, self.steps, self.eval_every), self.steps)

    def snapshot_indices(self) -> list[int]:
        """Evaluations at which snapshots are taken."""
        if self.snapshots is None:
            return []
        last = self.evaluation_count - 1
        even = np.linspace(0, last, self.snapshots.count).round()
        return np.unique(even).astype(int).tolist()

    def seed_key(self, seed_id: jax.Array) -> jax.Array:
        """The key of a seed, which all of its random numbers derive from."""
        return jax.random.fold_in(jax.random.key(self.root), seed_id)


def stream(key: jax.Array, name: str) -> jax.Array:
    """Derives the key of a named stream, one of init, data, eval, step, ...

    Args:
      key: of a seed.
      name: of the stream.
    """
    return jax.random.fold_in(key, _STREAMS.index(name))


def draw_several(
    sample: Callable[[jax.Array], Batch], key: jax.Array, count: int
) -> Batch:
    """Draws several sequences, each with a key of its own.

    Args:
      sample: key -> one sequence.
      key: to derive theirs from.
      count: of sequences N.

    Returns:
      Batch (N, ...).
    """
    return jax.vmap(lambda n: sample(jax.random.fold_in(key, n)))(
        jax.numpy.arange(count)
    )
