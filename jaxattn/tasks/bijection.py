"""Bijection elimination: predict a value of a hidden bijection from earlier pairs.

A random bijection π of V symbols is shown pair by pair, no key twice: k_1 π(k_1) k_2
π(k_2) ... At each key its value is asked for. Earlier pairs tell only which values are
taken, so exact Bayes is uniform on those left: log2(V - k + 1) bits at pair k.

Tokens: key i is token i, value i is token V + i, i = 0..V-1. Positions 0, 2, 4, ...
hold keys and are scored, 1, 3, 5, ... hold values; the last value is only a target.

Source: the wind tunnels of arXiv 2512.22471.
"""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.fields import integer
from jaxattn.tasks.base import Batch, Keys, Task, TaskSpec, TransformerSpec
from jaxattn.theory.sizes import check_size


def num_tokens(num_symbols: int) -> int:
    """Size of the vocabulary: V keys, then V values."""
    return 2 * num_symbols


def num_positions(num_pairs: int) -> int:
    """T: two positions a pair, without the last value."""
    return 2 * num_pairs - 1


def scored(num_pairs: int) -> np.ndarray:
    """Positions that ask for something (T,) bool: those of keys."""
    return np.arange(num_positions(num_pairs)) % 2 == 0


def bijection(*, num_symbols: int, num_pairs: int) -> Task:
    """Returns the task, with a bijection drawn for each sequence.

    Args:
      num_symbols: V, at least 2; also the number of classes.
      num_pairs: L, from 1 to V; makes T = 2L - 1 positions.

    Returns:
      Task; targets are values' classes 0..V-1. Impossible are a key or a value shown
      twice, a key in a value's place or the reverse, and a token outside 0..2V-1.

    Raises:
      ValueError: a size out of range.
    """
    check_size("num_symbols", num_symbols, 2)
    check_size("num_pairs", num_pairs, 1, num_symbols)  # no key is shown twice
    asked = scored(num_pairs)

    def sample(key: jax.Array) -> Batch:
        shown_key, bijection_key = jax.random.split(key)
        keys = jax.random.permutation(shown_key, num_symbols)[:num_pairs]
        values = jax.random.permutation(bijection_key, num_symbols)[keys]
        tokens = jnp.stack([keys, num_symbols + values], axis=1).reshape(-1)[:-1]
        targets = jnp.where(asked, jnp.repeat(values, 2)[:-1], 0)
        return Batch(
            tokens.astype(jnp.int32),
            targets.astype(jnp.int32),
            jnp.asarray(asked, jnp.float32),
        )

    def bayes(batch: Batch) -> jax.Array:
        tokens = batch.inputs
        chex.assert_shape(tokens, asked.shape)
        position = jnp.arange(len(tokens), dtype=jnp.int32)
        is_value = tokens >= num_symbols
        known = (tokens >= 0) & (tokens < num_tokens(num_symbols))
        # Position of each token's first occurrence; tokens out of range are dropped.
        first = jnp.full((num_tokens(num_symbols),), len(tokens), jnp.int32)
        first = first.at[jnp.where(known, tokens, len(first))].min(
            position, mode="drop"
        )
        repeated = first[jnp.clip(tokens, 0, len(first) - 1)] < position
        impossible = ~known | (is_value == asked) | repeated
        left = first[None, num_symbols:] > position[:, None]
        log_left = -jnp.log(jnp.sum(left, axis=1, keepdims=True).astype(float))
        log_p = jnp.where(left, log_left, -jnp.inf)
        log_p = jnp.where(asked[:, None], log_p, -np.log(num_symbols))
        return jnp.where(jnp.cumsum(impossible)[:, None] > 0, jnp.nan, log_p)

    return Task(sample, bayes)


SPEC = TaskSpec(
    build=lambda fields, _: bijection(
        num_symbols=fields["num_symbols"], num_pairs=fields["num_pairs"]
    ),
    fields={"num_symbols": integer(2, 1000), "num_pairs": integer(1, 100_000)},
    positions=lambda fields: num_positions(fields["num_pairs"]),
    num_classes=lambda fields: fields["num_symbols"],
    # Each pair is scored alike: the mean of log(V - k + 1).
    entropy_rate=lambda fields: (
        sum(math.log(fields["num_symbols"] - k) for k in range(fields["num_pairs"]))
        / fields["num_pairs"]
    ),
    note="Entropy is a function of the position alone here: what is ordered by one is"
    " ordered by the other.",
    head=False,
    transformer=TransformerSpec(
        num_tokens=lambda fields: num_tokens(fields["num_symbols"]),
        scored=lambda fields: fields["num_pairs"],
        position_name="pair",
        keys=lambda fields: Keys(0, fields["num_symbols"], fields["num_pairs"]),
        wrong=lambda fields: (
            ("num_pairs", f"at most num_symbols, {fields['num_symbols']}")
            if fields["num_pairs"] > fields["num_symbols"]
            else None
        ),
    ),
)
