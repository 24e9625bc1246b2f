"""The sticky chain: predict the next symbol of a Markov chain seen through noise.

Symbols on a ring stay, or jump with probability ∝ 1 / ring distance. Position t shows
x_t = mu[y_{t-1}] + N(0, I) and asks for y_t. Since y_{t-1} is itself hidden, exact
Bayes is not P[y_{t-1}] but a filter over x_1..x_t.

Source: arXiv 2512.22473, section 7.2, and the authors' public script.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.fields import integer, number
from jaxattn.tasks import markov
from jaxattn.tasks.base import (
    Batch,
    Keys,
    Task,
    TaskSpec,
    TransformerSpec,
    require_probability,
)
from jaxattn.theory.sizes import check_size


def transition_matrix(num_symbols: int, stay: float) -> np.ndarray:
    """P[i, i] = stay; P[i, j] ∝ 1 / ring distance of i and j.

    Args:
      num_symbols: n, at least 2.
      stay: probability of not moving, in [0, 1].

    Returns:
      P (n, n), float64; circulant, so the uniform distribution is stationary.

    Raises:
      ValueError: a number out of range.
    """
    check_size("num_symbols", num_symbols, 2)
    require_probability("stay", stay)
    step = np.arange(num_symbols)
    distance = np.minimum(step, num_symbols - step)
    pull = np.where(distance > 0, 1 / np.maximum(distance, 1), 0)
    first_row = np.where(distance > 0, (1 - stay) * pull / pull.sum(), stay)
    return np.stack([np.roll(first_row, shift) for shift in step])


def sticky(
    *, length: int, num_symbols: int, d_x: int, stay: float, embedding_key: jax.Array
) -> Task:
    """Returns the task, with embeddings mu ~ N(0, I) drawn from `embedding_key`.

    Args:
      length: symbols drawn, at least 2; makes T = length - 1 pairs (x_t, y_t).
      num_symbols: n, at least 2; also the number of classes.
      d_x: width of the inputs.
      stay: probability of not moving, in [0, 1].
      embedding_key: random key of mu (n, d_x).

    Returns:
      Task. For a causal head: x_{t+1} reveals y_t.

    Raises:
      ValueError: a number out of range.
    """
    check_size("length", length, 2)
    check_size("d_x", d_x, 1)
    transition = transition_matrix(num_symbols, stay)
    embedding = jax.random.normal(embedding_key, (num_symbols, d_x))

    def sample(key: jax.Array) -> Batch:
        start_key, step_key, noise_key = jax.random.split(key, 3)
        start = jax.random.randint(start_key, (1,), 0, num_symbols)
        # On a ring with a circulant P, steps are independent: no scan over time.
        log_step = jnp.log(jnp.asarray(transition[0], embedding.dtype))
        steps = jax.random.categorical(step_key, log_step, shape=(length - 1,))
        symbols = jnp.cumsum(jnp.concatenate([start, steps])) % num_symbols
        noise = jax.random.normal(noise_key, (length - 1, d_x), embedding.dtype)
        return Batch(embedding[symbols[:-1]] + noise, symbols[1:])

    def bayes(batch: Batch) -> jax.Array:
        difference = batch.inputs[:, None] - embedding[None]
        log_likelihood = -jnp.sum(difference**2, axis=2) / 2
        dtype = log_likelihood.dtype
        return markov.forward_filter(
            jnp.full((num_symbols,), -np.log(num_symbols), dtype),
            jnp.log(jnp.asarray(transition, dtype)),
            log_likelihood,
        ).log_prediction

    return Task(sample, bayes)


SPEC = TaskSpec(
    build=lambda fields, key: sticky(
        length=fields["length"],
        num_symbols=fields["num_symbols"],
        d_x=fields["d_x"],
        stay=fields["stay"],
        embedding_key=key,
    ),
    fields={
        "length": integer(2, 1_000_000),
        "num_symbols": integer(2, 1000),
        "d_x": integer(1, 100_000),
        "stay": number(0, 1),
        "embedding_seed": integer(-1, 2**31 - 1),  # -1: each seed has its own
    },
    positions=lambda fields: fields["length"] - 1,
    num_classes=lambda fields: fields["num_symbols"],
    entropy_rate=lambda fields: markov.entropy_rate(
        transition_matrix(fields["num_symbols"], fields["stay"])
    ),
    lag=1,
    transformer=TransformerSpec(
        num_tokens=lambda fields: 0,
        scored=lambda fields: fields["length"] - 1,
        position_name="position",
        keys=lambda fields: Keys(0, 0, 0),
    ),
)
