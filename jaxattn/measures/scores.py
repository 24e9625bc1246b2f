"""Scores of a model on one sequence, against its targets and exact Bayes."""

import jax

from jaxattn.tasks.base import Batch
from jaxattn.theory import losses

# In nats, except the accuracy.
NAMES = ("loss", "bayes_nll", "kl", "accuracy", "predictive_entropy")


def scores(
    logit: jax.Array, batch: Batch, log_bayes: jax.Array
) -> dict[str, jax.Array]:
    """Computes loss, Bayes loss, KL to Bayes, accuracy and predictive entropy.

    Args:
      logit: of the model (T, C).
      batch: one sequence.
      log_bayes: log p(y_t | x_1..x_t), nats (T, C).

    Returns:
      Each of `NAMES` -> scalar, a mean over weighted positions.
    """
    weights = batch.weights
    return {
        "loss": losses.cross_entropy(logit, batch.targets, weights),
        "bayes_nll": losses.cross_entropy(log_bayes, batch.targets, weights),
        "kl": losses.kl_to_bayes(log_bayes, logit, weights),
        "accuracy": losses.accuracy(logit, batch.targets, weights),
        "predictive_entropy": losses.predictive_entropy(logit, weights),
    }
