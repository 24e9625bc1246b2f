"""The first-order laws of attention under cross-entropy, one function per equation.

Signals first (what the loss tells each query), then the gradients they make, then all
of it for one head in one call. T queries i, S sources j; `weight` is the paper's a.
Losses are in nats, so gradients are nats per unit of what they are taken for.

Source of all: arXiv 2512.22473 ("the paper"), section 2 and 3.
"""

import math

import chex
import jax
import jax.numpy as jnp

from jaxattn import attention, losses

# --- signals


def logit_gradient(
    logit: jax.Array, target: jax.Array, weight: jax.Array | None = None
) -> jax.Array:
    """Gradient of the loss for the logits: prediction less what came.

    δ_i = ∂L/∂l_i = w_i (p_i - onehot(y_i)) / Σ_r w_r

    Args:
      logit: (T, C).
      target: class indices (T,), in [0, C).
      weight: position weights (T,), default 1 each.

    Returns:
      δ (T, C); rows sum to zero. Positive where a class is predicted too strongly.
    """
    chex.assert_rank([logit, target], [2, 1])
    chex.assert_equal_shape_prefix([logit, target], 1)
    share = losses.position_shares(weight, logit.shape[0], logit.dtype)
    return share[:, None] * _surprise(logit, target)


def upstream_gradient(logit_gradient: jax.Array, w_o: jax.Array) -> jax.Array:
    """Gradient of the loss for the context, the signal each query sends back.

    u_i = ∂L/∂g_i = δ_i W_Oᵀ

    Args:
      logit_gradient: δ (T, C).
      w_o: read-out (d_v, C).

    Returns:
      u (T, d_v); the context would move along -u.
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
    """
    chex.assert_rank([upstream, value], 2)
    return upstream @ value.T


