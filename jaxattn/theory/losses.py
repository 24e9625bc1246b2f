"""Scores of a prediction: cross-entropy, predictive entropy, distance to Bayes.

All in nats; all averages over positions are weighted by w_i / Σ w. A position of weight
0 does not count, whatever its logits and target are, also in gradients. With a negative
weight, or a target that is not a class at a position that counts, loss and gradient are
NaN.
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
      length: T, at least 1.
      dtype: of the result.

    Returns:
      Shares (T,); all NaN if a weight is negative or NaN.

    Raises:
      ValueError: there are no positions.
    """
    if length < 1:
        raise ValueError(f"length={length}: must be 1 or more positions")
    if weight is None:
        return jnp.full((length,), 1 / length, dtype)
    chex.assert_shape(weight, (length,))
    total = jnp.sum(weight).astype(dtype)
    share = weight.astype(dtype) / jnp.where(total > 0, total, 1)
    return jnp.where(jnp.all(weight >= 0), share, jnp.nan)


def weighted_mean(value: jax.Array, share: jax.Array) -> jax.Array:
    """Mean over positions, Σ_i share_i x_i, of those that have a share.

    Args:
      value: x (T,); not read at positions without a share.
      share: (T,), from `position_shares`.

    Returns:
      Scalar.
    """
    return jnp.vdot(share, jnp.where(share == 0, 0, value))


def target_factor(target: jax.Array, num_classes: int, dtype) -> jax.Array:
    """Factor of the loss and the logit gradient of each position: 1, or NaN.

    A factor, not a `jnp.where`, so that autodiff carries it to the gradient too.

    Args:
      target: class indices (T,), or probabilities (T, C).
      num_classes: C.
      dtype: of the result.

    Returns:
      (T,) 1 for a class in [0, C), or probabilities of at least 0; else NaN.
    """
    if target.ndim == 1:
        fits = (target >= 0) & (target < num_classes)
    else:
        fits = jnp.all(target >= 0, axis=1)
    return jnp.where(fits, 1, jnp.nan).astype(dtype)


def negative_log_likelihood(logit: jax.Array, target: jax.Array) -> jax.Array:
    """Surprise at each target, -log softmax(l_i)[y_i], in nats.

    Args:
      logit: (T, C).
      target: class indices (T,), in [0, C); or probabilities (T, C), and then the
        expectation, -Σ_c y_ic log p_ic.

    Returns:
      (T,), at least 0; NaN, as is its gradient, where a target is neither.
    """
    chex.assert_rank([logit, target], [2, {1, 2}])
    log_p = jax.nn.log_softmax(logit)
    factor = target_factor(target, logit.shape[1], logit.dtype)
    if target.ndim == 1:
        chosen = jnp.take_along_axis(log_p, target[:, None], axis=1, mode="clip")
        return -chosen[:, 0] * factor
    chex.assert_equal_shape([logit, target])
    # A class of probability 0 adds nothing, also where its logit is -inf.
    return -jnp.sum(target * jnp.where(target > 0, log_p, 0), axis=1) * factor


def weighted_surprise(
    logit: jax.Array, target: jax.Array, share: jax.Array
) -> jax.Array:
    """Gradient of a weighted cross-entropy for the logits: prediction less target.

    share_i (p_i - onehot(y_i))

    Args:
      logit: (T, C).
      target: class indices (T,), in [0, C).
      share: (T,), from `position_shares`.

    Returns:
      (T, C); 0 where the share is 0, NaN where a target that counts is not a class.
    """
    chex.assert_rank([logit, target, share], [2, 1, 1])
    onehot = jax.nn.one_hot(target, logit.shape[1], dtype=logit.dtype)
    factor = share * target_factor(target, logit.shape[1], logit.dtype)
    gap = jax.nn.softmax(logit) - onehot
    return jnp.where(share[:, None] == 0, 0, factor[:, None] * gap)


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
    chex.assert_rank(logit, 2)
    share = position_shares(weight, logit.shape[0], logit.dtype)
    nll = negative_log_likelihood(_counted(logit, share), target)
    return weighted_mean(nll, share)


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
    share = position_shares(weight, logit.shape[0], logit.dtype)
    log_p = jax.nn.log_softmax(_counted(logit, share))
    # A class with a logit of -inf adds nothing, and no 0 * inf.
    possible = log_p > -jnp.inf
    entropy = -jnp.sum(jnp.exp(log_p) * jnp.where(possible, log_p, 0), axis=1)
    return weighted_mean(entropy, share)


