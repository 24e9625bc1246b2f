"""The first-order laws of attention under cross-entropy, one function per equation.

Signals (gradients at each query), the gradients that follow from them, motion under a
small step, changes by variants of the head, and last the gradient of one head in one
call. T queries i, S sources j; `weight` is the paper's a. Losses are in nats, so
gradients are in nats per unit of their variable.

The laws are local: any head of any layer obeys them, with u = ∂L/∂(its output). Several
heads are a `vmap`, each with its own slice of u (`attention.split_heads`). A mask, a
score bias or a fully masked row is in the weight already: a source or query of weight 0
adds nothing to any sum, also where it is not finite.

The paper is arXiv 2512.22473; `scripts/check_gradients.py` is the proof.
"""

import math

import chex
import jax
import jax.numpy as jnp

from jaxattn.theory import attention, losses, masks, row_blocks

# --- signals


def logit_gradient(
    logit: jax.Array, target: jax.Array, weight: jax.Array | None = None
) -> jax.Array:
    """Gradient of the loss for the logits: prediction less target.

    δ_i = ∂L/∂l_i = w_i (p_i - onehot(y_i)) / Σ_r w_r

    Args:
      logit: (T, C).
      target: class indices (T,), in [0, C).
      weight: position weights (T,), default 1 each.

    Returns:
      δ (T, C); rows sum to zero. Positive where a class is predicted too strongly. 0
      where a weight is 0, NaN where a target is not a class, all NaN if a weight is
      negative.

    Source: softmax and cross-entropy; the paper's p - onehot(y).
    """
    chex.assert_rank([logit, target], [2, 1])
    chex.assert_equal_shape_prefix([logit, target], 1)
    share = losses.position_shares(weight, logit.shape[0], logit.dtype)
    return losses.weighted_surprise(logit, target, share)


def upstream_gradient(logit_gradient: jax.Array, w_o: jax.Array) -> jax.Array:
    """Gradient of the loss for the context of each query.

    u_i = ∂L/∂g_i = δ_i W_Oᵀ

    Args:
      logit_gradient: δ (T, C).
      w_o: read-out (d_v, C).

    Returns:
      u (T, d_v); the context would move along -u.

    Source: the paper, upstream gradient u.
    """
    chex.assert_rank([logit_gradient, w_o], 2)
    return logit_gradient @ w_o.T


def compatibility(upstream: jax.Array, value: jax.Array) -> jax.Array:
    """Gradient of the loss for the attention weights.

    b_ij = ∂L/∂a_ij = u_i · v_j

    Args:
      upstream: u (T, d_v).
      value: v (S, d_v).

    Returns:
      b (T, S); negative where more of source j would lower the loss of query i.

    Source: the paper, compatibility b.
    """
    chex.assert_rank([upstream, value], 2)
    return upstream @ value.T


def expected_compatibility(upstream: jax.Array, context: jax.Array) -> jax.Array:
    """Mean compatibility of a query's sources, without a T x S array.

    E_i[b] = Σ_j a_ij b_ij = u_i · g_i

    Args:
      upstream: u (T, d_v).
      context: g (T, d_v).

    Returns:
      (T,); the slope of the loss if all weights of query i are scaled up alike.

    Source: the paper, E_α[b]; arXiv 2205.14135, appendix B, for the dot product.
    """
    chex.assert_rank([upstream, context], 2)
    chex.assert_equal_shape([upstream, context])
    return jnp.sum(upstream * context, axis=1)


def advantage(weight: jax.Array, compatibility: jax.Array) -> jax.Array:
    """Advantage of a source over the average of the query's sources.

    A_ij = E_i[b] - b_ij,  E_i[b] = Σ_l a_il b_il

    Args:
      weight: a (T, S).
      compatibility: b (T, S).

    Returns:
      A (T, S); positive where more weight on j lowers the loss. Σ_j a_ij A_ij = 0.

    Source: the paper, advantage-based routing law.
    """
    chex.assert_rank([weight, compatibility], 2)
    chex.assert_equal_shape([weight, compatibility])
    expected = jnp.sum(_weighted(weight, compatibility), axis=1, keepdims=True)
    return expected - compatibility


# --- gradients