def advantage(weight: jax.Array, compatibility: jax.Array) -> jax.Array:
    """How much better than the query's average a source is.

    A_ij = E_i[b] - b_ij,  E_i[b] = Σ_l a_il b_il

    Args:
      weight: a (T, S).
      compatibility: b (T, S).

    Returns:
      A (T, S); positive where looking more at j lowers the loss. Σ_j a_ij A_ij = 0.
    """
    chex.assert_rank([weight, compatibility], 2)
    chex.assert_equal_shape([weight, compatibility])
    expected = jnp.sum(weight * compatibility, axis=1, keepdims=True)
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
    """
    chex.assert_rank([weight, advantage], 2)
    chex.assert_equal_shape([weight, advantage])
    return -weight * advantage


def value_gradient(weight: jax.Array, upstream: jax.Array) -> jax.Array:
    """Responsibility-weighted value update: the gradient of the loss for the values.

    ∂L/∂v_j = Σ_i a_ij u_i = N_j ū_j

    Args:
      weight: a (T, S).
      upstream: u (T, d_v).

    Returns:
      (S, d_v).
    """
    chex.assert_rank([weight, upstream], 2)
    return weight.T @ upstream


def query_gradient(score_gradient: jax.Array, key: jax.Array) -> jax.Array:
    """Gradient of the loss for the queries.

    ∂L/∂q_i = Σ_j (∂L/∂s_ij) k_j / √d_k

    Args:
      score_gradient: ∂L/∂s (T, S).
      key: k (S, d_k).

    Returns:
      (T, d_k).
    """
    chex.assert_rank([score_gradient, key], 2)
    return score_gradient @ key / math.sqrt(key.shape[1])


def key_gradient(score_gradient: jax.Array, query: jax.Array) -> jax.Array:
    """Gradient of the loss for the keys.

    ∂L/∂k_j = Σ_i (∂L/∂s_ij) q_i / √d_k

    Args:
      score_gradient: ∂L/∂s (T, S).
      query: q (T, d_k).

    Returns:
      (S, d_k).
    """
    chex.assert_rank([score_gradient, query], 2)
    return score_gradient.T @ query / math.sqrt(query.shape[1])


# --- responsibilities


def column_usage(weight: jax.Array) -> jax.Array:
    """How much attention each source receives, an effective number of queries.

    N_j = Σ_i a_ij;  Σ_j N_j is the number of queries that may look somewhere

    Args:
      weight: a (T, S).

    Returns:
      N (S,).
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
      ū (S, d_v). A source that no query uses (N_j = 0) has no mean: it is given 0, so
      that N_j ū_j is its gradient, also 0.
    """
    usage = column_usage(weight)[:, None]
    return value_gradient(weight, upstream) / jnp.where(usage > 0, usage, 1)


def overlap_kernel(weight: jax.Array) -> jax.Array:
    """How far two queries share sources, and so move each other's context.

    K = a aᵀ,  K_ir = Σ_j a_ij a_rj

    Args:
      weight: a (T, S).

    Returns:
      K (T, T), positive semidefinite; each row sums to Σ_j a_ij N_j.
    """
    chex.assert_rank(weight, 2)
    return weight @ weight.T


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
    query i needs no more of its row of the map than

      z_i = Σ_j a_ij x_j                   context g_i = z_i W_V
      m_i = Σ_j a_ij (b_ij - E_i[b]) x_j   (∂L/∂s X)_i

    and then

      ∂L/∂W_V = zᵀ u          ∂L/∂W_Q = xᵀ m W_K / √d_k
      ∂L/∂W_O = gᵀ δ          ∂L/∂W_K = mᵀ q / √d_k          ∂L/∂b_O = Σ_i δ_i

    with b_ij = u_i·v_j = δ_i·(v_j W_O), whichever is shorter.

    No T x T array is kept, no exponential is computed twice, and under a known causal
    mask the masked half is not computed. Four products make or read T x T entries, of
    depth d_k, d_x, min(d_v, C) and d_x.

    Args:
      params: of the head.
      inputs: x (T, d_x).
      targets: class indices (T,).
      mask: boolean (T, T), True where i may look at j; None looks everywhere. Pass
        `attention.causal_mask(T)` itself for the causal short cut.
      weights: position weights (T,), default 1 each.

    Returns:
      The loss, in nats, and its gradient in the shape of `params`.

    Source: arXiv 2512.22473, sections 2 and 3; the products are the backward pass of
    fused attention (arXiv 2205.14135, appendix B).
    """
    attention.assert_head_shapes(params, inputs, mask)
    chex.assert_shape(targets, inputs.shape[:1])
    scale = 1 / math.sqrt(params.w_q.shape[1])
    query, key = inputs @ (params.w_q * scale), inputs @ params.w_k
    value = inputs @ params.w_v
    in_classes = params.w_o.shape[1] < params.w_o.shape[0]
    content = attention.append_one(value @ params.w_o if in_classes else value)
    input_and_one = attention.append_one(inputs).T
    share = losses.position_shares(weights, len(inputs), params.w_o.dtype)

    def block(tiles, query, target, share):
        exponentials = [
            (sources, jnp.exp(score))
            for sources, score in attention.shifted_scores(query, key, tiles)
        ]
        summed = sum(input_and_one[:, sources] @ e for sources, e in exponentials)
        normaliser = jnp.where(summed[-1] > 0, summed[-1], 1)[:, None]
        mean_input = summed[:-1].T / normaliser
        context = mean_input @ params.w_v
        logit = attention.read_out(params, context)
        delta = share[:, None] * _surprise(logit, target)

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

    mean_input, logit, delta, routed = attention.over_row_blocks(
        block, mask, query, targets, share
    )
    gradient = attention.Params(
        w_q=inputs.T @ (routed @ params.w_k) * scale,
        w_k=routed.T @ query,  # `query` already carries 1/√d_k
        w_v=mean_input.T @ upstream_gradient(delta, params.w_o),
        w_o=(mean_input @ params.w_v).T @ delta,
        b_o=None if params.b_o is None else jnp.sum(delta, axis=0),
    )
    return jnp.vdot(share, losses.negative_log_likelihood(logit, targets)), gradient


def _surprise(logit: jax.Array, target: jax.Array) -> jax.Array:
    """p_i - onehot(y_i), (T, C)."""
    onehot = jax.nn.one_hot(target, logit.shape[1], dtype=logit.dtype)
    return jax.nn.softmax(logit) - onehot
