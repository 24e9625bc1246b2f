"""What a head did while it trained, from its weights at every evaluation.

All of it is seen on the same sequence, with each query's own loss in nats: that of a
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

# Of every evaluation; as in `diagnostics`, means over queries or sources, but for the
# gate, the ratio of the means of the two beside it.
CURVES = (
    "attention_drift",  # to where this head ends
    "relative_entropy",
    "effective_sources",
    "routing_pressure",
    "score_gradient",  # Σ_j |∂ℓ_i/∂s_ij|, the next two multiplied
    "advantage_spread",
    "gate",
    "value_gradient",  # ‖∂L/∂v_j‖ of the summed loss, after a norm if there is one
    "usage_entropy",  # of the usage in units of that of equal shares
    "usage_gini",  # likewise
    "specialisation",
    "key_orthogonality",
    "key_cosine",
    "query_key_alignment",
    "value_dimension",  # participation ratio of the values
)

# Of a run as a whole: the share of the values' motion along two principal axes, and
# that of random walks of the same steps: in any direction, or in those that the loss
# can pull.
TRAITS = ("path_share", "walk_share", "readout_walk_share")

# At some evaluations.
SNAPSHOTS = ("attention", "query", "key", "value", "upstream", "target")


class Retraced(NamedTuple):
    """What was found; NaN where a question has no answer."""

    curves: dict[str, jax.Array]  # of `CURVES` -> (E,)
    traits: dict[str, jax.Array]  # of `TRAITS` -> scalar


def retrace(
    trail: Params, batch: Batch, mask, key: jax.Array, *, value_norm: bool
) -> Retraced:
    """Looks back at a head along its way.

    Args:
      trail: weights at each of E evaluations, as leading axis.
      batch: one sequence, on which to look.
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

    # One after another: what is kept of each is small.
    curves, values = jax.lax.map(one, trail)
    shares = path_shares(values, trail.w_o, key)
    return Retraced(curves, dict(zip(TRAITS, map(_or_nan, shares), strict=True)))


def snapshots(
    trail: Params, batch: Batch, mask, *, value_norm: bool
) -> dict[str, jax.Array]:
    """Arrays of a head at K evaluations, see `retrace`.

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
    # In units of that of equal shares, or a causal mask alone would be unequal.
    equal = attention.weights(jnp.zeros_like(f.weight), mask)
    usage = laws.column_usage(f.weight), laws.column_usage(equal)
    usage = diagnostics.divided(*usage).value
    # Of the means, so that they still multiply to the mean of the gradients.
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
    """Share of two axes in how values (E, S, d_v) move, and in two random walks.

    not valid for values that stay where they are but for rounding.
    """
    steps = jnp.diff(values, axis=0)
    length = jnp.linalg.norm(steps, axis=2, keepdims=True)
    any_key, readout_key = jax.random.split(key)
    anywhere = jax.random.normal(any_key, steps.shape, values.dtype)
    # u = δ W_Oᵀ, and the δ of a position sums to zero. Plain gradients move values in
    # these directions alone; those of a normed value, and Adam's steps, leave them.
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
