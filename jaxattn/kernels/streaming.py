"""The laws at any length: attention in O(T d) memory, by blocks, with statistics.

The backward pass of fused attention *is* the advantage law: with ∂L/∂s = -a ∘ A and
E_i[b] = u_i·g_i, a block of it needs no more than a block of the weights. `attend` is
that law, written block by block; autodiff never looks inside.

Taps. A `tap` is an extra input of `attend` that the output does not depend on, so its
true gradient is zero, and the custom backward pass is free to return something else in
that place. It returns the law's statistics, `LawStatistics`, so one `jax.grad` with
respect to parameters and taps brings them beside the gradients, under jit, vmap, scan
and remat alike. Give each head-bearing call, and under vmap each example, a tap of its
own: JAX adds up the gradients of an input that is used twice, and a sum of norms or of
maxima means nothing.

Letters in shapes: T queries i, S sources j, H heads, d_k and d_v widths. Inside, blocks
of scores are transposed (sources down, queries across), so that sums over sources and
most products read memory in order.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from jaxattn.theory import attention, laws


class LawStatistics(NamedTuple):
    """What the laws say of one call of `attend`, for each head; the shape of a tap.

    Entropies and column usage are of a, never of dropped weights; A, ∂L/∂s and ∂L/∂v
    are those of the pass that ran, dropout and all. Losses in nats. Without a head axis
    in the call, without it here. Padding, which is a query that is not finite and whose
    upstream gradient is 0, is left out of all of them.
    """

    routing_entropy: jax.Array  # (H,) Σ_i H_i, nats
    relative_entropy: jax.Array  # (H,) mean H_i / log n_i, n_i ≥ 2 sources in sight
    routing_pressure: jax.Array  # (H,) Σ_ij a_ij A_ij²
    score_gradient_norm: jax.Array  # (H,) ‖∂L/∂s‖
    largest_advantage: jax.Array  # (H,) max |A_ij| over what is in sight
    column_usage: jax.Array  # (H, S) N_j = Σ_i a_ij
    value_gradient_norm: jax.Array  # (H,) ‖∂L/∂v‖, the head's own share
    blind_rows: jax.Array  # (H,) how many queries see nothing


class _Plan(NamedTuple):
    """What is known while tracing."""

    rows: int  # queries of a block
    columns: int  # sources of a block
    low: int | None  # i may look at j ≥ i + low
    high: int | None  # and at j ≤ i + high
    dropout_rate: float
    precision: jax.lax.PrecisionLike


class _Side(NamedTuple):
    """What else decides on scores and weights; None where there is none."""

    mask: jax.Array | None  # (1 or T, 1 or S)
    key_length: jax.Array | None  # ()
    dropout: tuple | None  # two words of a key, and a slot


class _Kept(NamedTuple):
    """What the backward pass needs of the forward pass."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None
    side: _Side
    context: jax.Array  # in the precision of the sums
    largest: jax.Array  # (H, T) max_j s_ij; +inf where nothing is in sight
    normaliser: jax.Array  # (H, T) Σ_j exp(s_ij - max s_i); 1 where nothing is
    asked: "_Asked"


class _Asked(NamedTuple):
    """What the backward pass is asked for besides; None: not asked for."""

    bias: jax.Array | None  # its gradient; the value says nothing
    tap: LawStatistics | None  # the statistics, in these dtypes


