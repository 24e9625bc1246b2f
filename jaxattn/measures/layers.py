"""Measures of every layer and head of a transformer, on several sequences.

Letters in shapes: N sequences, T positions, n scored positions, L layers, H heads,
d width of a head, C classes, S what a posterior is about.
"""

import jax
import jax.numpy as jnp

from jaxattn.measures import diagnostics, geometry, posterior
from jaxattn.models import transformer
from jaxattn.tasks import Batch, Keys
from jaxattn.theory import attention, losses

_RIDGE = 1e-3  # of a read-out, in units of the mean variance
_LAW_STATISTICS = (
    "relative_entropy",
    "routing_pressure",
    "largest_advantage",
    "score_gradient_norm",
    "value_gradient_norm",
)

# Name -> null, "" for the measure itself -> its value.
Measured = dict[str, dict[str, jax.Array | diagnostics.Measurement]]


def of_streams(activations, beliefs: jax.Array, place: jax.Array, key) -> Measured:
    """Measures how well beliefs are read from the residual stream after each layer.

    Args:
      activations: of the model on N sequences.
      beliefs: probabilities at scored positions (N n, S).
      place: scored positions (N, n).
      key: of the null, permuted beliefs.
    """
    count, per_sequence = place.shape
    held_out = jnp.arange(count * per_sequence) >= (count // 2) * per_sequence

    def one(features: jax.Array) -> geometry.ReadOut:
        return geometry.belief_read_out(features, beliefs, held_out, key, ridge=_RIDGE)

    streams = jnp.stack([flat(at(x, place)) for x in activations.residual])
    found = jax.lax.map(one, streams)
    return {"belief_read_out": {"": found.found, "_permuted": found.permuted}}


def of_values(
    activations, log_bayes: jax.Array, place: jax.Array, key, draws: int
) -> Measured:
    """Measures whether each layer's contexts are ordered by posterior entropy.

    Args:
      activations: of the model on N sequences.
      log_bayes: nats (N, T, C).
      place: scored positions (N, n).
      key: of the nulls, random directions and permuted entropies.
      draws: of the nulls.
    """
    entropy = jax.vmap(posterior.entropy)(at(log_bayes, place))
    contexts = jnp.stack(
        [at(joined(layer.context), place) for layer in activations.heads]
    )

    def axis(points: jax.Array, entropy: jax.Array) -> geometry.EntropyAxis:
        return geometry.entropy_axis(
            flat(points),
            entropy.reshape(-1),
            key,
            draws=draws,
            block=place.shape[1],  # so that the null includes position
        )

    def one(points: jax.Array):
        # Where entropy depends on position, any axis of position is one of entropy.
        within = points - jnp.mean(points, axis=0)[None]
        rest = entropy - jnp.mean(entropy, axis=0)[None]
        varies = jnp.max(jnp.abs(rest)) > 1e-4  # rounding has an order, too
        rest = jnp.where(varies, rest, 0)
        return axis(points, entropy), axis(within, rest)

    found, within = jax.lax.map(one, contexts)
    return {
        "entropy_axis": {
            "": found.found,
            "_random": found.random_direction,
            "_permuted": found.permuted,
        },
        "entropy_axis_within": {
            "": within.found,
            "_random": within.random_direction,
            "_permuted": within.permuted,
        },
        "main_axis_share": {"": found.one_axis},
    }


def of_keys(
    heads: transformer.Heads, tokens: jax.Array, which: Keys, key, draws: int
) -> Measured:
    """Measures how orthogonal the keys of the posterior's symbols are, by head.

    One key for each distinct token, before rotation: equal tokens have equal keys, and
    cosines of rotated ones depend on their positions.

    Args:
      heads: from `by_head`, of N sequences.
      tokens: (N, T), or vectors (N, T, d_x).
      which: positions, see `tasks.Keys`.
      key: of the nulls, random and shuffled keys.
      draws: of the nulls.
    """
    first, end, count = which
    if count == 0:
        place = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape[:2])
    else:
        other = (tokens < first) | (tokens >= end)
        place = jnp.argsort(other, axis=1, stable=True)[:, :count]
    chosen = jnp.take_along_axis(tokens, place, axis=1) if tokens.ndim == 2 else None
    keys = jnp.swapaxes(heads.plain_key, 2, 3)  # (L, N, T, H, d)
    keys = jnp.swapaxes(jax.vmap(at, (0, None))(keys, place), 2, 3)
    if chosen is not None:
        again = jnp.tril(chosen[:, :, None] == chosen[:, None], -1).any(axis=2)
        keys = jnp.where(again[None, :, None, :, None], 0, keys)
    axes = of_each_head(lambda k: geometry.key_axes(k, key, draws=draws))(keys)
    named = {"": axes.found, "_random": axes.random_keys, "_shuffled": axes.shuffled}
    return {
        "key_orthogonality": {
            name: _or_nan(mean(of_heads, axes=(1,))) for name, of_heads in named.items()
        }
    }


