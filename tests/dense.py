"""`streaming.attend` once more, with every T x S array: what its tests compare with."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.kernels.streaming import LawStatistics
from jaxattn.theory import attention


def in_sight(length, sources, *, causal=False, window=None, key_length=None):
    """(T, S), by the definitions: places count from the last query and source."""
    place = np.arange(length)[:, None] + sources - length
    source = np.arange(sources)[None]
    seen = np.ones((length, sources), bool)
    if causal:
        seen &= source <= place
    before, after = (
        (window, window) if isinstance(window, int) else window or (None,) * 2
    )
    if before is not None:
        seen &= source >= place - before
    if after is not None:
        seen &= source <= place + after
    if key_length is not None:
        seen &= source < key_length
    return seen


def weights(query, key, seen, bias=None):
    """(H, T, S) of (T, H, d_k) and (S, H_kv, d_k)."""
    num_heads = query.shape[1]
    key = attention.repeat_heads(key, num_heads)
    score = jnp.einsum("ihd,jhd->hij", query, key) / math.sqrt(query.shape[2])
    if bias is not None:
        score = score + jnp.broadcast_to(bias, score.shape).astype(score.dtype)
    mask = jnp.broadcast_to(seen, score.shape)
    return jax.vmap(attention.weights)(score, mask)


def attend(query, key, value, seen, bias=None, keep=None):
    """Contexts (T, H, d_v); keep is c_ij (H, T, S)."""
    weight = weights(query, key, seen, bias)
    weight = weight if keep is None else weight * keep
    value = attention.repeat_heads(value, query.shape[1])
    return jnp.einsum("hij,jhd->ihd", weight, value)


def statistics(query, key, value, upstream, seen, bias=None, keep=None):
    """`LawStatistics` by their definitions."""
    num_heads = query.shape[1]
    weight = weights(query, key, seen, bias)
    value = attention.repeat_heads(value, num_heads)
    worth = jnp.einsum("ihd,jhd->hij", upstream, value)
    worth = worth if keep is None else worth * keep
    advantage = jnp.sum(weight * worth, axis=2, keepdims=True) - worth
    seen = jnp.broadcast_to(seen, weight.shape)
    if bias is not None:
        seen &= jnp.broadcast_to(bias, weight.shape) != -jnp.inf
    looked = weight if keep is None else weight * keep
    entropy = jax.vmap(attention.attention_entropy)(weight)
    number = jnp.sum(seen, axis=2, dtype=entropy.dtype)
    choice = number > 1
    relative = jnp.where(choice, entropy / jnp.log(jnp.where(choice, number, 2)), 0)
    value_gradient = jnp.einsum("hij,ihd->hjd", looked, upstream)
    return LawStatistics(
        routing_entropy=jnp.sum(entropy, axis=1),
        relative_entropy=jnp.sum(relative, axis=1)
        / jnp.maximum(jnp.sum(choice, axis=1, dtype=entropy.dtype), 1),
        routing_pressure=jnp.sum(weight * advantage**2, axis=(1, 2)),
        score_gradient_norm=jnp.sqrt(jnp.sum((weight * advantage) ** 2, axis=(1, 2))),
        largest_advantage=jnp.max(jnp.where(seen, jnp.abs(advantage), 0), axis=(1, 2)),
        column_usage=jnp.sum(weight, axis=1),
        value_gradient_norm=jnp.sqrt(jnp.sum(value_gradient**2, axis=(1, 2))),
        blind_rows=jnp.sum(number == 0, axis=1),
    )
