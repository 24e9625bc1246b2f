"""What is trained and evaluated of a model of several layers, for one seed."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.experiments import sequences as sequences_lib
from jaxattn.experiments.experiment import (
    Options,
    Problem,
    Scores,
    draw_several,
    stream,
)
from jaxattn.experiments.sequences import Sequences
from jaxattn.measures import ablation, diagnostics, layers, posterior, scores
from jaxattn.measures.base import Measure, Observed
from jaxattn.measures.trajectory import Retraced
from jaxattn.models import transformer
from jaxattn.models.transformer import Architecture
from jaxattn.tasks import Batch
from jaxattn.theory import attention, losses

# Where one of these is not finite, a seed has diverged.
JUDGED = ("train_loss", "heldout_loss", "heldout_kl")

_OF_HEADS = ("layer", "head")
# Metric -> its axes after those of arms, seeds and, of a curve, evaluations. NaN where
# an arm has fewer layers or heads than others, or none.
AXES: dict[str, tuple[str, ...]] = {
    # Curves, by position: means over the held-out sequences.
    "position_kl_bits": ("position",),
    "position_total_variation": ("position",),
    "position_entropy_error_bits": ("position",),
    "position_averaged_entropy_error_bits": ("position",),
    # What the laws say of each head, and its geometry: means over sequences.
    "relative_entropy": _OF_HEADS,
    "routing_pressure": _OF_HEADS,
    "largest_advantage": _OF_HEADS,
    "score_gradient_norm": _OF_HEADS,
    "value_gradient_norm": _OF_HEADS,
    "key_orthogonality": _OF_HEADS,
    "query_key_alignment": _OF_HEADS,
    "attention_drift": _OF_HEADS,
    "entropy_axis": ("layer",),
    "entropy_axis_within": ("layer",),
    "main_axis_share": ("layer",),
    "belief_read_out": ("stream",),
    # Traits: nulls of the finished model.
    "key_orthogonality_random": _OF_HEADS,
    "key_orthogonality_shuffled": _OF_HEADS,
    "entropy_axis_random": ("layer",),
    "entropy_axis_permuted": ("layer",),
    "entropy_axis_within_random": ("layer",),
    "entropy_axis_within_permuted": ("layer",),
    "belief_read_out_permuted": ("stream",),
    # KL to Bayes, in bits, of the model without a part: zero in its place, or its mean.
    "head_zeroed_kl_bits": _OF_HEADS,
    "head_averaged_kl_bits": _OF_HEADS,
    "heads_zeroed_kl_bits": ("layer",),  # all of a layer's
    "heads_averaged_kl_bits": ("layer",),
    "mlp_zeroed_kl_bits": ("layer",),
    "mlp_averaged_kl_bits": ("layer",),
    "layer_zeroed_kl_bits": ("layer",),
    "layer_averaged_kl_bits": ("layer",),
    # On longer sequences than it was trained on.
    "long_kl_bits": ("long_position",),
    "position_bayes_entropy_bits": ("position",),
    "calibration_predicted": ("bin",),
    "calibration_exact": ("bin",),
    "calibration_share": ("bin",),
    "attention_map": ("layer", "head", "query", "source"),
    "manifold": ("layer", "point", "axis"),
    "manifold_entropy_bits": ("point",),
}

_DRAWS = 32  # of a null
_BINS = 20  # of calibration


def loss_and_gradient(architecture: Architecture) -> Callable:
    """Returns (params, batch, key) -> mean loss of the sequences, and its gradient."""

    def of_batch(params, batch: Batch, key: jax.Array):
        keys = jax.vmap(lambda n: jax.random.fold_in(key, n))(
            jnp.arange(len(batch.inputs))
        )
        keys = keys if architecture.dropout_rate > 0 else None
        return jax.value_and_grad(
            lambda params: _loss(architecture, params, batch, keys=keys)
        )(params)

    return of_batch


def fix_attention(architecture: Architecture) -> Callable:
    """Returns (params, batch) -> what fixes attention: all queries and keys."""

    def of_batch(params, batch: Batch) -> tuple[transformer.Held, ...]:
        heads = _apply(architecture, params, batch.inputs).heads
        return tuple(transformer.Held(layer.query, layer.key) for layer in heads)

    return of_batch


def value_gradient(architecture: Architecture) -> Callable:
    """Returns (params, batch, fixed) -> gradient of the loss with attention fixed."""

    def of_batch(params, batch: Batch, fixed):
        return jax.grad(lambda p: _loss(architecture, p, batch, held=fixed))(params)

    return of_batch


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What is asked of a model; `key` is that of a seed throughout."""

    sequences: Sequences
    heldout: int  # sequences to evaluate on
    analysed: int  # of them, on which heads are analysed
    longest: Mapping[str, Any]  # task fields of the longest sequences evaluated on
    measures: Mapping[str, Measure]  # of the user, by name

    def draw(self, key: jax.Array) -> Problem:
        """The problem of a seed."""
        task = self.sequences.task(key)
        train = self.sequences.of_step(key, 0)
        heldout = draw_several(task.sample, stream(key, "eval"), self.heldout)
        log_bayes = jax.vmap(task.bayes)(heldout)
        return Problem(train, heldout, jax.vmap(task.bayes)(train), log_bayes)

    def score(self, architecture: Architecture) -> Callable[..., Scores]:
        """Returns what evaluates a model of this architecture."""
        return functools.partial(self._score, architecture)

    def retrace(self, architecture: Architecture) -> Callable[..., Retraced]:
        """Returns what analyses a finished model of this architecture."""
        return functools.partial(self._retrace, architecture)

    def _score(
        self,
        architecture: Architecture,
        key: jax.Array,
        params: transformer.Params,
        problem: Problem,
        step,
        options: Options,
    ) -> Scores:
        """Metrics; the attention of the analysed sequences is recorded."""
        train = self.sequences.trained_on(key, step, options, problem)
        batch, log_bayes = problem.heldout, problem.log_bayes_heldout
        logit = _apply(architecture, params, train[0].inputs).logit
        of_train = _mean_scores(logit, *train)
        activations = _apply(architecture, params, batch.inputs)
        of_heldout = _mean_scores(activations.logit, batch, log_bayes)
        metrics = {f"train_{name}": value for name, value in of_train.items()}
        metrics |= {
            f"heldout_{n}": of_heldout.pop(n) for n in ("loss", "bayes_nll", "kl")
        }
        place = self._scored(batch)
        by_position = _distances(
            layers.at(activations.logit, place), layers.at(log_bayes, place)
        )
        metrics |= of_heldout | {
            f"heldout_{name}": jnp.mean(value) for name, value in by_position.items()
        }
        metrics |= {f"position_{name}": value for name, value in by_position.items()}
        calibrated = posterior.calibration(
            log_bayes, activations.logit, _weights(batch), _BINS
        )
        metrics["calibration_error"] = calibrated.error
        # Only nulls are drawn, which `retrace` asks for and XLA leaves out here.
        walk = stream(key, "walk")
        beliefs = self._beliefs(batch, log_bayes, place)
        streams = layers.of_streams(activations, beliefs, place, walk)
        metrics |= layers.found(streams)
        if self.measures:
            metrics |= self._measured(walk, params, batch, log_bayes, activations)
        if not activations.heads:
            return Scores(metrics, {})
        heads = layers.by_head(self._first(activations.heads))
        weight = layers.head_weights(heads)
        metrics |= layers.law_statistics(architecture, params, self._first(batch))
        metrics |= layers.found(
            layers.of_values(activations, log_bayes, place, walk, 1)
        )
        metrics |= layers.found(self._of_keys(heads, batch, walk, 1))
        align = layers.of_each_head(diagnostics.query_key_alignment)
        alignment = align(weight, heads.query, heads.key)
        metrics["query_key_alignment"] = layers.mean(alignment, axes=(1, 3))
        entropy = layers.of_each_head(attention.attention_entropy)(weight)
        metrics["attention_entropy"] = jnp.mean(entropy)
        return Scores(metrics, {"attention": weight})

    def _retrace(
        self,
        architecture: Architecture,
        key: jax.Array,
        trail: dict[str, jax.Array],
        final: transformer.Params,
        problem: Problem,
    ) -> Retraced:
        """Drift of attention; nulls, ablations and longer sequences at the end."""
        batch, log_bayes = problem.heldout, problem.log_bayes_heldout
        long_key, *null_keys = jax.random.split(stream(key, "walk"), 4)
        place = self._scored(batch)
        activations = _apply(architecture, final, batch.inputs)
        calibrated = posterior.calibration(
            log_bayes, activations.logit, _weights(batch), _BINS
        )
        at_scored = layers.at(log_bayes, place)
        traits = {
            "parameters": jnp.float32(transformer.size(architecture)),
            "bayes_accuracy": jnp.mean(
                jax.vmap(_bayes_accuracy)(log_bayes, batch.targets, _weights(batch))
            ),
            "bayes_predictive_entropy": jnp.mean(
                jax.vmap(losses.predictive_entropy)(log_bayes, _weights(batch))
            ),
            "position_bayes_entropy_bits": jnp.mean(
                jax.vmap(posterior.entropy)(at_scored), axis=0
            ),
            "calibration_predicted": calibrated.predicted,
            "calibration_exact": calibrated.exact,
            "calibration_share": calibrated.share,
        }
        beliefs = self._beliefs(batch, log_bayes, place)
        traits |= layers.nulls(
            layers.of_streams(activations, beliefs, place, null_keys[0])
        )
        if self.longest != self.sequences.fields:
            traits["long_kl_bits"] = self._long_kl(architecture, final, long_key)
        if not activations.heads:
            return Retraced({}, traits)
        weight = trail["attention"]
        traits["attention_map"] = jnp.mean(weight[-1], axis=1)
        traits |= layers.nulls(
            layers.of_values(activations, log_bayes, place, null_keys[1], _DRAWS)
        )
        heads = layers.by_head(self._first(activations.heads))
        traits |= layers.nulls(self._of_keys(heads, batch, null_keys[2], _DRAWS))
        traits |= layers.manifold(activations, at_scored, place, self.analysed)
        traits |= ablation.without_parts(
            architecture, final, activations, batch.inputs, _weights(batch), log_bayes
        )
        drift = jnp.sum(jnp.abs(weight - weight[-1:]), axis=-1) / 2
        return Retraced(
            {"attention_drift": jnp.mean(drift, axis=(2, 4))},  # (E, L, H)
            traits,
        )

    def _long_kl(self, architecture: Architecture, params, key) -> jax.Array:
        """KL to Bayes by scored position of the longest sequences, in bits."""
        # Only how long it is differs: of embeddings there is no task that is longer.
        spec = self.sequences.spec
        task = spec.build(self.longest, key)
        batch = draw_several(task.sample, key, self.heldout)
        logit = _apply(architecture, params, batch.inputs).logit
        place = self._scored(batch, self.longest)
        log_bayes = jax.vmap(task.bayes)(batch)
        kl = jax.vmap(posterior.kl)(
            layers.at(log_bayes, place), layers.at(logit, place)
        )
        return jnp.mean(kl, axis=0)

    def _scored(self, batch: Batch, fields: Mapping | None = None) -> jax.Array:
        """Positions with a weight, in order (N, n)."""
        fields = self.sequences.fields if fields is None else fields
        count = self.sequences.spec.transformer.scored(fields)
        return jnp.argsort(_weights(batch) == 0, axis=1, stable=True)[:, :count]

    def _beliefs(self, batch: Batch, log_bayes, place) -> jax.Array:
        """Probabilities of what a posterior is about, at scored positions (N n, S)."""
        log_beliefs = self.sequences.spec.transformer.log_beliefs
        if log_beliefs is not None:
            fields = self.sequences.fields
            log_bayes = jax.vmap(lambda x: log_beliefs(fields, x))(batch.inputs)
        return jnp.exp(layers.flat(layers.at(log_bayes, place)))

    def _of_keys(self, heads, batch: Batch, key, draws: int) -> layers.Measured:
        which = self.sequences.spec.transformer.keys(self.sequences.fields)
        return layers.of_keys(heads, batch.inputs[: self.analysed], which, key, draws)

    def _first(self, of_sequences):
        """Of what leads with the held-out sequences, that of the analysed ones."""
        return jax.tree.map(lambda leaf: leaf[: self.analysed], of_sequences)

    def _measured(self, key, params, batch: Batch, log_bayes, activations):
        """The user's measures, means over the analysed sequences."""
        own = self._first((batch, log_bayes, activations))

        def one(number, batch, log_bayes, activations):
            observed = Observed(params, batch, log_bayes, activations)
            walk = jax.random.fold_in(key, number)
            return sequences_lib.measured(self.measures, walk, observed)

        found = jax.vmap(one)(jnp.arange(self.analysed), *own)
        return jax.tree.map(jnp.mean, found)


