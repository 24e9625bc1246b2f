"""What a head is scored by: cross-entropy, predictive entropy, distance to Bayes.

All in nats; all averages over positions are weighted by w_i / sum w.
"""

import chex
import jax
import jax.numpy as jnp


def position_shares(weight: jax.Array | None, length: int, dtype) -> jax.Array:
    """Share of each position in a weighted mean.

    share_i = w_i / Σ_r w_r, and 1/T without weights. If every weight is zero there is
    no position to average over: all shares are zero, and so is any mean.

    Args:
      weight: position weights (T,), at least 0, or None for all equal.
      length: T.
      dtype: of the result.

    Returns:
      Shares (T,).
    """
    if weight is None:
        return jnp.full((length,), 1 / length, dtype)
    chex.assert_shape(weight, (length,))
    total = jnp.sum(weight).astype(dtype)
    return weight.astype(dtype) / jnp.where(total > 0, total, 1)


def negative_log_likelihood(logit: jax.Array, target: jax.Array) -> jax.Array:
    """Surprise at each target, -log softmax(l_i)[y_i], in nats.

    Args:
      logit: (T, C).
      target: class indices (T,), in [0, C); or probabilities (T, C), and then what is
        to be expected, -Σ_c y_ic log p_ic.

    Returns:
      (T,), at least 0.
    """
    chex.assert_rank([logit, target], [2, {1, 2}])
    log_p = jax.nn.log_softmax(logit)
    if target.ndim == 1:
        return -jnp.take_along_axis(log_p, target[:, None], axis=1)[:, 0]
    chex.assert_equal_shape([logit, target])
    # What will not be costs nothing, also where it is ruled out.
    return -jnp.sum(target * jnp.where(target > 0, log_p, 0), axis=1)


def cross_entropy(
    logit: jax.Array, target: jax.Array, weight: jax.Array | None = None
) -> jax.Array:
    """Weighted cross-entropy of one sequence, in nats.

    L = Σ_i w_i (-log p_i[y_i]) / Σ_i w_i,  p_i = softmax(l_i)

    Args:
      logit: (T, C).
      target: class indices (T,), in [0, C), or probabilities (T, C).
      weight: position weights (T,), default 1 each.

    Returns:
      Scalar loss; 0 if all weights are zero.

    Source: arXiv 2512.22473, section 2.
    """
    nll = negative_log_likelihood(logit, target)
    return jnp.vdot(position_shares(weight, logit.shape[0], logit.dtype), nll)


def predictive_entropy(logit: jax.Array, weight: jax.Array | None = None) -> jax.Array:
    """Mean entropy of the predicted class, in nats.

    H = Σ_i w_i (-Σ_c p_ic log p_ic) / Σ_i w_i,  between 0 and log C

    Args:
      logit: (T, C).
      weight: position weights (T,), default 1 each.

    Returns:
      Scalar.
    """
    chex.assert_rank(logit, 2)
    log_p = jax.nn.log_softmax(logit)
    # A logit of -inf is a class ruled out: it adds nothing, and no 0 * inf.
    possible = log_p > -jnp.inf
    entropy = -jnp.sum(jnp.exp(log_p) * jnp.where(possible, log_p, 0), axis=1)
    return jnp.vdot(position_shares(weight, logit.shape[0], logit.dtype), entropy)


def kl_to_bayes(
    log_bayes: jax.Array, logit: jax.Array, weight: jax.Array | None = None
) -> jax.Array:
    """Mean distance from the exact Bayes predictive to the model, in nats.

    KL = Σ_i w_i Σ_c β_ic (log β_ic - log p_ic) / Σ_i w_i,  at least 0

    Paired on the sequence: both predictives have seen the same inputs, so the noise of
    the drawn targets cancels.

    Args:
      log_bayes: log β (T, C); -inf where Bayes rules a class out.
      logit: the model's (T, C).
      weight: position weights (T,), default 1 each.

    Returns:
      Scalar, 0 only where model and Bayes agree.
    """
    chex.assert_rank([log_bayes, logit], 2)
    chex.assert_equal_shape([log_bayes, logit])
    log_p = jax.nn.log_softmax(logit)
    bayes = jnp.exp(log_bayes)
    # NaN is how a task flags impossible evidence: let it through, do not hide it.
    gap = jnp.where((bayes > 0) | jnp.isnan(log_bayes), log_bayes - log_p, 0)
    kl = jnp.sum(bayes * gap, axis=1)
    return jnp.vdot(position_shares(weight, logit.shape[0], logit.dtype), kl)


def accuracy(
    logit: jax.Array, target: jax.Array, weight: jax.Array | None = None
) -> jax.Array:
    """Weighted share of positions whose largest logit is the target's.

    Args:
      logit: (T, C).
      target: class indices (T,); or probabilities (T, C), and then what is to be
        expected.
      weight: position weights (T,), default 1 each.

    Returns:
      Scalar in [0, 1]; NaN if a logit is NaN, since then none is the largest.
    """
    chex.assert_rank([logit, target], [2, {1, 2}])
    guess = jnp.argmax(logit, axis=1)
    if target.ndim == 1:
        hit = (guess == target).astype(logit.dtype)
    else:
        hit = jnp.take_along_axis(target, guess[:, None], axis=1)[:, 0]
    hit = jnp.where(jnp.isnan(logit).any(axis=1), jnp.nan, hit)
    return jnp.vdot(position_shares(weight, logit.shape[0], logit.dtype), hit)


def tied_accuracy(
    logit: jax.Array, target: jax.Array, weight: jax.Array | None = None
) -> jax.Array:
    """Share of targets that a draw among the likeliest classes would hit.

    Σ_i w_i [y_i is among them] / how many they are / Σ_i w_i; `accuracy` without ties

    Args:
      logit: (T, C); classes within 1e-6 of the largest count as tied.
      target: class indices (T,).
      weight: position weights (T,), default 1 each.

    Returns:
      Scalar from 0 to 1.
    """
    chex.assert_rank(logit, 2)
    chex.assert_shape(target, logit.shape[:1])
    best = logit >= jnp.max(logit, axis=1, keepdims=True) - 1e-6
    hit = jnp.take_along_axis(best, target[:, None], axis=1)[:, 0]
    chance = jnp.where(hit, 1 / jnp.sum(best, axis=1).astype(logit.dtype), 0)
    chance = jnp.where(jnp.isnan(logit).any(axis=1), jnp.nan, chance)
    return jnp.vdot(position_shares(weight, len(logit), logit.dtype), chance)
