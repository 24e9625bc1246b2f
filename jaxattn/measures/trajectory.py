"""Diagnostics of a head along its training, from its weights at every evaluation.

All are computed on one sequence. Each query's own loss counts, in nats: the loss of the
sequence is their mean.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxattn.measures import diagnostics
from jaxattn.tasks.base import Batch
from jaxattn.theory import attention, laws
from jaxattn.theory.attention import Params

# One number an evaluation; as in `diagnostics`, means over queries or sources, but for
# the gate, the ratio of the means of `score_gradient` and `advantage_spread`.
CURVES = (
    "attention_drift",  # to the final attention of this head
    "relative_entropy",
    "effective_sources",
    "routing_pressure",
    "score_gradient",  # Σ_j |∂ℓ_i/∂s_ij|, the product of the next two
    "advantage_spread",
    "gate",
    "value_gradient",  # ‖∂L/∂v_j‖ of the summed loss, v after the LayerNorm if any
    "usage_entropy",  # of the usage, in units of the usage by equal shares
    "usage_gini",  # likewise
    "specialisation",
    "key_orthogonality",
    "key_cosine",
    "query_key_alignment",
    "value_dimension",  # participation ratio of the values
)

# One number a run: the share of the values' motion along two principal axes, and that
# of random walks with the same step lengths, in all directions or in the span of the
# read-out.
TRAITS = ("path_share", "walk_share", "readout_walk_share")

# Arrays at some evaluations.
SNAPSHOTS = ("attention", "query", "key", "value", "upstream", "target")


class Retraced(NamedTuple):
    """Diagnostics of a trajectory, NaN where one is not valid."""

    curves: dict[str, jax.Array]  # of `CURVES` -> (E,)
    traits: dict[str, jax.Array]  # of `TRAITS` -> scalar


def retrace(
    trail: Params, batch: Batch, mask, key: jax.Array, *, value_norm: bool
) -> Retraced:
    """Computes the diagnostics of a head along its training.

    Args:
      trail: weights at each of E evaluations, as leading axis.
      batch: one sequence.
      mask: boolean (T, T) or None.
      key: of the random walks.
      value_norm: whether the head has a LayerNorm on its values.

    Returns:
      Retraced.
    """

    def forward(params: Params) -> attention.Forward:
        return attention.forward(params, batch.inputs, mask, value_norm=value_norm)

    final = forward(jax.tree.map(lambda leaf: leaf[-1], trail)).weight

    def one(params: Params) -> tuple[dict[str, jax.Array], jax.Array]:
        f = forward(params)
        return _measured(f, _own_upstream(params, f, batch), mask, final), f.value

    # One after another: the result of each is small.
    curves, values = jax.lax.map(one, trail)
    shares = path_shares(values, trail.w_o, key)
    return Retraced(curves, dict(zip(TRAITS, map(_or_nan, shares), strict=True)))


def snapshots(
    trail: Params, batch: Batch, mask, *, value_norm: bool
) -> dict[str, jax.Array]:
    """Computes arrays of a head at K evaluations, see `retrace`.

    Returns:
      Each of `SNAPSHOTS` -> (K, ...).
    """

    def one(params: Params) -> dict[str, jax.Array]:
        f = attention.forward(params, batch.inputs, mask, value_norm=value_norm)
        upstream = _own_upstream(params, f, batch)
        arrays = (f.weight, f.query, f.key, f.value, upstream, batch.targets)
        return dict(zip(SNAPSHOTS, arrays, strict=True))

    return jax.lax.map(one, trail)


def _own_upstream(params: Params, f: attention.Forward, batch: Batch) -> jax.Array:
    delta = laws.logit_gradient(f.logit, batch.targets, batch.weights)
    return laws.upstream_gradient(len(f.logit) * delta, params.w_o)


def _measured(
    f: attention.Forward, upstream: jax.Array, mask, final: jax.Array
) -> dict[str, jax.Array]:
    b = laws.compatibility(upstream, f.value)
    advantage = laws.advantage(f.weight, b)
    # In units of that by equal shares, or a causal mask alone would be unequal.
    equal = attention.weights(jnp.zeros_like(f.weight), mask)
    usage = laws.column_usage(f.weight), laws.column_usage(equal)
    usage = diagnostics.divided(*usage).value
    # A ratio of means, so that gate times spread is the mean score gradient.
    force = jnp.mean(jnp.sum(jnp.abs(laws.score_gradient(f.weight, advantage)), axis=1))
    spread = jnp.mean(diagnostics.advantage_spread(b, mask))
    value_gradient = laws.value_gradient(f.weight, upstream)
    keys = diagnostics.orthogonality(f.key)
    centred = diagnostics.centred(f.value)
    covariance = centred.T @ centred
    mean = diagnostics.mean
    drift = jnp.mean(diagnostics.drift(f.weight, final))
    rounding = diagnostics.rounding(jnp.ones_like(drift))
    found = {
        "attention_drift": jnp.where(drift < rounding, 0, drift),
        "relative_entropy": mean(diagnostics.relative_entropy(f.weight, mask)),
        "effective_sources": jnp.mean(diagnostics.effective_sources(f.weight)),
        "routing_pressure": jnp.mean(diagnostics.routing_pressure(f.weight, advantage)),
        "score_gradient": force,
        "advantage_spread": spread,
        "gate": diagnostics.divided(force, spread),
        "value_gradient": jnp.mean(jnp.linalg.norm(value_gradient, axis=1)),
        "usage_entropy": diagnostics.usage_entropy(usage),
        "usage_gini": diagnostics.usage_gini(usage),
        "specialisation": mean(diagnostics.specialisation(f.weight, upstream)),
        "key_orthogonality": keys.absolute,
        "key_cosine": keys.signed,
        "query_key_alignment": mean(
            diagnostics.query_key_alignment(f.weight, f.query, f.key)
        ),
        # (Σ λ)² / Σ λ² without the λ.
        "value_dimension": diagnostics.divided(
            jnp.trace(covariance) ** 2, jnp.sum(covariance**2)
        ),
    }
    return {name: _or_nan(found[name]) for name in CURVES}


def path_shares(
    values: jax.Array, w_o: jax.Array, key: jax.Array
) -> tuple[diagnostics.Measurement, ...]:
    """Share of two axes in the motion of values (E, S, d_v), and in two random walks.

    Not valid for values that do not move but for rounding.
    """
    steps = jnp.diff(values, axis=0)
    length = jnp.linalg.norm(steps, axis=2, keepdims=True)
    any_key, readout_key = jax.random.split(key)
    anywhere = jax.random.normal(any_key, steps.shape, values.dtype)
    # u = δ W_Oᵀ, and the δ of a position sums to zero. Plain gradients move values in
    # this span alone; those of a normed value, and Adam's steps, leave it.
    num_steps, num_sources, _ = steps.shape
    shape = (num_steps, num_sources, w_o.shape[2])
    pull = jax.random.normal(readout_key, shape, values.dtype)
    pull = pull - jnp.mean(pull, axis=2, keepdims=True)
    pulled = jnp.einsum("esc,evc->esv", pull, w_o[:-1])

    moves = diagnostics.differ(values, of=values)

    def share(steps: jax.Array) -> diagnostics.Measurement:
        path = jnp.cumsum(steps, axis=0)
        start = jnp.zeros((1, *path.shape[1:]), path.dtype)
        moved = jnp.concatenate([start, path]).reshape(-1, path.shape[2])
        value, valid = diagnostics.leading_share(moved, 2)
        return diagnostics.Measurement(jnp.where(moves, value, 0), valid & moves)

    def walk(direction: jax.Array) -> diagnostics.Measurement:
        norm = jnp.linalg.norm(direction, axis=2, keepdims=True)
        return share(direction * diagnostics.divided(length, norm).value)

    return share(steps), walk(anywhere), walk(pulled)


def _or_nan(measurement: diagnostics.Measurement | jax.Array) -> jax.Array:
    if not isinstance(measurement, diagnostics.Measurement):
        return measurement
    chex.assert_rank(measurement.value, 0)
    return jnp.where(measurement.valid, measurement.value, jnp.nan)