def kl_to_bayes(
    log_bayes: jax.Array, logit: jax.Array, weight: jax.Array | None = None
) -> jax.Array:
    """Mean distance from the exact Bayes predictive to the model, in nats.

    KL = Σ_i w_i Σ_c β_ic (log β_ic - log p_ic) / Σ_i w_i,  at least 0

    Paired on the sequence: both predictives have the same inputs, so the noise of the
    drawn targets cancels.

    Args:
      log_bayes: log β (T, C); -inf for classes of probability 0.
      logit: the model's (T, C).
      weight: position weights (T,), default 1 each.

    Returns:
      Scalar, 0 only where model and Bayes agree.
    """
    chex.assert_rank([log_bayes, logit], 2)
    chex.assert_equal_shape([log_bayes, logit])
    share = position_shares(weight, logit.shape[0], logit.dtype)
    log_p = jax.nn.log_softmax(_counted(logit, share))
    bayes = jnp.exp(log_bayes)
    # A task flags impossible evidence by NaN, which must show.
    gap = jnp.where((bayes > 0) | jnp.isnan(log_bayes), log_bayes - log_p, 0)
    kl = jnp.sum(bayes * gap, axis=1)
    return weighted_mean(kl, share)


def accuracy(
    logit: jax.Array, target: jax.Array, weight: jax.Array | None = None
) -> jax.Array:
    """Weighted share of positions whose largest logit is the target's.

    Args:
      logit: (T, C).
      target: class indices (T,); or probabilities (T, C), and then the expectation.
      weight: position weights (T,), default 1 each.

    Returns:
      Scalar in [0, 1]; NaN if a logit is NaN, since then none is the largest, or if a
      target is not a class.
    """
    chex.assert_rank([logit, target], [2, {1, 2}])
    guess = jnp.argmax(logit, axis=1)
    if target.ndim == 1:
        hit = (guess == target).astype(logit.dtype)
    else:
        hit = jnp.take_along_axis(target, guess[:, None], axis=1)[:, 0]
    hit = jnp.where(_undefined(logit, target), jnp.nan, hit)
    return weighted_mean(hit, position_shares(weight, len(logit), logit.dtype))


def tied_accuracy(
    logit: jax.Array, target: jax.Array, weight: jax.Array | None = None
) -> jax.Array:
    """Expected accuracy of a draw among the classes with the largest logit.

    Σ_i w_i [y_i in M_i] / |M_i| / Σ_i w_i, M_i these classes; `accuracy` without ties

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
    hit = jnp.take_along_axis(best, target[:, None], axis=1, mode="clip")[:, 0]
    chance = jnp.where(hit, 1 / jnp.sum(best, axis=1).astype(logit.dtype), 0)
    chance = jnp.where(_undefined(logit, target), jnp.nan, chance)
    return weighted_mean(chance, position_shares(weight, len(logit), logit.dtype))


def _counted(logit: jax.Array, share: jax.Array) -> jax.Array:
    """Logits, with 0 at positions without a share, so that their gradient is 0."""
    return jnp.where(share[:, None] == 0, 0, logit)


def _undefined(logit: jax.Array, target: jax.Array) -> jax.Array:
    """Positions whose accuracy is NaN: a logit is, or the target is not a class.

    A choice, not a factor: 0 times NaN is 0 in compiled products of a boolean.
    """
    factor = target_factor(target, logit.shape[1], logit.dtype)
    return jnp.isnan(logit).any(axis=1) | jnp.isnan(factor)