def score_gradient(weight: jax.Array, advantage: jax.Array) -> jax.Array:
    """Advantage-based routing: the gradient of the loss for the scores.

    ∂L/∂s_ij = a_ij (b_ij - E_i[b]) = -a_ij A_ij

    Args:
      weight: a (T, S).
      advantage: A (T, S).

    Returns:
      (T, S); rows sum to zero, since sources compete. Descent raises s_ij where A > 0.

    Source: the paper, advantage-based routing law.
    """
    chex.assert_rank([weight, advantage], 2)
    chex.assert_equal_shape([weight, advantage])
    return _weighted(-weight, advantage)


def value_gradient(weight: jax.Array, upstream: jax.Array) -> jax.Array:
    """Responsibility-weighted value update: the gradient of the loss for the values.

    ∂L/∂v_j = Σ_i a_ij u_i = N_j ū_j

    Args:
      weight: a (T, S).
      upstream: u (T, d_v).

    Returns:
      (S, d_v).

    Source: the paper, responsibility-weighted value update.
    """
    chex.assert_rank([weight, upstream], 2)
    return weight.T @ _used(upstream, weight, axis=1)


def query_gradient(score_gradient: jax.Array, key: jax.Array) -> jax.Array:
    """Gradient of the loss for the queries.

    ∂L/∂q_i = Σ_j (∂L/∂s_ij) k_j / √d_k

    Args:
      score_gradient: ∂L/∂s (T, S).
      key: k (S, d_k).

    Returns:
      (T, d_k).

    Source: the paper, chain rule of s = q·k / √d_k.
    """
    chex.assert_rank([score_gradient, key], 2)
    used = _used(key, score_gradient, axis=0)
    return score_gradient @ used / math.sqrt(key.shape[1])


def key_gradient(score_gradient: jax.Array, query: jax.Array) -> jax.Array:
    """Gradient of the loss for the keys.

    ∂L/∂k_j = Σ_i (∂L/∂s_ij) q_i / √d_k

    Args:
      score_gradient: ∂L/∂s (T, S).
      query: q (T, d_k).

    Returns:
      (S, d_k).

    Source: the paper, chain rule of s = q·k / √d_k.
    """
    chex.assert_rank([score_gradient, query], 2)
    used = _used(query, score_gradient, axis=1)
    return score_gradient.T @ used / math.sqrt(query.shape[1])


def projection_gradient(inputs: jax.Array, gradient: jax.Array) -> jax.Array:
    """Gradient of the loss for a projection, from that for its output.

    ∂L/∂W_Q = xᵀ ∂L/∂q,  ∂L/∂W_K = xᵀ ∂L/∂k,  ∂L/∂W_V = xᵀ ∂L/∂v,  ∂L/∂W_O = gᵀ δ

    Args:
      inputs: of the projection (N, d_in): x, or the context g.
      gradient: of the loss for its output (N, d_out).

    Returns:
      (d_in, d_out).

    Source: chain rule of a linear map.
    """
    chex.assert_rank([inputs, gradient], 2)
    chex.assert_equal_shape_prefix([inputs, gradient], 1)
    return inputs.T @ gradient


def output_bias_gradient(logit_gradient: jax.Array) -> jax.Array:
    """Gradient of the loss for the bias of the read-out.

    ∂L/∂b_O = Σ_i δ_i

    Args:
      logit_gradient: δ (T, C).

    Returns:
      (C,); sums to zero.

    Source: chain rule of a sum.
    """
    chex.assert_rank(logit_gradient, 2)
    return jnp.sum(logit_gradient, axis=0)


def input_gradient(
    params: attention.Params,
    query_gradient: jax.Array,
    key_gradient: jax.Array,
    value_gradient: jax.Array,
) -> jax.Array:
    """Gradient of the loss for the inputs of self-attention, over its three paths.

    ∂L/∂x = ∂L/∂q W_Qᵀ + ∂L/∂k W_Kᵀ + ∂L/∂v W_Vᵀ

    Args:
      params: of the head.
      query_gradient: ∂L/∂q (T, d_k).
      key_gradient: ∂L/∂k (T, d_k).
      value_gradient: ∂L/∂v (T, d_v).

    Returns:
      (T, d_x); this is the u of the layer below.

    Source: chain rule of q, k and v.
    """
    chex.assert_rank([query_gradient, key_gradient, value_gradient], 2)
    chex.assert_equal_shape([query_gradient, key_gradient])
    routing = query_gradient @ params.w_q.T + key_gradient @ params.w_k.T
    return routing + value_gradient @ params.w_v.T


# --- responsibilities


