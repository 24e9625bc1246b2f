"""Attention masks: the causal one, and which inputs a mask leaves unused.

A mask is boolean (T, S), True where query i may attend to source j; None allows all.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.theory.sizes import check_size


def causal_mask(length: int) -> np.ndarray:
    """Mask of a causal head: m_ij = (j ≤ i), diagonal included.

    A NumPy constant, so that a function that gets it can tell while tracing that it is
    causal (`is_causal`) and skip the masked half.

    Args:
      length: T, at least 1.

    Returns:
      Boolean (T, T).

    Raises:
      ValueError: the length is not an integer, or below 1.
    """
    check_size("length", length)
    return np.tri(length, dtype=bool)


def is_causal(mask) -> bool:
    """Whether `mask` is known, while tracing, to be the causal mask."""
    if mask is None or isinstance(mask, jax.core.Tracer):
        return False
    return np.array_equal(mask, causal_mask(len(mask)))


def finite_rows(array: jax.Array) -> jax.Array:
    """Which rows (n,) of an array (n, d) hold finite numbers only."""
    return jnp.isfinite(array).all(axis=1)


def only_used(inputs: jax.Array, mask, share: jax.Array | None = None) -> jax.Array:
    """Replaces by 0 the inputs that are not finite and that the loss does not use.

    Position j is used where it counts as a query (share_j ≠ 0, and its row is not
    fully masked), or where the mask allows it to a query that counts. Padding, whatever
    it holds, then reaches no number and no gradient.

    Args:
      inputs: x (T, d_x).
      mask: boolean (T, T), True where i may attend to j; None allows all.
      share: of each query in the loss (T,); default: rows that are not fully masked.

    Returns:
      (T, d_x).
    """
    causal = is_causal(mask)
    if mask is None or (share is None and causal):
        return inputs
    counts = True if causal else jnp.any(jnp.asarray(mask), axis=1)
    counts = counts if share is None else counts & (share != 0)
    if causal:  # without an array of all pairs
        used = jax.lax.cummax(counts.astype(jnp.int8), reverse=True) > 0
    else:
        used = counts | jnp.any(jnp.asarray(mask) & counts[:, None], axis=0)
    return jnp.where((used | finite_rows(inputs))[:, None], inputs, 0)
