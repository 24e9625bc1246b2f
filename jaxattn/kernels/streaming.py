"""The laws at any length: attention in O(T d) memory, by blocks, with statistics.

The backward pass of fused attention *is* the advantage law: with ∂L/∂s = -a ∘ A and
E_i[b] = u_i·g_i, a block of it needs only a block of the weights. `attend` is that law,
written block by block; autodiff does not trace through it.

Taps. A `tap` is an extra input of `attend` that the output does not depend on, so its
true gradient is zero, and the custom backward pass is free to return something else in
its place. It returns the law's statistics, `LawStatistics`, so one `jax.grad` with
respect to parameters and taps brings them beside the gradients, under jit, vmap, scan
and remat alike. Give each call, and under vmap each example, a tap of its own: JAX adds
up the gradients of an input that is used twice, and a sum of norms or of maxima means
nothing.

Letters in shapes: T queries i, S sources j, H heads, d_k and d_v widths. This module
has the arguments and the custom derivative; the work of one head is in `forward` and
`backward`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxattn.kernels import arguments, backward, forward
from jaxattn.kernels.arguments import full_rank
from jaxattn.kernels.dropout import check_dropout
from jaxattn.kernels.heads import by_head, one_by_one
from jaxattn.kernels.sharding import manual_axes, varying
from jaxattn.kernels.statistics import LawStatistics, check_tap, zero_tap
from jaxattn.kernels.tiles import Plan, SideInputs
from jaxattn.theory import attention, laws

__all__ = ["LawStatistics", "attend", "check_tap", "full_rank", "zero_tap"]


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = False,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    key_length: jax.typing.ArrayLike | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    dropout_slot: jax.Array | None = None,
    block_size: int | tuple[int, int] | None = None,
    precision: jax.lax.PrecisionLike = None,
    tap: LawStatistics | None = None,
) -> jax.Array:
    """Contexts of all heads, whose gradient is the advantage law block by block.

    g_i = Σ_j a_ij v_j,  a_i = softmax over unmasked j of q_i·k_j / √d_k + bias_ij

    and, given u_i = ∂L/∂g_i, with A_ij = u_i·g_i - u_i·v_j,

    ∂L/∂s_ij = -a_ij A_ij            ∂L/∂v_j = Σ_i a_ij u_i
    ∂L/∂q_i = Σ_j ∂L/∂s_ij k_j / √d_k    ∂L/∂k_j = Σ_i ∂L/∂s_ij q_i / √d_k

    No T x S array is made beside those of the caller, except for the gradient of a bias
    that heads share: one of its size for each head. Work grows with the number of
    blocks that are not fully masked, compile time with none of the sizes. `jvp` of a
    gradient works; `jvp` alone and `grad` of a gradient do not.

    A query depends on its unmasked sources alone: where one of these is not finite the
    query is NaN, and masked sources are never read. Likewise a query that is not finite
    makes NaN of the gradients of its sources, unless it is fully masked or its upstream
    gradient is 0, as that of padding is.

    Args:
      query: q (T, H, d_k), or (T, d_k) without a head axis, and then key and value too.
      key: k (S, H_kv, d_k), H a multiple of H_kv: head h uses h // (H / H_kv).
      value: v (S, H_kv, d_v). One dtype for all three: float32 and float64 are summed
        in their own precision, bfloat16 and float16 in float32.
      causal: masks sources after the query; the last query is at the last source.
      mask: boolean, broadcastable to (H, T, S), or to (T, S) without a head axis; True
        where i may attend to j. Read block by block, never broadcast in memory.
      bias: added to the scores, shape as for the mask; -inf masks a source.
      key_length: masks all sources but the first so many, an integer; may be traced.
      window: (before, after): i attends to sources from `before` before its own
        position to `after` after it (aligned as for `causal`; after may be below 0);
        None: no bound on that side; a number means both.
      dropout_rate: share of weights that is dropped, in [0, 1), the rest scaled up.
      dropout_key: random key; required if the rate is above 0. For all block sizes the
        mask is that of `jax.random.bernoulli(key, 1 - rate, (H, T, S))` for a threefry
        key (with `jax_threefry_partitionable`, the default, and not under float64).
      dropout_slot: slice of that mask for each head, (H,); default: its own.
      block_size: rows and columns of a block, or (rows, columns); default by sizes and
        backend. Changes no result beyond rounding.
      precision: of the matrix products.
      tap: `zero_tap`; its gradient is the statistics, see the module's docstring.

    Returns:
      g (T, H, d_v), or (T, d_v), dtype of the values. A fully masked query gets 0, and
      passes no gradient on.

    Raises:
      ValueError: an argument has a wrong shape, type or value.

    Source: arXiv 2512.22473, sections 2 and 3; blocks and running maxima after
    arXiv 2205.14135.
    """
    query, key, value = (jnp.asarray(array) for array in (query, key, value))
    headless = query.ndim == 2
    arguments.check_arrays(query, key, value)
    if headless:
        query, key, value = query[:, None], key[:, None], value[:, None]
    (length, num_heads, depth), sources = query.shape, len(key)
    shape = (length, sources) if headless else (num_heads, length, sources)
    mask, bias = arguments.check_cover(mask, bias, shape)
    key_length = arguments.check_key_length(key_length)
    width = max(depth, value.shape[2])
    plan = Plan(
        *arguments.block_sizes(block_size, length, sources, width),
        *arguments.band(causal, window, length, sources),
        float(dropout_rate),
        tuple(precision) if isinstance(precision, list) else precision,
    )
    dropout = check_dropout(dropout_rate, dropout_key, dropout_slot, num_heads)
    check_tap(tap, () if headless else (num_heads,), sources)
    if tap is not None and headless:
        tap = jax.tree.map(lambda leaf: leaf[None], tap)
    inputs = query, key, value, bias, SideInputs(mask, key_length, dropout), tap
    # Inside `shard_map` an array that all devices share, such as a key, then gets the
    # sum of their gradients.
    context = _attend(plan)(*varying(inputs, manual_axes(inputs)))
    return context[:, 0] if headless else context


# --- the custom derivative


class _Residuals(NamedTuple):
    """Inputs and results of the forward pass that the backward pass needs."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None
    side: SideInputs
    context: jax.Array  # in the precision of the sums
    largest: jax.Array  # (H, T) max_j s_ij; +inf in fully masked rows
    normaliser: jax.Array  # (H, T) Σ_j exp(s_ij - max s_i); 1 in fully masked rows
    requested: backward.Requested