def column_usage(weight: jax.Array) -> jax.Array:
    """Attention that each source receives, an effective number of queries.

    N_j = Σ_i a_ij;  Σ_j N_j is the number of queries that are not fully masked

    Args:
      weight: a (T, S).

    Returns:
      N (S,).

    Source: the paper, EM reading: mass of a component.
    """
    chex.assert_rank(weight, 2)
    return jnp.sum(weight, axis=0)


def prototype_signal(weight: jax.Array, upstream: jax.Array) -> jax.Array:
    """Mean upstream gradient of the queries that use a source.

    ū_j = Σ_i a_ij u_i / N_j

    Args:
      weight: a (T, S).
      upstream: u (T, d_v).

    Returns:
      ū (S, d_v). A source that no query uses (N_j = 0) has no mean: 0 stands there, so
      that N_j ū_j is its gradient, also 0.

    Source: the paper, EM reading: responsibility-weighted mean.
    """
    usage = column_usage(weight)[:, None]
    return value_gradient(weight, upstream) / jnp.where(usage > 0, usage, 1)


def overlap_kernel(weight: jax.Array) -> jax.Array:
    """Overlap of the sources of two queries, through which they move each other.

    K = a aᵀ,  K_ir = Σ_j a_ij a_rj

    Args:
      weight: a (T, S).

    Returns:
      K (T, T), positive semidefinite; each row sums to Σ_j a_ij N_j.

    Source: the paper, first-order change of the context under a value step.
    """
    chex.assert_rank(weight, 2)
    return weight @ weight.T


# --- first-order motion, for a small step of descent with rate η


def score_motion(
    weight: jax.Array, advantage: jax.Array, rate: jax.typing.ArrayLike
) -> jax.Array:
    """Motion of free scores: towards sources of positive advantage.

    ds_ij = -η ∂L/∂s_ij = η a_ij A_ij

    Args:
      weight: a (T, S).
      advantage: A (T, S).
      rate: η.

    Returns:
      ds (T, S); rows sum to zero.

    Source: the paper, advantage-based routing law, as a step.
    """
    return -rate * score_gradient(weight, advantage)


def weight_motion(weight: jax.Array, score_motion: jax.Array) -> jax.Array:
    """Motion of weights under any small motion of the scores.

    da_ij = a_ij (ds_ij - Σ_l a_il ds_il)

    Args:
      weight: a (T, S).
      score_motion: ds (T, S).

    Returns:
      da (T, S), to first order; rows sum to zero.

    Source: Jacobian of the softmax.
    """
    chex.assert_rank([weight, score_motion], 2)
    chex.assert_equal_shape([weight, score_motion])
    mean = jnp.sum(_weighted(weight, score_motion), axis=1, keepdims=True)
    return _weighted(weight, score_motion - mean)


def value_motion(
    weight: jax.Array, upstream: jax.Array, rate: jax.typing.ArrayLike
) -> jax.Array:
    """Motion of free values: against the signals of the queries that use them.

    dv_j = -η ∂L/∂v_j = -η Σ_i a_ij u_i

    Args:
      weight: a (T, S).
      upstream: u (T, d_v).
      rate: η.

    Returns:
      dv (S, d_v).

    Source: the paper, responsibility-weighted value update.
    """
    return -rate * value_gradient(weight, upstream)


def compatibility_motion(upstream: jax.Array, value_motion: jax.Array) -> jax.Array:
    """Feedback: change of the compatibilities when the values move.

    db_ij = u_i · dv_j = -η Σ_r a_rj u_i·u_r, the second for free values

    Queries that use j move v_j against their u: b_ij falls for queries whose u agrees
    with theirs, and A_ij rises where b_ij falls by more than the query's mean,
    Σ_l a_il db_il.

    Args:
      upstream: u (T, d_v), fixed.
      value_motion: dv (S, d_v).

    Returns:
      db (T, S).

    Source: the paper, feedback of routing and content.
    """
    return compatibility(upstream, value_motion)


def routing_motion(weight_motion: jax.Array, value: jax.Array) -> jax.Array:
    """Motion of contexts by the motion of the weights.

    dg_i = Σ_j da_ij v_j

    Args:
      weight_motion: da (T, S).
      value: v (S, d_v).

    Returns:
      dg (T, d_v), to first order; contexts are in the units of the values.

    Source: product rule of g = a v.
    """
    chex.assert_rank([weight_motion, value], 2)
    return weight_motion @ _used(value, weight_motion, axis=0)


