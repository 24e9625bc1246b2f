"""What a measure is: a number asked of a model, and the same under its null."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxattn.tasks.base import Batch


class Observed(NamedTuple):
    """A model on one sequence, as a measure is given it."""

    params: Any
    batch: Batch
    log_bayes: jax.Array  # nats (T, C)
    output: Any  # `attention.Forward` of a head, `transformer.Activations` of layers


class Measure(NamedTuple):
    """A number asked of a model at every evaluation, beside its null.

    Both are pure functions of what is observed and a random key, and give a scalar, NaN
    where the question has no answer.
    """

    about: str  # for a row of a table
    of: Callable[[Observed, jax.Array], jax.Array]
    null: Callable[[Observed, jax.Array], jax.Array] | None = None
    unit: str = ""
