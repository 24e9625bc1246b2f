"""A dense `streaming.attend`, with every T x S array, as a reference for its tests."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.kernels.streaming import LawStatistics
from jaxattn.theory import attention


def band_mask(length, sources, *, causal=False, window=None, key_length=None):
    """(T, S), by the definitions: the last query and source are aligned."""
    position = np.arange(length)[:, None] + sources - length
    source = np.arange(sources)[None]
    mask = np.ones((length, sources), bool)
    if causal:
        mask &= source <= position
    before, after = (
        (window, window) if isinstance(window, int) else window or (None,) * 2
    )
    if before is not None:
        mask &= source >= position - before
    if after is not None:
        mask &= source <= position + after
    if key_length is not None:
        mask &= source < key_length
    return mask


def weights(query, key, mask, bias=None):
    """(H, T, S) of (T, H, d_k) and (S, H_kv, d_k)."""
    num_heads = query.shape[1]
    key = attention.repeat_heads(key, num_heads)
    score = jnp.einsum("ihd,jhd->hij", query, key) / math.sqrt(query.shape[2])
    if bias is not None:
        score = score + jnp.broadcast_to(bias, score.shape).astype(score.dtype)
    return jax.vmap(attention.weights)(score, jnp.broadcast_to(mask, score.shape))


def attend(query, key, value, mask, bias=None, factors=None):
    """Contexts (T, H, d_v); factors of dropout are c_ij (H, T, S)."""
    weight = weights(query, key, mask, bias)
    weight = weight if factors is None else weight * factors
    value = attention.repeat_heads(value, query.shape[1])
    return jnp.einsum("hij,jhd->ihd", weight, value)


def statistics(query, key, value, upstream, mask, bias=None, factors=None):
    """`LawStatistics` by their definitions."""
    num_heads = query.shape[1]
    weight = weights(query, key, mask, bias)
    value = attention.repeat_heads(value, num_heads)
    compatibility = jnp.einsum("ihd,jhd->hij", upstream, value)
    dropped = weight
    if factors is not None:
        compatibility, dropped = compatibility * factors, weight * factors
    expected = jnp.sum(weight * compatibility, axis=2, keepdims=True)
    advantage = expected - compatibility
    mask = jnp.broadcast_to(mask, weight.shape)
    if bias is not None:
        mask &= jnp.broadcast_to(bias, weight.shape) != -jnp.inf
    entropy = jax.vmap(attention.attention_entropy)(weight)
    number = jnp.sum(mask, axis=2, dtype=entropy.dtype)
    choice = number > 1
    relative = jnp.where(choice, entropy / jnp.log(jnp.where(choice, number, 2)), 0)
    value_gradient = jnp.einsum("hij,ihd->hjd", dropped, upstream)
    return LawStatistics(
        routing_entropy=jnp.sum(entropy, axis=1),
        relative_entropy=jnp.sum(relative, axis=1)
        / jnp.maximum(jnp.sum(choice, axis=1, dtype=entropy.dtype), 1),
        routing_pressure=jnp.sum(weight * advantage**2, axis=(1, 2)),
        score_gradient_norm=jnp.sqrt(jnp.sum((weight * advantage) ** 2, axis=(1, 2))),
        largest_advantage=jnp.max(jnp.where(mask, jnp.abs(advantage), 0), axis=(1, 2)),
        column_usage=jnp.sum(weight, axis=1),
        value_gradient_norm=jnp.sqrt(jnp.sum(value_gradient**2, axis=(1, 2))),
        fully_masked_rows=jnp.sum(number == 0, axis=1),
    )


def heads(seed, length, sources, *, num_heads=2, d_k=5, d_v=3, dtype=np.float64):
    """Query, key, value, upstream gradient, independent N(0, 1); NumPy."""
    rng = np.random.default_rng(seed)
    shapes = (length, d_k), (sources, d_k), (sources, d_v), (length, d_v)
    return [
        rng.normal(size=(size, num_heads, width)).astype(dtype)
        for size, width in shapes
    ]


def pulled(function, query, key, value, upstream):
    """Contexts, and the gradients of <upstream, contexts> for query, key, value."""
    context, pull = jax.vjp(function, query, key, value)
    return context, pull(upstream)