def content_motion(weight: jax.Array, value_motion: jax.Array) -> jax.Array:
    """Motion of contexts by the motion of the values.

    dg_i = Σ_j a_ij dv_j = -η Σ_r K_ir u_r, the second for free values, K = a aᵀ

    Args:
      weight: a (T, S).
      value_motion: dv (S, d_v).

    Returns:
      (T, d_v), exact for a step of the values alone.

    Source: product rule of g = a v.
    """
    chex.assert_rank([weight, value_motion], 2)
    return weight @ _used(value_motion, weight, axis=0)


def context_motion(
    weight: jax.Array,
    weight_motion: jax.Array,
    value: jax.Array,
    value_motion: jax.Array,
) -> jax.Array:
    """Motion of contexts when weights and values move together.

    dg_i = Σ_j (da_ij v_j + a_ij dv_j); the remainder, Σ_j da_ij dv_j, is O(η²)

    Args:
      weight: a (T, S).
      weight_motion: da (T, S).
      value: v (S, d_v).
      value_motion: dv (S, d_v).

    Returns:
      dg (T, d_v), to first order; contexts are in the units of the values.

    Source: product rule of g = a v.
    """
    routing = routing_motion(weight_motion, value)
    return routing + content_motion(weight, value_motion)


def loss_change(gradient: chex.ArrayTree, motion: chex.ArrayTree) -> jax.Array:
    """Change of the loss to first order, for any small motion by any optimizer.

    dL = Σ ⟨∂L/∂θ, dθ⟩

    Args:
      gradient: pytree of ∂L/∂θ.
      motion: pytree of dθ, same structure.

    Returns:
      Scalar, nats; negative where the loss should fall.

    Source: Taylor's theorem, first order.
    """
    chex.assert_trees_all_equal_shapes(gradient, motion)
    products = jax.tree.map(jnp.vdot, gradient, motion)
    return jax.tree.reduce(jnp.add, products)


def descent_loss_change(
    gradient: chex.ArrayTree, rate: jax.typing.ArrayLike
) -> jax.Array:
    """Change of the loss to first order, for a step of plain gradient descent.

    dL = -η Σ ‖∂L/∂θ‖²;  free scores: -η Σ_ij a_ij² A_ij²,  free values: -η ‖aᵀ u‖²,
    projections: -η Σ_W ‖∂L/∂W‖²

    Args:
      gradient: ∂L/∂s, ∂L/∂v, or a pytree such as Params of gradients.
      rate: η.

    Returns:
      Scalar, nats; at most 0.

    Source: Taylor's theorem, first order, with dθ = -η ∂L/∂θ.
    """
    return -rate * loss_change(gradient, gradient)


def remainder(
    actual: jax.Array, gradient: chex.ArrayTree, motion: chex.ArrayTree
) -> jax.Array:
    """Change of the loss under a step, less its first order.

    R = L(θ + dθ) - L(θ) - Σ ⟨∂L/∂θ, dθ⟩ = O(‖dθ‖²)

    Args:
      actual: L(θ + dθ) - L(θ), scalar.
      gradient: pytree of ∂L/∂θ, where the step began.
      motion: pytree of dθ, same structure.

    Returns:
      Scalar, nats; positive where the loss fell less than the first order says.

    Source: Taylor's theorem, first order.
    """
    return actual - loss_change(gradient, motion)


# --- variants of the head, and their gradients


def drop(array: jax.Array, keep: jax.Array, dropout_rate: float) -> jax.Array:
    """Attention dropout, applied to weights or compatibilities.

    c ∘ array,  c_ij = keep_ij / (1 - dropout_rate)

    The head attends with c a: g_i = Σ_j c_ij a_ij v_j. So the values' law has c a,
    ∂L/∂v_j = Σ_i c_ij a_ij u_i, and the scores' law has a and b̃ = c b:
    ∂L/∂s_ij = a_ij (b̃_ij - Σ_l a_il b̃_il). Diagnostics always use a, never c a.

    Args:
      array: a or b (T, S).
      keep: boolean (T, S), False where attention is dropped.
      dropout_rate: share that is dropped, in [0, 1); not traced.

    Returns:
      (T, S).

    Source: Srivastava et al. 2014, JMLR 15, inverted, on attention weights.
    """
    chex.assert_rank([array, keep], 2)
    chex.assert_equal_shape([array, keep])
    chex.assert_type(keep, bool)
    if not 0 <= dropout_rate < 1:
        raise ValueError(f"dropout_rate={dropout_rate!r}: must be from 0, below 1")
    return jnp.where(keep, array / (1 - dropout_rate), 0)


