"""Loss and gradient of one head, and its attention, each by three routes."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.algorithms.base import GradientFunction
from jaxattn.kernels import streaming
from jaxattn.tasks.base import Batch
from jaxattn.theory import attention, laws, losses
from jaxattn.theory.attention import Params


class Wiring(NamedTuple):
    """Options of a head while it trains, beside its weights."""

    causal: bool
    value_norm: bool = False  # LayerNorm on the values, see `attention.values`
    dropout_rate: float = 0.0  # of attention weights, see `laws.drop`


def by_streaming(
    params: Params, batch: Batch, key: jax.Array | None = None, *, wiring: Wiring
) -> tuple[jax.Array, Params]:
    """Computes loss and gradient of one sequence through `streaming.attend`.

    Args:
      params: of the head.
      batch: one sequence.
      key: of the dropout; only used if there is some.
      wiring: of the head.
    """

    def loss(params: Params) -> jax.Array:
        q, k = batch.inputs @ params.w_q, batch.inputs @ params.w_k
        context = streaming.attend(
            q,
            k,
            attention.values(params, batch.inputs, value_norm=wiring.value_norm),
            causal=wiring.causal,
            dropout_rate=wiring.dropout_rate,
            dropout_key=key,
        )
        logit = attention.read_out(params, context)
        return losses.cross_entropy(logit, batch.targets, batch.weights)

    return jax.value_and_grad(loss)(params)


def by_laws(
    params: Params, batch: Batch, key: jax.Array | None = None, *, wiring: Wiring
) -> tuple[jax.Array, Params]:
    """Computes the same by the hand-derived laws."""
    if wiring.value_norm or wiring.dropout_rate > 0:
        return _by_dense_laws(params, batch, key, wiring)
    return laws.loss_and_gradient(
        params, batch.inputs, batch.targets, _mask(batch, wiring), batch.weights
    )


def _by_dense_laws(
    params: Params, batch: Batch, key: jax.Array | None, wiring: Wiring
) -> tuple[jax.Array, Params]:
    """Computes the same by the laws one by one, with norm and dropout."""
    inputs, norm = batch.inputs, wiring.value_norm
    drop = _dropout(batch, key, wiring)
    f = attention.forward(params, inputs, _mask(batch, wiring), value_norm=norm)
    dropped = drop(f.weight)
    context = dropped @ f.value
    logit = attention.read_out(params, context)
    delta = laws.logit_gradient(logit, batch.targets, batch.weights)
    upstream = laws.upstream_gradient(delta, params.w_o)
    compatibility = drop(laws.compatibility(upstream, f.value))
    score = laws.score_gradient(f.weight, laws.advantage(f.weight, compatibility))
    value = laws.value_gradient(dropped, upstream)
    if norm:
        raw = inputs @ params.w_v
        value = laws.layer_norm_gradient(raw, value, attention.NORM_EPSILON)
    gradient = Params(
        laws.projection_gradient(inputs, laws.query_gradient(score, f.key)),
        laws.projection_gradient(inputs, laws.key_gradient(score, f.query)),
        laws.projection_gradient(inputs, value),
        laws.projection_gradient(context, delta),
        None if params.b_o is None else laws.output_bias_gradient(delta),
    )
    return losses.cross_entropy(logit, batch.targets, batch.weights), gradient


def by_autodiff(
    params: Params, batch: Batch, key: jax.Array | None = None, *, wiring: Wiring
) -> tuple[jax.Array, Params]:
    """Computes the same by autodiff of the dense forward pass."""
    drop, mask = _dropout(batch, key, wiring), _mask(batch, wiring)

    def loss(params: Params) -> jax.Array:
        f = attention.forward(params, batch.inputs, mask, value_norm=wiring.value_norm)
        logit = f.logit
        if wiring.dropout_rate > 0:
            logit = attention.read_out(params, drop(f.weight) @ f.value)
        return losses.cross_entropy(logit, batch.targets, batch.weights)

    return jax.value_and_grad(loss)(params)


def _mask(batch: Batch, wiring: Wiring) -> np.ndarray | None:
    return attention.causal_mask(len(batch.inputs)) if wiring.causal else None


def _dropout(batch: Batch, key: jax.Array | None, wiring: Wiring) -> Callable:
    """Returns what drops entries of a or b (T, T), the same as `streaming.attend`."""
    rate = wiring.dropout_rate
    if rate == 0:
        return lambda array: array
    length = len(batch.inputs)
    keep = jax.random.bernoulli(key, 1 - rate, (1, length, length))[0]
    return lambda array: laws.drop(array, keep, rate)


GRADIENTS = {"streaming": by_streaming, "laws": by_laws, "autodiff": by_autodiff}
causal_gradient = functools.partial(by_streaming, wiring=Wiring(causal=True))


def mix_by_streaming(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool
) -> jax.Array:
    """Computes contexts of one head, a V, through `streaming.attend`."""
    return streaming.attend(query, key, value, causal=causal)


def mix_by_autodiff(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool
) -> jax.Array:
    """Computes the same with dense a, for autodiff."""
    return _mix_forward(query, key, value, causal)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _mix_by_laws(query, key, value, causal):
    return _mix_forward(query, key, value, causal)[0]


def _mix_forward(query, key, value, causal):
    mask = attention.causal_mask(len(query)) if causal else None
    weight = attention.weights(attention.scores(query, key), mask)
    return weight @ value, (query, key, value, weight)


def _mix_backward(_, residuals, upstream):
    query, key, value, weight = residuals
    compatibility = laws.compatibility(upstream, value)
    score_gradient = laws.score_gradient(weight, laws.advantage(weight, compatibility))
    return (
        laws.query_gradient(score_gradient, key),
        laws.key_gradient(score_gradient, query),
        laws.value_gradient(weight, upstream),
    )


_mix_by_laws.defvjp(_mix_forward, _mix_backward)


def mix_by_laws(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool
) -> jax.Array:
    """Computes the same with dense a, and the hand-derived laws as its gradient."""
    return _mix_by_laws(query, key, value, causal)


MIXES = {
    "streaming": mix_by_streaming,
    "laws": mix_by_laws,
    "autodiff": mix_by_autodiff,
}
causal_mix = functools.partial(mix_by_streaming, causal=True)


def over_sequences(gradient_function: GradientFunction) -> GradientFunction:
    """Averages a gradient function over the sequences of a batch, if it has several.

    Args:
      gradient_function: of one sequence.

    Returns:
      The same for inputs (T, d_x), and the mean over N for inputs (N, T, d_x).
    """

    def averaged(
        params: Params, batch: Batch, key: jax.Array | None = None
    ) -> tuple[jax.Array, Params]:
        if batch.inputs.ndim == 2:
            return gradient_function(params, batch, key)

        def one(numbered: tuple) -> tuple[jax.Array, Params]:
            number, batch = numbered
            own = None if key is None else jax.random.fold_in(key, number)
            return gradient_function(params, batch, own)

        # One after another: each has a cache-sized working set.
        numbers = jnp.arange(len(batch.inputs))
        results = jax.lax.map(one, (numbers, batch))
        return jax.tree.map(lambda r: jnp.mean(r, axis=0), results)

    return averaged
