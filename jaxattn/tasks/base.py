"""What every task is made of: a sampler of sequences, and their exact Bayes answer."""

from collections.abc import Callable
from typing import NamedTuple

import jax


class Batch(NamedTuple):
    """One sequence; samples of several stack along a leading axis."""

    inputs: jax.Array  # (T, d_x), or tokens (T,)
    targets: jax.Array  # (T,), class indices; or their probabilities (T, C)
    weights: jax.Array | None = None  # (T,) position weights, None for all equal


class Task(NamedTuple):
    """Pure functions of one sequence.

    `bayes` gives log p(y_t | x_1..x_t), in nats (T, C). From the first position whose
    evidence has probability zero its rows are NaN: flagged, never a made-up posterior.
    """

    sample: Callable[[jax.Array], Batch]  # random key -> one sequence
    bayes: Callable[[Batch], jax.Array]


def require_probability(name: str, value: float) -> None:
    """Raises ValueError, naming it, unless a value is a number from 0 to 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r}: allowed: a number from 0 to 1")