def _apply(architecture: Architecture, params, inputs: jax.Array, **options):
    """`transformer.apply` on several sequences."""
    return jax.vmap(lambda x: transformer.apply(architecture, params, x, **options))(
        inputs
    )


def _loss(architecture: Architecture, params, batch: Batch, *, keys=None, held=None):
    """Mean cross-entropy of the sequences, in nats."""

    def one(batch: Batch, key, held):
        activations = transformer.apply(
            architecture, params, batch.inputs, key=key, held=held
        )
        return losses.cross_entropy(activations.logit, batch.targets, batch.weights)

    return jnp.mean(jax.vmap(one)(batch, keys, held))


def _mean_scores(logit, batch: Batch, log_bayes) -> dict[str, jax.Array]:
    found = jax.vmap(scores.scores)(logit, batch, log_bayes)
    return {name: jnp.mean(value) for name, value in found.items()}


def _distances(logit: jax.Array, log_bayes: jax.Array) -> dict[str, jax.Array]:
    """Of (N, n, C) by position (n,)."""

    def mean(distance):
        return jnp.mean(jax.vmap(distance)(log_bayes, logit), axis=0)

    return {
        "kl_bits": mean(posterior.kl),
        "total_variation": mean(posterior.total_variation),
        "entropy_error_bits": mean(posterior.entropy_error),
        "averaged_entropy_error_bits": posterior.averaged_entropy_error(
            log_bayes, logit
        ),
    }


def _weights(batch: Batch) -> jax.Array:
    if batch.weights is None:
        return jnp.ones(batch.targets.shape[:2], jnp.float32)
    return batch.weights


def _bayes_accuracy(log_bayes, targets, weights) -> jax.Array:
    """Of one sequence; where classes are drawn, whichever of the likeliest is said."""
    drawn = targets.ndim == 1
    return (losses.tied_accuracy if drawn else losses.accuracy)(
        log_bayes, targets, weights
    )