@functools.cache
def _attend(plan: Plan) -> Callable:
    """`attend` of a plan; compiled once for each shape, outside of a jit too.

    The plan is not an argument of the custom derivative: JAX wraps all its arguments,
    as symbolic zeros need, and may do so with static ones (JAX_CUSTOM_VJP3 does).
    """

    @jax.custom_vjp
    def attend(query, key, value, bias, side, _):  # last: tap, for the backward pass
        return _contexts(plan, query, key, value, bias, side)[0].astype(value.dtype)

    attend.defvjp(
        functools.partial(_attend_forward, plan),
        functools.partial(_attend_backward, plan),
        symbolic_zeros=True,
    )
    return jax.jit(attend)


def _attend_forward(plan: Plan, *inputs):
    def is_input(leaf):
        return isinstance(leaf, jax.custom_derivatives.CustomVJPPrimal)

    *_, bias, _, tap = inputs
    wanted = [
        any(leaf.perturbed for leaf in jax.tree.leaves(tree, is_leaf=is_input))
        for tree in (bias, tap)
    ]
    query, key, value, bias, side, tap = jax.tree.map(
        lambda leaf: leaf.value, inputs, is_leaf=is_input
    )
    results = _contexts(plan, query, key, value, bias, side)
    requested = backward.Requested(
        bias=jnp.zeros(()) if wanted[0] else None, tap=tap if wanted[1] else None
    )
    residuals = _Residuals(query, key, value, bias, side, *results, requested)
    return residuals.context.astype(value.dtype), residuals


def _attend_backward(plan: Plan, residuals: _Residuals, upstream):
    num_heads, num_kv_heads = residuals.query.shape[1], residuals.key.shape[1]
    bias, side, axes = by_head(residuals.bias, residuals.side)
    several = jax.vmap(
        one_by_one(functools.partial(backward.one_head, plan), plan),
        in_axes=(1, 1, 1, *axes, 1, 0, 0, 1, backward.Requested(None, 0)),
        out_axes=(1, 1, 1, 0, 0),
    )
    query, key, value, bias, tap = several(
        residuals.query,
        attention.repeat_heads(residuals.key, num_heads),
        attention.repeat_heads(residuals.value, num_heads),
        bias,
        side,
        residuals.context,
        residuals.largest,
        residuals.normaliser,
        upstream,
        residuals.requested,
    )
    if bias is not None and len(residuals.bias) == 1:
        bias = jnp.sum(bias, axis=0, keepdims=True)
    gradient = (
        query,
        laws.group_gradient(key, num_kv_heads),
        laws.group_gradient(value, num_kv_heads),
        bias,
    )
    inputs = residuals[: len(gradient)]
    return (
        *(
            None if g is None else g.astype(i.dtype)
            for g, i in zip(gradient, inputs, strict=True)
        ),
        None,
        tap,
    )


def _contexts(plan: Plan, query, key, value, bias, side: SideInputs):
    """Contexts (T, H, d_v), largest scores and normalisers (H, T), as summed."""
    num_heads = query.shape[1]
    bias, side, axes = by_head(bias, side)
    several = jax.vmap(
        one_by_one(functools.partial(forward.one_head, plan), plan),
        in_axes=(1, 1, 1, *axes),
        out_axes=(1, 0, 0),
    )
    key = attention.repeat_heads(key, num_heads)
    return several(query, key, attention.repeat_heads(value, num_heads), bias, side)
