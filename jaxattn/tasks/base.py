"""Tasks as pure functions of a sequence, and the fields by which a config names one."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from jaxattn.fields import Fields

TaskFields = Mapping[str, Any]  # `task` fields of a config


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


class Keys(NamedTuple):
    """Positions of which the keys are analysed: those that show one of some tokens."""

    first_token: int
    end_token: int  # the first after those that count
    count: int  # of such positions, the first of a sequence; 0: all


def _unknown(fields: TaskFields) -> None:
    """Returns None: the entropy rate has no closed form."""
    return None


def _fits(fields: TaskFields) -> tuple[str, str] | None:
    """Returns None: fields that are each right fit together."""
    return None


class TransformerSpec(NamedTuple):
    """Facts of a task that transformer experiments need, as functions of its fields."""

    num_tokens: Callable[[TaskFields], int]  # 0: inputs are vectors, of width `d_x`
    scored: Callable[[TaskFields], int]  # positions of each sequence with a weight
    position_name: str  # of these
    keys: Callable[[TaskFields], Keys]
    # log p of hidden states given tokens (T,); None: beliefs are about the targets.
    log_beliefs: Callable[[TaskFields, jax.Array], jax.Array] | None = None
    # Which field makes sequences longer, if any can be without other rules.
    longer: str | None = None
    # Of fields that do not fit together: one of them, and what it must be.
    wrong: Callable[[TaskFields], tuple[str, str] | None] = _fits


class TaskSpec(NamedTuple):
    """A task that a config can name, as functions of its `task` fields."""

    build: Callable[[TaskFields, jax.Array], Task]  # fields, embedding key -> task
    fields: Fields  # rules of the fields, beside the name
    positions: Callable[[TaskFields], int]  # T
    num_classes: Callable[[TaskFields], int]
    causal: bool = True  # whether a head may only attend to the past
    entropy_rate: Callable[[TaskFields], float | None] = _unknown  # nats
    learned: str = "heldout_kl"  # the metric whose fall measures what is learned
    shown: str = "heldout"  # the sequence that is analysed: "heldout" or "train"
    lag: int = 0  # position t shows the target of position t - lag
    note: str = ""  # for the top of a report
    head: bool = True  # whether one head can be trained on it
    transformer: TransformerSpec | None = None  # None: not for transformers


def require_probability(name: str, value: float) -> None:
    """Raises ValueError, naming it, unless a value is a number from 0 to 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r}: must be a number from 0 to 1")