def layer_norm_gradient(
    value: jax.Array, gradient: jax.Array, epsilon: float
) -> jax.Array:
    """Gradient for values before a LayerNorm without scale and shift.

    ∂L/∂ṽ_j = J_LN(ṽ_j)ᵀ ∂L/∂v_j = (γ - mean γ - v_j mean(γ ∘ v_j)) / √(var ṽ_j + ε),
    with γ = ∂L/∂v_j; only the direction of a value can be learned, not its length

    Args:
      value: ṽ (S, d_v), before the norm.
      gradient: ∂L/∂v (S, d_v), for the values after it.
      epsilon: as in `attention.layer_norm`.

    Returns:
      (S, d_v); rows sum to zero.

    Source: arXiv 1607.06450, without gain and bias.
    """
    chex.assert_rank([value, gradient], 2)
    chex.assert_equal_shape([value, gradient])
    centred = value - jnp.mean(value, axis=1, keepdims=True)
    spread = jnp.sqrt(jnp.mean(centred**2, axis=1, keepdims=True) + epsilon)
    normed = centred / spread
    along = normed * jnp.mean(gradient * normed, axis=1, keepdims=True)
    return (gradient - jnp.mean(gradient, axis=1, keepdims=True) - along) / spread


def group_gradient(gradient: jax.Array, num_kv_heads: int) -> jax.Array:
    """Gradient for key-value heads that several query heads share (grouped-query).

    ∂L/∂k_j^r = Σ_h ∂L/∂k_j^h over the H / H_kv heads h with h // (H / H_kv) = r

    Args:
      gradient: for each query head's own copy of its keys or values (S, H, d).
      num_kv_heads: H_kv, a divisor of H.

    Returns:
      (S, H_kv, d); see `attention.repeat_heads`, whose transpose this is.

    Source: arXiv 2305.13245, grouped-query attention.
    """
    chex.assert_rank(gradient, 3)
    sources, num_heads, depth = gradient.shape
    attention.check_size("num_kv_heads", num_kv_heads)
    chex.assert_is_divisible(num_heads, num_kv_heads)
    return jnp.sum(gradient.reshape(sources, num_kv_heads, -1, depth), axis=2)


