"""Dropout of attention weights, whose random bits a tile computes for itself.

The mask is that of `jax.random.bernoulli(key, 1 - rate, (H, T, S))`, whatever the
blocks, and never exists as a whole.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from jaxattn.kernels.tiles import Plan, Tile, count


def check_dropout(rate: float, key, slot, num_heads: int):
    """Checks the arguments of `attend` for dropout.

    Args:
      rate: share of weights that is dropped.
      key: random key, typed or raw, of any generator.
      slot: slice of the mask that each head takes, (H,), or None.
      num_heads: H.

    Returns:
      Two words of the key, and the slot of each head; None at rate 0.

    Raises:
      ValueError: an argument has a wrong shape, type or value.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate={rate!r}: must be a number from 0, below 1")
    if rate == 0:
        return None
    if not isinstance(key, jax.Array):
        raise ValueError(
            f"dropout_key={key!r}: must be a random key, as dropout_rate={rate}"
        )
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    words = jax.random.key_data(key) if typed else key
    if words.shape != (2,):  # of another generator: draw a key for this one
        words = jax.random.bits(key, (2,), jnp.uint32)
    slot = count(num_heads) if slot is None else slot
    if not isinstance(slot, jax.Array):
        slot = np.asarray(slot)
        integer = np.issubdtype(slot.dtype, np.integer)
        if not integer or (slot.size and not 0 <= slot.min() <= slot.max() < 2**32):
            raise ValueError(
                f"dropout_slot={slot!r}: must be integers from 0, below 2^32"
            )
    if slot.shape != (num_heads,):
        raise ValueError(f"dropout_slot {slot.shape}: must be ({num_heads},)")
    return (words[0], words[1]), jnp.asarray(slot.astype(np.uint32))


def factors(plan: Plan, tile: Tile, dropout, length: int, sources: int) -> jax.Array:
    """c_ij of a tile, transposed: 0 or 1 / (1 - rate).

    The random bits of element n of an array are threefry(key, n), n in two words, as
    `jax.random.bits` counts them; so a tile needs only those of its own elements.

    Args:
      plan: static.
      tile: of the factors.
      dropout: two words of a key, and the slot of the head.
      length: T.
      sources: S.

    Returns:
      (columns, rows), float32.
    """
    words, slot = dropout
    row = (tile.query + count(plan.rows)).astype(np.uint32)
    source = (tile.source + count(plan.columns)).astype(np.uint32)
    above, row = _plus(multiply(slot, length), row)
    high, low = multiply(row, sources)
    high += above * np.uint32(sources)
    high, low = _plus((high[None], low[None]), source[:, None])
    words = [jnp.broadcast_to(word, low.shape) for word in words]
    one, other = threefry2x32_p.bind(*words, high, low)
    uniform = ((one ^ other) >> 9).astype(jnp.float32) * np.float32(2**-23)
    kept = uniform < np.float32(1 - plan.dropout_rate)
    return jnp.where(kept, 1 / (1 - plan.dropout_rate), 0)


def multiply(array: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """High and low words of products of 32-bit numbers, without 64-bit arithmetic.

    Args:
      array: uint32.
      factor: from 0, below 2^32.

    Returns:
      Two arrays of uint32.
    """
    high, low = array >> 16, array & 0xFFFF
    factor_high, factor_low = np.uint32(factor >> 16), np.uint32(factor & 0xFFFF)
    outer, inner = high * factor_low, low * factor_high
    product = low * factor_low
    middle = (product >> 16) + (outer & 0xFFFF) + (inner & 0xFFFF)
    return (
        high * factor_high + (outer >> 16) + (inner >> 16) + (middle >> 16),
        (middle << 16) | (product & 0xFFFF),
    )


def _plus(words: tuple[jax.Array, jax.Array], number: jax.Array):
    """High and low words of the sum of a 64-bit and a 32-bit number."""
    high, low = words
    total = low + number
    return high + (total < low).astype(np.uint32), total