def zero_tap(
    num_sources: int, leading: tuple[int, ...] = (), dtype=jnp.float32
) -> LawStatistics:
    """A tap to hand to `attend`; its gradient is the statistics.

    Args:
      num_sources: S.
      leading: (H,); () for a call without a head axis; before them, axes for `vmap`.
      dtype: of the statistics.

    Returns:
      LawStatistics of zeros, (*leading,), the column usage (*leading, S).

    Raises:
      ValueError: a size that is no whole number of at least 1.
    """
    attention.check_size("num_sources", num_sources)
    for size in leading:
        attention.check_size(f"a size of leading {leading}", size)
    scalar = jnp.zeros(leading, dtype)
    usage = jnp.zeros((*leading, num_sources), dtype)
    names = LawStatistics._fields
    return LawStatistics(*(usage if n == "column_usage" else scalar for n in names))


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

    g_i = Σ_j a_ij v_j,  a_i = softmax over what i may see of q_i·k_j / √d_k + bias_ij

    and, given u_i = ∂L/∂g_i, with A_ij = u_i·g_i - u_i·v_j,

    ∂L/∂s_ij = -a_ij A_ij            ∂L/∂v_j = Σ_i a_ij u_i
    ∂L/∂q_i = Σ_j ∂L/∂s_ij k_j / √d_k    ∂L/∂k_j = Σ_i ∂L/∂s_ij q_i / √d_k

    No T x S array is made that the caller has not brought; asked for the gradient of a
    bias that heads share, one of its size for each head. Work grows with the blocks
    that have something in sight, compile time with none of the sizes. `jvp` of a
    gradient works, `jvp` alone and `grad` of a gradient do not.

    A query depends on the sources that it sees alone: where one of these is not finite
    the query is NaN, and what is out of sight is never read. Likewise a query that is
    not finite turns the gradients of what it sees into NaN, unless it sees nothing or
    its upstream gradient is 0, as that of padding is.

    Args:
      query: q (T, H, d_k), or (T, d_k) without a head axis, then all are.
      key: k (S, H_kv, d_k), H a multiple of H_kv: head h uses h // (H / H_kv).
      value: v (S, H_kv, d_v). One dtype for all three: float32 and float64 are summed
        in kind, bfloat16 and float16 in float32.
      causal: i sees no later source; the last query is at the last source.
      mask: boolean, broadcastable to (H, T, S), or to (T, S) without a head axis; True
        where i may look at j. Read block by block, never broadcast in memory.
      bias: added to the scores, shape as for the mask; -inf rules a source out.
      key_length: only the first so many sources are there, a whole number; may be
        traced.
      window: (before, after): i sees sources from `before` before its own place to
        `after` after it (aligned as for `causal`; after may be below 0); None: no bound
        on that side; a number means both.
      dropout_rate: share of weights that is dropped, in [0, 1), the rest scaled up.
      dropout_key: random key; required if the rate is above 0. Whatever the blocks, the
        mask is that of `jax.random.bernoulli(key, 1 - rate, (H, T, S))` for a threefry
        key (with `jax_threefry_partitionable`, the default, and not under float64).
      dropout_slot: which slice of that mask each head takes, (H,); default their own.
      block_size: rows and columns of a block, or (rows, columns); default by sizes and
        backend. Changes no result beyond rounding.
      precision: of the matrix products.
      tap: `zero_tap`; its gradient is the statistics, see the module's docstring.

    Returns:
      g (T, H, d_v), or (T, d_v), dtype of the values. A query that sees nothing gets 0,
      and no gradient goes through it.

    Raises:
      ValueError: where an argument has a wrong shape, type or value.

    Source: arXiv 2512.22473, sections 2 and 3; blocks and running maxima after
    arXiv 2205.14135.
    """
    query, key, value = (jnp.asarray(array) for array in (query, key, value))
    headless = query.ndim == 2
    _check_arrays(query, key, value)
    if headless:
        query, key, value = query[:, None], key[:, None], value[:, None]
    (length, num_heads, depth), sources = query.shape, len(key)
    shape = (length, sources) if headless else (num_heads, length, sources)
    mask, bias = _check_cover(mask, bias, shape)
    key_length = _check_key_length(key_length)
    plan = _Plan(
        *_block_sizes(block_size, length, sources, max(depth, value.shape[2])),
        *_band(causal, window, length, sources),
        float(dropout_rate),
        tuple(precision) if isinstance(precision, list) else precision,
    )
    dropout = _check_dropout(dropout_rate, dropout_key, dropout_slot, num_heads)
    check_tap(tap, () if headless else (num_heads,), sources)
    if tap is not None and headless:
        tap = jax.tree.map(lambda leaf: leaf[None], tap)
    inputs = query, key, value, bias, _Side(mask, key_length, dropout), tap
    # Inside `shard_map` what is the same on all devices, such as a key that they share,
    # then has the sum of their gradients as its own.
    context = _attend(plan)(*_varying(inputs, _manual_axes(inputs)))
    return context[:, 0] if headless else context


# --- the custom derivative


@functools.cache
def _attend(plan: _Plan) -> Callable:
    """`attend` of a plan; compiled once for shapes, when called outside of a jit too.

    The plan is no argument of the custom derivative: JAX wraps all that these have, as
    symbolic zeros ask for, and may do so with what is static (JAX_CUSTOM_VJP3 does).
    """

    @jax.custom_vjp
    def attend(query, key, value, bias, side, tap):
        del tap  # seen by the backward pass only
        return _contexts(plan, query, key, value, bias, side)[0].astype(value.dtype)

    attend.defvjp(
        functools.partial(_attend_forward, plan),
        functools.partial(_attend_backward, plan),
        symbolic_zeros=True,
    )
    return jax.jit(attend)


def _attend_forward(plan, *inputs):
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
    context, largest, normaliser = _contexts(plan, query, key, value, bias, side)
    kept = _Kept(
        query,
        key,
        value,
        bias,
        side,
        context,
        largest,
        normaliser,
        _Asked(jnp.zeros(()) if wanted[0] else None, tap if wanted[1] else None),
    )
    return context.astype(value.dtype), kept


def _attend_backward(plan, kept, upstream):
    num_heads, num_kv_heads = kept.query.shape[1], kept.key.shape[1]
    bias, side, axes = _by_head(kept.bias, kept.side)
    backward = jax.vmap(
        _one_by_one(functools.partial(_backward, plan), plan),
        in_axes=(1, 1, 1, *axes, 1, 0, 0, 1, _Asked(None, 0)),
        out_axes=(1, 1, 1, 0, 0),
    )
    query, key, value, bias, tap = backward(
        kept.query,
        attention.repeat_heads(kept.key, num_heads),
        attention.repeat_heads(kept.value, num_heads),
        bias,
        side,
        kept.context,
        kept.largest,
        kept.normaliser,
        upstream,
        kept.asked,
    )
    if bias is not None and len(kept.bias) == 1:
        bias = jnp.sum(bias, axis=0, keepdims=True)
    gradient = (
        query,
        laws.group_gradient(key, num_kv_heads),
        laws.group_gradient(value, num_kv_heads),
        bias,
    )
    inputs = (kept.query, kept.key, kept.value, kept.bias)
    return (
        *(
            None if g is None else g.astype(i.dtype)
            for g, i in zip(gradient, inputs, strict=True)
        ),
        None,
        tap,
    )


def _contexts(plan, query, key, value, bias, side):
    """Contexts (T, H, d_v), largest scores and normalisers (H, T), as summed."""
    num_heads = query.shape[1]
    bias, side, axes = _by_head(bias, side)
    forward = jax.vmap(
        _one_by_one(functools.partial(_forward, plan), plan),
        in_axes=(1, 1, 1, *axes),
        out_axes=(1, 0, 0),
    )
    key = attention.repeat_heads(key, num_heads)
    return forward(query, key, attention.repeat_heads(value, num_heads), bias, side)


def _by_head(bias, side: _Side):
    """Bias and side without the head axis that they share, and the axes for `vmap`."""

    def split(array):
        shared = array is None or len(array) == 1
        return (array if array is None else array[0], None) if shared else (array, 0)

    (bias, bias_axis), (mask, mask_axis) = split(bias), split(side.mask)
    dropout_axes = None if side.dropout is None else (None, 0)
    axes = (bias_axis, _Side(mask_axis, None, dropout_axes))
    return bias, side._replace(mask=mask), axes


def _one_by_one(function: Callable, plan: _Plan) -> Callable:
    """On CPU `vmap` becomes a loop: each head and example then has a block in cache.

    Measured on x86, forward and backward: 1.3 to 2 times as fast from blocks of 256 on,
    about the same at 128, up to twice as slow at 32.
    """
    if jax.default_backend() != "cpu" or plan.rows * plan.columns < 128 * 128:
        return function
    one = jax.custom_batching.custom_vmap(function)

    @one.def_vmap
    def several(size, batched, *inputs):
        del size
        leaves = zip(jax.tree.leaves(inputs), jax.tree.leaves(batched), strict=True)
        shared = any(
            is_batched and jax.typeof(leaf).sharding.spec[0] is not None
            for leaf, is_batched in leaves
        )
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched)
        if shared:
            results = jax.vmap(function, in_axes=axes)(*inputs)
        else:
            results = _map(one, inputs, batched)
        return results, jax.tree.map(lambda _: True, results)

    return one


def _map(function: Callable, inputs: tuple, batched: tuple):
    """Results of function(*inputs), one after another along what is batched."""
    leaves, structure = jax.tree.flatten(inputs)
    which = jax.tree.leaves(batched)
    moving = [leaf for leaf, moves in zip(leaves, which, strict=True) if moves]

    def step(now: list[jax.Array]):
        now = iter(now)
        pairs = zip(leaves, which, strict=True)
        own = [next(now) if moves else leaf for leaf, moves in pairs]
        return function(*jax.tree.unflatten(structure, own))

    return jax.lax.map(step, moving)


def _manual_axes(tree) -> tuple[str, ...]:
    """Axes of a `shard_map` along which any of these arrays differ; () without one."""
    axes = map(_varies_along, jax.tree.leaves(tree))
    return tuple(sorted(frozenset().union(*axes)))


def _varies_along(array: jax.Array) -> frozenset[str]:
    return jax.typeof(array).manual_axis_type.varying


def _varying(tree, axes: tuple[str, ...]):
    """The same arrays, as ones that differ along these axes of a `shard_map`."""

    def one(leaf: jax.Array) -> jax.Array:
        new = tuple(axis for axis in axes if axis not in _varies_along(leaf))
        return jax.lax.pcast(leaf, new, to="varying") if new else leaf

    return jax.tree.map(one, tree)


# --- one head: queries (T, d_k), sources (S, d_k) and (S, d_v)

_cut = jax.lax.dynamic_slice_in_dim


class _Tile(NamedTuple):
    """A block of queries against a block of sources.

    The last blocks are moved back to end where the arrays end, so that nothing need be
    padded; what the block before has done is then not new.
    """

    query: jax.Array  # its first
    source: jax.Array  # its first
    new_source: jax.Array  # its first that is new
    partly: bool  # whether some pair may be out of sight


class _Sources(NamedTuple):
    """Keys and values, of which one that is not finite has no numbers, only a mark."""

    scored: jax.Array  # (S, d_k) keys; NaN where key or value is not finite
    key: jax.Array  # (S, d_k) 0 there
    value: jax.Array  # (S, d_v) 0 there


class _Sums(NamedTuple):
    """What a backward pass adds up over all queries; None: not asked for."""

    key: jax.Array  # (S, d_k)
    value: jax.Array  # (S, d_v)
    bias: jax.Array | None  # (1 or T, 1 or S)
    usage: jax.Array | None  # (S,)


class _RowSums(NamedTuple):
    """What a backward pass adds up over the sources, of each query, (rows,)."""

    spread: jax.Array  # Σ_j e_ij log e_ij, at most 0
    pressure: jax.Array  # Σ_j a_ij A_ij² / n_i
    steepness: jax.Array  # Σ_j (∂L/∂s_ij)²
    advantage: jax.Array  # max_j |A_ij| / n_i
    in_sight: jax.Array  # how many sources


def _forward(plan, query, key, value, bias, side):
    """Contexts (T, d_v); largest scores and normalisers (T,), see `_Kept`."""
    axes = _manual_axes(query)
    query = _for_sums(query)
    (length, depth), sources = query.shape, len(key)
    scored, _, value = _marked(_for_sums(key), _for_sums(value))
    query_t = query.T / math.sqrt(depth)
    value_and_one_t = attention.append_one(value).T

    def rows(results, first, new):
        del new  # what is not new comes out as before
        query_block_t = _cut(query_t, first, plan.rows, axis=1)

        def step(tile, carry):
            largest, summed = carry
            score = _scores(plan, tile, query_block_t, scored, bias, side)
            larger = jnp.maximum(largest, jnp.max(score, axis=0))
            # -inf - (-inf) would be NaN while nothing is in sight.
            shift = jnp.where(larger == -jnp.inf, 0, larger)
            exponential = jnp.exp(score - shift[None])
            content_t = _cut(value_and_one_t, tile.source, plan.columns, axis=1)
            if side.dropout is None:
                added = _dot(plan, content_t, exponential)
            else:  # the normaliser knows nothing of dropout
                kept = _dropout(plan, tile, side.dropout, length, sources)
                added = _dot(plan, content_t, kept * exponential)
                added = added.at[-1].set(jnp.sum(exponential, axis=0))
            return larger, summed * jnp.exp(largest - shift)[None] + added

        nothing = (
            jnp.full(plan.rows, -jnp.inf, query.dtype),
            jnp.zeros((len(value_and_one_t), plan.rows), query.dtype),
        )
        nothing = _varying(nothing, axes)
        largest, summed = _over_sources(plan, step, nothing, first, sources, side)
        blind = largest == -jnp.inf
        normaliser = jnp.where(blind, 1, summed[-1])
        context = (summed[:-1] / normaliser[None]).T
        # Not what a score beyond all numbers leaves, which is NaN.
        largest = jnp.where(largest == jnp.inf, jnp.nan, largest)
        largest = jnp.where(blind, jnp.inf, largest)
        return _put(results, (context, largest, normaliser), first)

    results = (
        jnp.zeros((length, value.shape[1]), query.dtype),
        jnp.zeros(length, query.dtype),
        jnp.zeros(length, query.dtype),
    )
    return _over_queries(plan, rows, _varying(results, axes), length)


def _backward(
    plan, query, key, value, bias, side, context, largest, normaliser, upstream, asked
):
    """Gradients of query, key, value and bias, and the statistics; None: not asked.

    With n_i the normaliser, a_ij = e_ij / n_i: the signals are divided by n_i once, and
    the exponentials e never. (One number, log n_i + max s_i, would do for both, but not
    where a bias of -1e9 on a whole row swallows log n_i.)
    """
    dtype, axes = context.dtype, _manual_axes(query)
    query, upstream = _for_sums(query), _for_sums(upstream)
    (length, depth), sources = query.shape, len(key)
    scored, key, value = _marked(_for_sums(key), _for_sums(value))
    sound = (
        attention.finite_rows(query)
        & attention.finite_rows(context)
        & attention.finite_rows(upstream)
    )
    # Of what is not sound: that which tells the loss nothing, and that which spoils it.
    padding = ~sound & jnp.all(upstream == 0, axis=1)
    silent = padding | (~sound & (largest == jnp.inf))
    mark = jnp.where(sound | silent, 0, jnp.nan)[:, None]
    query, upstream, context = (
        jnp.where(sound[:, None], array, 0) for array in (query, upstream, context)
    )
    largest = jnp.where(silent, jnp.inf, largest)
    normaliser = jnp.where(sound, normaliser, 1)

    scale = 1 / math.sqrt(depth)
    query, upstream = query * scale, upstream / normaliser[:, None]
    query_t, key_t, upstream_t = (query + mark).T, key.T, upstream.T
    wide_query, wide_upstream = _widen(query), _widen(upstream)
    expected = jnp.sum(upstream * context, axis=1)  # E_i[b] / n_i = u_i·g_i / n_i
    tapped = asked.tap is not None

    def rows(carry, first, new):
        query_gradient, sums, totals = carry
        query_block = _cut(wide_query, first, plan.rows)
        query_block_t = _cut(query_t, first, plan.rows, axis=1)
        upstream_block = _cut(wide_upstream, first, plan.rows)
        upstream_block_t = _cut(upstream_t, first, plan.rows, axis=1)
        mean = _cut(expected, first, plan.rows)[None]
        is_new = first + _count(plan.rows) >= new
        # exp(s - inf) = 0: what is not new weighs nothing, and what is blind.
        shift = jnp.where(is_new, _cut(largest, first, plan.rows), jnp.inf)[None]
        normal = _cut(normaliser, first, plan.rows)
        counts = is_new & ~_cut(padding, first, plan.rows)

        def step(tile, carry):
            query_gradient_t, sums, row_sums = carry
            score = _scores(plan, tile, query_block_t, scored, bias, side)
            # Not left to exp(-inf): of a NaN less inf, or -inf less NaN, it is NaN.
            nothing = shift == jnp.inf
            if tile.partly or bias is not None:
                nothing |= score == -jnp.inf
            exponential = jnp.where(nothing, 0, jnp.exp(score - shift))
            value_block = _cut(value, tile.source, plan.columns)
            compatibility = _dot(plan, value_block, upstream_block_t)
            looked = exponential
            if side.dropout is not None:
                kept = _dropout(plan, tile, side.dropout, length, sources)
                compatibility, looked = kept * compatibility, kept * exponential
            centred = compatibility - mean  # -A_ij / n_i
            slope = exponential * centred  # ∂L/∂s_ij
            key_block_t = _cut(key_t, tile.source, plan.columns, axis=1)
            query_gradient_t += _dot(plan, key_block_t, slope)
            sums = sums._replace(
                key=_add(sums.key, _dot(plan, slope, query_block), tile.source),
                value=_add(sums.value, _dot(plan, looked, upstream_block), tile.source),
            )
            if asked.bias is not None:
                sums = sums._replace(bias=_add_tile(plan, sums.bias, slope.T, tile))
            if tapped:
                usage = jnp.matmul(exponential, 1 / normal, precision="highest")
                sums = sums._replace(usage=_add(sums.usage, usage, tile.source))
                row_sums = _note(
                    row_sums, tile, bias, score - shift, exponential, centred, slope
                )
            return query_gradient_t, sums, row_sums

        carry = (
            jnp.zeros((depth, plan.rows), dtype),
            sums,
            _zeros(_RowSums, plan.rows, dtype) if tapped else None,
        )
        query_gradient_t, sums, row_sums = _over_sources(
            plan, step, _varying(carry, axes), first, sources, side
        )
        query_gradient = _add(query_gradient, query_gradient_t.T, first)
        if tapped:
            totals = _add_totals(totals, row_sums, normal, counts)
        return query_gradient, sums, totals

    carry = (
        jnp.zeros_like(query),
        _Sums(
            key=jnp.zeros((sources, wide_query.shape[1]), dtype),
            value=jnp.zeros((sources, wide_upstream.shape[1]), dtype),
            bias=None if asked.bias is None else jnp.zeros(bias.shape, dtype),
            usage=jnp.zeros(sources, dtype) if tapped else None,
        ),
        _zeros(_Totals, (), dtype) if tapped else None,
    )
    query_gradient, sums, totals = _over_queries(
        plan, rows, _varying(carry, axes), length
    )
    tap = _statistics(totals, sums, asked.tap) if tapped else None
    key_gradient, value_gradient = sums.key[:, :depth], sums.value[:, : value.shape[1]]
    return query_gradient * scale, key_gradient, value_gradient, sums.bias, tap


def _marked(key: jax.Array, value: jax.Array) -> _Sources:
    """Sources whose numbers, where they are none, reach only who sees them.

    0 · NaN is NaN, so that a product over a tile would hand what one query sees to all
    of its block.
    """
    sound = (attention.finite_rows(key) & attention.finite_rows(value))[:, None]
    clean = jnp.where(sound, key, 0)
    return _Sources(jnp.where(sound, clean, jnp.nan), clean, jnp.where(sound, value, 0))


def _scores(plan, tile: _Tile, query_t, key, bias, side) -> jax.Array:
    """Scores of a tile, transposed (columns, rows); -inf where out of sight."""
    score = _dot(plan, _cut(key, tile.source, plan.columns), query_t)
    if bias is not None:
        added = _cut_tile(plan, bias, tile).astype(score.dtype).T
        score = jnp.where(added == -jnp.inf, -jnp.inf, score + added)
    if not tile.partly:
        return score
    source = (tile.source + _count(plan.columns))[:, None]
    query = (tile.query + _count(plan.rows))[None]
    in_sight = source >= tile.new_source
    if plan.low is not None:
        in_sight &= source >= query + plan.low
    if plan.high is not None:
        in_sight &= source <= query + plan.high
    if side.key_length is not None:
        in_sight &= source < side.key_length
    if side.mask is not None:
        in_sight &= _cut_tile(plan, side.mask, tile).T
    return jnp.where(in_sight, score, -jnp.inf)


def _dropout(plan, tile: _Tile, dropout, length: int, sources: int) -> jax.Array:
    """c_ij of a tile, transposed: 0 or 1 / (1 - rate).

    The random bits of element n of an array are threefry(key, n), n in two words, as
    `jax.random.bits` counts them; so a tile needs no more than its own.
    """
    words, slot = dropout
    row = (tile.query + _count(plan.rows)).astype(np.uint32)
    source = (tile.source + _count(plan.columns)).astype(np.uint32)
    above, row = _plus(_multiply(slot, length), row)
    high, low = _multiply(row, sources)
    high += above * np.uint32(sources)
    high, low = _plus((high[None], low[None]), source[:, None])
    words = [jnp.broadcast_to(word, low.shape) for word in words]
    one, other = threefry2x32_p.bind(*words, high, low)
    uniform = ((one ^ other) >> 9).astype(jnp.float32) * np.float32(2**-23)
    kept = uniform < np.float32(1 - plan.dropout_rate)
    return jnp.where(kept, 1 / (1 - plan.dropout_rate), 0)


def _plus(words: tuple[jax.Array, jax.Array], number: jax.Array):
    """High and low words of a sum of a number of 64 bits and one of 32."""
    high, low = words
    total = low + number
    return high + (total < low).astype(np.uint32), total


def _multiply(array: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """High and low words of the products of 32-bit numbers, by halves."""
    high, low = array >> 16, array & 0xFFFF
    factor_high, factor_low = np.uint32(factor >> 16), np.uint32(factor & 0xFFFF)
    outer, inner = high * factor_low, low * factor_high
    product = low * factor_low
    middle = (product >> 16) + (outer & 0xFFFF) + (inner & 0xFFFF)
    return (
        high * factor_high + (outer >> 16) + (inner >> 16) + (middle >> 16),
        (middle << 16) | (product & 0xFFFF),
    )


# --- statistics


class _Totals(NamedTuple):
    """Row sums, added up over the queries."""

    entropy: jax.Array
    relative_entropy: jax.Array
    choices: jax.Array  # queries with two sources in sight, or more
    pressure: jax.Array
    steepness: jax.Array
    advantage: jax.Array  # the largest
    blind: jax.Array


def _note(sums: _RowSums, tile, bias, shifted, exponential, centred, slope) -> _RowSums:
    """Adds a tile to the sums of its queries; exponential = exp(shifted)."""
    advantage = jnp.abs(centred)
    in_sight = jnp.full(len(sums.in_sight), len(shifted), shifted.dtype)
    if tile.partly or bias is not None:
        seen = shifted != -jnp.inf  # a NaN is seen, and shows
        shifted = jnp.where(seen, shifted, 0)
        advantage = jnp.where(seen, advantage, 0)
        in_sight = jnp.sum(seen, axis=0, dtype=shifted.dtype)
    return _RowSums(
        spread=sums.spread + jnp.sum(exponential * shifted, axis=0),
        pressure=sums.pressure + jnp.sum(slope * centred, axis=0),
        steepness=sums.steepness + jnp.sum(slope**2, axis=0),
        advantage=jnp.maximum(sums.advantage, jnp.max(advantage, axis=0)),
        in_sight=sums.in_sight + in_sight,
    )


def _add_totals(totals: _Totals, sums: _RowSums, normaliser, counts) -> _Totals:
    """Adds the queries of a block that count: that are new, and no padding."""
    sums = jax.tree.map(lambda row: jnp.where(counts, row, 0), sums)
    normaliser = jnp.where(counts, normaliser, 1)
    entropy = jnp.log(normaliser) - sums.spread / normaliser
    choice = sums.in_sight > 1
    relative = entropy / jnp.log(jnp.where(choice, sums.in_sight, 2))
    blind = counts & (sums.in_sight == 0)
    dtype = entropy.dtype
    return _Totals(
        entropy=totals.entropy + jnp.sum(entropy),
        relative_entropy=totals.relative_entropy + jnp.sum(relative, where=choice),
        choices=totals.choices + jnp.sum(choice, dtype=dtype),
        pressure=totals.pressure + jnp.sum(normaliser * sums.pressure),
        steepness=totals.steepness + jnp.sum(sums.steepness),
        advantage=jnp.maximum(totals.advantage, jnp.max(normaliser * sums.advantage)),
        blind=totals.blind + jnp.sum(blind, dtype=dtype),
    )


def _statistics(totals: _Totals, sums: _Sums, tap: LawStatistics) -> LawStatistics:
    """The statistics of a head, in the dtypes of its tap."""
    statistics = LawStatistics(
        routing_entropy=totals.entropy,
        relative_entropy=totals.relative_entropy / jnp.maximum(totals.choices, 1),
        routing_pressure=totals.pressure,
        score_gradient_norm=jnp.sqrt(totals.steepness),
        largest_advantage=totals.advantage,
        column_usage=sums.usage,
        value_gradient_norm=jnp.sqrt(jnp.sum(sums.value**2)),
        blind_rows=totals.blind,
    )
    return jax.tree.map(lambda s, t: s.astype(t.dtype), statistics, tap)


def _zeros(kind: type, shape, dtype):
    """A NamedTuple of zeros."""
    return kind(*(jnp.zeros(shape, dtype) for _ in kind._fields))


# --- loops over blocks


def _over_queries(plan, function: Callable, carry, length: int):
    """Makes carry = function(carry, first, new) for every block of queries.

    `first` is the first query of a block, `new` the first that no block before had.
    """

    def block(number, carry):
        new = number * plan.rows
        return function(carry, jnp.minimum(new, length - plan.rows), new)

    return _repeat(0, -(-length // plan.rows), block, carry)


def _over_sources(plan, function: Callable, carry, query, sources: int, side: _Side):
    """Makes carry = function(tile, carry) for every tile with something in sight.

    Blocks of sources that all queries of the block see, from `inner` to `outer`, are a
    loop of their own, without masks: most of the work of a long causal head.
    """
    blocks = -(-sources // plan.columns)
    limits = (plan.low, plan.high, side.key_length, side.mask)
    partly = sources % plan.columns > 0 or any(x is not None for x in limits)
    whole = side.mask is None and (blocks > 1 or not partly)

    end = sources if side.key_length is None else jnp.minimum(side.key_length, sources)
    begin, inner, outer = 0, 0, end if whole else 0
    if plan.low is not None:
        begin = query + plan.low
        inner = begin + plan.rows - 1
    if plan.high is not None:
        outer = jnp.minimum(query + plan.high + 1, outer)
        end = jnp.minimum(query + plan.rows + plan.high, end)
    begin = jnp.clip(begin // plan.columns, 0, blocks)
    end = jnp.clip(-(-end // plan.columns), begin, blocks)
    inner = jnp.clip(-(-inner // plan.columns), begin, end)
    outer = jnp.clip(outer // plan.columns, inner, end)

    def tile(block, partly):
        new = block * plan.columns
        return _Tile(query, jnp.minimum(new, sources - plan.columns), new, partly)

    if whole:
        carry = _repeat(
            inner, outer, lambda block, c: function(tile(block, False), c), carry
        )
    if partly:

        def outside(number, carry):
            block = begin + number
            block += jnp.where(block >= inner, outer - inner, 0)
            return function(tile(block, True), carry)

        carry = _repeat(0, inner - begin + end - outer, outside, carry)
    return carry


def _repeat(begin, end, body: Callable, carry):
    """A loop whose counter has 32 bits, as all places have, under float64 as well."""

    def counted(number, carry):
        return body(number.astype(np.int32), carry)

    return jax.lax.fori_loop(jnp.int32(begin), jnp.int32(end), counted, carry)


def _count(size: int) -> np.ndarray:
    return np.arange(size, dtype=np.int32)


def _put(arrays, blocks, first):
    """Writes blocks of rows."""
    return jax.tree.map(
        lambda array, block: jax.lax.dynamic_update_slice_in_dim(
            array, block, first, 0
        ),
        arrays,
        blocks,
    )


def _add(array: jax.Array, block: jax.Array, first) -> jax.Array:
    """Adds a block of rows."""
    return _put(array, _cut(array, first, len(block)) + block, first)


def _cut_tile(plan, array: jax.Array, tile: _Tile) -> jax.Array:
    """The tile of a mask or bias (1 or T, 1 or S): (1 or rows, 1 or columns)."""
    start, size = _corner(plan, array, tile)
    return jax.lax.dynamic_slice(array, start, size)


def _add_tile(plan, array: jax.Array, block: jax.Array, tile: _Tile) -> jax.Array:
    """Adds a block (rows, columns) to what (1 or T, 1 or S) is shared by."""
    start, size = _corner(plan, array, tile)
    block = laws.score_bias_gradient(block, size)
    block += jax.lax.dynamic_slice(array, start, size)
    return jax.lax.dynamic_update_slice(array, block, start)


def _corner(plan, array: jax.Array, tile: _Tile):
    full = (tile.query, plan.rows), (tile.source, plan.columns)
    found = [
        (np.int32(0), 1) if size == 1 else part
        for size, part in zip(array.shape, full, strict=True)
    ]
    return zip(*found, strict=True)


def _dot(plan, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.matmul(left, right, precision=plan.precision)


def _widen(array: jax.Array) -> jax.Array:
    """Columns of zeros up to a multiple of 16, a register of which holds 16 numbers.

    Measured on x86: products (sources, queries) x (queries, 15) take 1.6 times as long
    as with 16 columns.
    """
    return jnp.pad(array, ((0, 0), (0, -array.shape[1] % 16)))


def _for_sums(array: jax.Array) -> jax.Array:
    """In the precision of the sums: half precisions are summed in float32."""
    return array.astype(jnp.float32) if array.dtype.itemsize < 4 else array


# --- arguments


def _block_sizes(asked, length: int, sources: int, width: int) -> tuple[int, int]:
    """Rows and columns of a block.

    Measured on x86: products of wide heads need large blocks to use several cores,
    narrow ones are bound by what is done for each score, which should stay in cache.
    """
    if asked is None:
        large = jax.default_backend() != "cpu" or width >= 32
        asked = 512 if large else 256
    allowed = "whole numbers, at least 1"
    rows, columns = _pair("block_size", asked, allowed)
    if min(_whole(rows), _whole(columns)) < 1:
        raise ValueError(f"block_size={asked!r}: allowed: {allowed}")
    return min(int(rows), length), min(int(columns), sources)


def _band(causal: bool, window, length: int, sources: int):
    """Which sources a query sees: from i + low to i + high; None: no bound."""
    allowed = "whole numbers, or None"
    before, after = _pair("window", window, allowed)
    for side in (before, after):
        if side is not None and _whole(side) < -(2**30):
            raise ValueError(f"window={window!r}: allowed: {allowed}")
    end = 0 if causal and (after is None or after > 0) else after
    if before is not None and end is not None and before + end < 0:
        raise ValueError(f"window={window!r}: allowed: one that is not empty")
    before = None if before is None or before >= length + sources else int(before)
    after = None if after is None or after >= length + sources else int(after)
    if causal:
        after = 0 if after is None else min(after, 0)
    shift = sources - length
    return (
        None if before is None else shift - before,
        None if after is None else shift + after,
    )


def _pair(name: str, value, allowed: str) -> tuple:
    """A pair, or one for both."""
    pair = value if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"{name}={value!r}: allowed: {allowed}, one or two")
    return tuple(pair)


def _whole(number) -> int:
    """The number, or what every check refuses."""
    whole = isinstance(number, int | np.integer) and not isinstance(number, bool)
    return int(number) if whole else -(2**31)


def _check_arrays(query, key, value) -> None:
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not query.ndim == key.ndim == value.ndim or query.ndim not in (2, 3):
        raise ValueError(f"{shapes}: allowed: (T, H, d), or (T, d) without heads")
    if query.shape[-1] != key.shape[-1] or key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"{shapes}: allowed: query as wide as key, key as long as value"
        )
    if 0 in query.shape + key.shape + value.shape:
        raise ValueError(f"{shapes}: allowed: no empty axis")
    if query.ndim == 3 and query.shape[1] % key.shape[1] > 0:
        raise ValueError(
            f"{shapes}: allowed: a multiple of the key's heads as queries'"
        )
    dtypes = {array.dtype.name for array in (query, key, value)}
    if len(dtypes) > 1 or not jnp.issubdtype(query.dtype, jnp.floating):
        raise ValueError(f"dtypes {sorted(dtypes)}: allowed: one floating-point type")


def full_rank(name: str, array, shape: tuple[int, ...]) -> jax.Array | None:
    """An array that broadcasts to `shape`, with as many axes; None as it is.

    Args:
      name: of the argument, for the error.
      array: or None.
      shape: to fit.

    Returns:
      The array, 1 long on axes that it did not have.

    Raises:
      ValueError: it does not broadcast to the shape.
    """
    if array is None:
        return None
    array = jnp.asarray(array)
    full = (1,) * (len(shape) - array.ndim) + array.shape
    if len(full) > len(shape) or any(
        size not in (1, wanted) for size, wanted in zip(full, shape, strict=True)
    ):
        raise ValueError(f"{name} {array.shape}: allowed: what broadcasts to {shape}")
    return array.reshape(full)


def _check_cover(mask, bias, shape: tuple[int, ...]):
    """The mask and the bias of heads (H, T, S) with three axes."""
    mask, bias = full_rank("mask", mask, shape), full_rank("bias", bias, shape)
    if mask is not None and mask.dtype != bool:
        raise ValueError(f"mask of {mask.dtype}: allowed: bool, True where i may look")
    if bias is not None and not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ValueError(f"bias of {bias.dtype}: allowed: floating point")
    return [
        array if array is None or array.ndim == 3 else array[None]
        for array in (mask, bias)
    ]


def _check_key_length(key_length) -> jax.Array | None:
    if key_length is None:
        return None
    array = key_length if isinstance(key_length, jax.Array) else np.asarray(key_length)
    if array.ndim > 0 or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"key_length={key_length!r}: allowed: a whole number")
    # What 32 bits cannot hold is beyond the last source, or before the first.
    ends = (jnp.iinfo(kind) for kind in (array.dtype, jnp.int32))
    own, held = ((int(end.min), int(end.max)) for end in ends)
    return array.clip(max(own[0], held[0]), min(own[1], held[1])).astype(jnp.int32)


def check_tap(tap, leading: tuple[int, ...], sources: int) -> None:
    """Raises ValueError where a tap is not `zero_tap(sources, leading)`'s like."""
    if tap is None:
        return
    allowed = f"zero_tap({sources}, {leading})"
    if not isinstance(tap, LawStatistics):
        raise ValueError(f"tap of {type(tap).__name__}: allowed: {allowed}")
    for name, leaf in tap._asdict().items():
        shape = (*leading, sources) if name == "column_usage" else leading
        if jnp.shape(leaf) != shape:
            raise ValueError(f"tap.{name} of {jnp.shape(leaf)}: allowed: {allowed}")


def _check_dropout(rate: float, key, slot, num_heads: int):
    """Two words of the key and the slot of each head; None without dropout."""
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate={rate!r}: allowed: 0 <= rate < 1")
    if rate == 0:
        return None
    if not isinstance(key, jax.Array):
        raise ValueError(f"dropout_key={key!r} with a rate of {rate}: allowed: a key")
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    words = jax.random.key_data(key) if typed else key
    if words.shape != (2,):  # of another generator: draw a key for this one
        words = jax.random.bits(key, (2,), jnp.uint32)
    slot = _count(num_heads) if slot is None else slot
    if not isinstance(slot, jax.Array):
        slot = np.asarray(slot)
        whole = np.issubdtype(slot.dtype, np.integer)
        if not whole or (slot.size and not 0 <= slot.min() <= slot.max() < 2**32):
            raise ValueError(
                f"dropout_slot={slot!r}: allowed: whole numbers from 0, below 2^32"
            )
    if slot.shape != (num_heads,):
        raise ValueError(f"dropout_slot {slot.shape}: allowed: ({num_heads},)")
    return (words[0], words[1]), jnp.asarray(slot.astype(np.uint32))