def score_bias_gradient(score_gradient: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Gradient for a bias that was added to the scores.

    ∂L/∂bias_ij = ∂L/∂s_ij, summed over the queries or sources that share the bias

    Args:
      score_gradient: ∂L/∂s (T, S).
      shape: of the bias: (T, S), (1, S), (T, 1) or (1, 1).

    Returns:
      Array of that shape. A bias shared by all sources, (T, 1), changes nothing: 0.

    Source: chain rule of a sum that is broadcast.
    """
    chex.assert_rank(score_gradient, 2)
    for size, full in zip(shape, score_gradient.shape, strict=True):
        if size not in (1, full):
            raise ValueError(f"shape={shape}: must be 1 or {full} in place of {size}")
    shared = [n for n, size in enumerate(shape) if size < score_gradient.shape[n]]
    return jnp.sum(score_gradient, axis=tuple(shared), keepdims=True)


def residual_gradient(
    input_gradient: jax.Array, output_gradient: jax.Array
) -> jax.Array:
    """Gradient for the inputs of a head with a residual around it, h = x + head(x).

    ∂L/∂x = ∂L/∂x through the head + ∂L/∂h

    The laws inside are unchanged, with u = ∂L/∂h W_Oᵀ.

    Args:
      input_gradient: through the head (T, d_x), see `input_gradient`.
      output_gradient: ∂L/∂h (T, d_x).

    Returns:
      (T, d_x).

    Source: arXiv 1512.03385, identity shortcut.
    """
    chex.assert_rank([input_gradient, output_gradient], 2)
    chex.assert_equal_shape([input_gradient, output_gradient])
    return input_gradient + output_gradient


# --- one head, all at once


def loss_and_gradient(
    params: attention.Params,
    inputs: jax.Array,
    targets: jax.Array,
    mask=None,
    weights: jax.Array | None = None,
) -> tuple[jax.Array, attention.Params]:
    """Loss of one head on one sequence and its gradient, by the laws, without autodiff.

    The laws above, in row blocks, with the sums over sources done on the inputs, since
    of its row of the map query i needs only

      z_i = Σ_j a_ij x_j                   context g_i = z_i W_V
      m_i = Σ_j a_ij (b_ij - E_i[b]) x_j   (∂L/∂s X)_i

    and then

      ∂L/∂W_V = zᵀ u          ∂L/∂W_Q = xᵀ m W_K / √d_k
      ∂L/∂W_O = gᵀ δ          ∂L/∂W_K = mᵀ q / √d_k          ∂L/∂b_O = Σ_i δ_i

    with b_ij = u_i·v_j = δ_i·(v_j W_O), whichever product is shorter.

    No T x T array is kept, no exponential is computed twice, and under a known causal
    mask the masked half is not computed. Four products make or read T x T entries, of
    depth d_k, d_x, min(d_v, C) and d_x.

    Args:
      params: of the head.
      inputs: x (T, d_x).
      targets: class indices (T,).
      mask: boolean (T, T), True where i may attend to j; None allows all. Pass
        `attention.causal_mask(T)` itself to skip the masked half.
      weights: position weights (T,), default 1 each.

    Returns:
      The loss, in nats, and its gradient in the shape of `params`.

    Source: arXiv 2512.22473, sections 2 and 3; the products are the backward pass of
    fused attention (arXiv 2205.14135, appendix B).
    """
    attention.assert_head_shapes(params, inputs, mask)
    chex.assert_shape(targets, inputs.shape[:1])
    share = losses.position_shares(weights, len(inputs), params.w_o.dtype)
    inputs = masks.only_used(inputs, mask, None if weights is None else share)
    scale = 1 / math.sqrt(params.w_q.shape[1])
    query, key = inputs @ (params.w_q * scale), inputs @ params.w_k
    value = inputs @ params.w_v
    in_classes = params.w_o.shape[1] < params.w_o.shape[0]
    content = row_blocks.append_one(value @ params.w_o if in_classes else value)
    input_and_one = row_blocks.append_one(inputs).T

    def block(tiles, query, target, share):
        exponentials = [
            (sources, jnp.exp(score))
            for sources, score in row_blocks.shifted_scores(query, key, tiles)
        ]
        summed = sum(input_and_one[:, sources] @ e for sources, e in exponentials)
        normaliser = jnp.where(summed[-1] > 0, summed[-1], 1)[:, None]
        mean_input = summed[:-1].T / normaliser
        context = mean_input @ params.w_v
        logit = attention.read_out(params, context)
        delta = losses.weighted_surprise(logit, target, share)

        # (b_ij - E_i[b]) / n_i in one product: [u_i, -u_i·g_i] / n_i against [v_j, 1].
        if in_classes:
            signal, mean = delta, context @ params.w_o
        else:
            signal, mean = upstream_gradient(delta, params.w_o), context
        expected = jnp.sum(signal * mean, axis=1, keepdims=True)
        centred = (jnp.concatenate([signal, -expected], axis=1) / normaliser).T
        routed = sum(
            input_and_one[:-1, sources] @ (e * (content[sources] @ centred))
            for sources, e in exponentials
        )
        return mean_input, logit, delta, routed.T

    mean_input, logit, delta, routed = row_blocks.over_row_blocks(
        block, mask, query, targets, share
    )
    gradient = attention.Params(
        w_q=inputs.T @ (routed @ params.w_k) * scale,
        w_k=routed.T @ query,  # `query` already carries 1/√d_k
        w_v=mean_input.T @ upstream_gradient(delta, params.w_o),
        w_o=(mean_input @ params.w_v).T @ delta,
        b_o=None if params.b_o is None else jnp.sum(delta, axis=0),
    )
    nll = losses.negative_log_likelihood(logit, targets)
    return losses.weighted_mean(nll, share), gradient


def _weighted(weight: jax.Array, array: jax.Array) -> jax.Array:
    """Products weight ∘ array, 0 where the weight is 0."""
    return jnp.where(weight == 0, 0, weight * array)


def _used(array: jax.Array, weight: jax.Array, axis: int) -> jax.Array:
    """An array (n, d), with 0 in the rows whose weights along `axis` are all 0."""
    used = jnp.sum(jnp.abs(weight), axis=axis) != 0
    return jnp.where(used[:, None], array, 0)
