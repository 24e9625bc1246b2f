"""Measures: scalars computed from a model at every evaluation, beside their nulls."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxattn.tasks.base import Batch


class Observed(NamedTuple):
    """A model and its output on one sequence: the argument of a measure."""

    params: Any
    batch: Batch
    log_bayes: jax.Array  # nats (T, C)
    output: Any  # `attention.Forward` of a head, `Activations` of a transformer


class Measure(NamedTuple):
    """A scalar computed at every evaluation, beside its null.

    Both are pure functions of an `Observed` and a random key, and return a scalar, NaN
    where it is undefined.
    """

    about: str  # for a row of a table
    of: Callable[[Observed, jax.Array], jax.Array]
    null: Callable[[Observed, jax.Array], jax.Array] | None = None
    unit: str = ""