def manifold(
    activations, log_bayes: jax.Array, place: jax.Array, count: int
) -> dict[str, jax.Array]:
    """Projects contexts of the first sequences on their two principal axes.

    Args:
      activations: of the model on N sequences.
      log_bayes: nats at scored positions (N, n, C).
      place: scored positions (N, n).
      count: of sequences.
    """
    chosen, entropy = place[:count], jax.vmap(posterior.entropy)(log_bayes)

    def one(context: jax.Array) -> jax.Array:
        points = flat(at(joined(context)[:count], chosen))
        axes = diagnostics.manifold(points)
        return diagnostics.coordinates(axes, points)[:, :2]

    contexts = jnp.stack([layer.context for layer in activations.heads])
    return {
        "manifold": jax.lax.map(one, contexts),
        "manifold_entropy_bits": entropy[:count].reshape(-1),
    }


def law_statistics(architecture, params, batch: Batch) -> dict[str, jax.Array]:
    """Computes the statistics of the laws of each head (L, H), means over sequences.

    Each sequence's own loss counts; see `streaming.LawStatistics`.

    Args:
      architecture: of the model.
      params: of the model.
      batch: N sequences.
    """

    def one(batch: Batch):
        def loss(taps):
            activations = transformer.apply(
                architecture, params, batch.inputs, taps=taps
            )
            return losses.cross_entropy(activations.logit, batch.targets, batch.weights)

        return jax.grad(loss)(transformer.zero_taps(architecture, len(batch.inputs)))

    layers = jax.vmap(one)(batch)
    return {
        name: jnp.stack([jnp.mean(getattr(s, name), axis=0) for s in layers])
        for name in _LAW_STATISTICS
    }


def head_weights(heads: transformer.Heads) -> jax.Array:
    """Computes a of every head (L, N, H, T, T), causal, from `by_head`."""
    mask = attention.causal_mask(heads.query.shape[3])

    def one(query: jax.Array, key: jax.Array) -> jax.Array:
        return attention.weights(attention.scores(query, key), mask)

    return of_each_head(one)(heads.query, heads.key)


def by_head(layers: tuple[transformer.Heads, ...]) -> transformer.Heads:
    """Stacks all layers (L, N, H, T, d), shared keys and values with each head."""
    num_heads = layers[0].query.shape[2]

    def together(*leaves: jax.Array) -> jax.Array:
        array = jnp.moveaxis(jnp.stack(leaves), 3, 2)
        return jnp.repeat(array, num_heads // array.shape[2], axis=2)

    return jax.tree.map(together, *layers)


def found(measured: Measured) -> dict[str, jax.Array]:
    """Selects the measures themselves, NaN where not valid."""
    return {name: _or_nan(of_name[""]) for name, of_name in measured.items()}


def nulls(measured: Measured) -> dict[str, jax.Array]:
    """Selects the nulls, as NAME_NULL, NaN where not valid."""
    return {
        name + null: _or_nan(value)
        for name, of_name in measured.items()
        for null, value in of_name.items()
        if null
    }


def mean(measurement: diagnostics.Measurement, axes: tuple[int, ...]) -> jax.Array:
    """Averages the valid numbers along some axes; NaN where none is."""
    count = jnp.sum(measurement.valid, axis=axes)
    total = jnp.sum(jnp.where(measurement.valid, measurement.value, 0), axis=axes)
    return jnp.where(count > 0, total / jnp.maximum(count, 1), jnp.nan)


def of_each_head(function):
    """Maps over layers, sequences and heads."""
    return jax.vmap(jax.vmap(jax.vmap(function)))


def at(array: jax.Array, place: jax.Array) -> jax.Array:
    """Selects rows (N, n, ...) of an array (N, T, ...)."""
    return jax.vmap(lambda rows, chosen: rows[chosen])(array, place)


def flat(array: jax.Array) -> jax.Array:
    """Reshapes (N, n, ...) to (N n, ...)."""
    return array.reshape(-1, *array.shape[2:])


def joined(context: jax.Array) -> jax.Array:
    """Reshapes contexts (N, T, H, d) to (N, T, H d)."""
    return context.reshape(*context.shape[:2], -1)


def _or_nan(measurement) -> jax.Array:
    if not isinstance(measurement, diagnostics.Measurement):
        return measurement
    return jnp.where(measurement.valid, measurement.value, jnp.nan)
