"""A transformer in a wind tunnel, as what a sweep trains: a task with exact Bayes.

Offers the same names as `one_head`. All functions are of one seed; `config` is static.
Geometry is of all scored positions of the held-out sequences, or of their heads on the
first `probe` of them. Each question is asked of the weights before the first step too:
that is its null of random initialisation.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jaxattn.algorithms import schedules
from jaxattn.experiments import config as config_lib
from jaxattn.measures import diagnostics, geometry, posterior, trajectory
from jaxattn.models import transformer
from jaxattn.models.transformer import Architecture
from jaxattn.tasks import catalogue
from jaxattn.tasks.base import Batch, Task
from jaxattn.theory import attention, losses

# Where one of these is not finite, a seed has diverged.
JUDGED = ("train_loss", "heldout_loss", "heldout_kl")

_OF_HEADS = ("layer", "head")
# What is behind the axes of arms, seeds and, of a curve, evaluations. NaN where an arm
# has fewer layers or heads than others, or none.
AXES: dict[str, tuple[str, ...]] = {
    # Curves, by position: means over the held-out sequences.
    "position_kl_bits": ("position",),
    "position_total_variation": ("position",),
    "position_entropy_error_bits": ("position",),
    "position_averaged_entropy_error_bits": ("position",),
    # What the laws say of each head, and its geometry: means over probes.
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
_RIDGE = 1e-3  # of a read-out, in units of the mean variance


def init(
    config: ConfigDict, structure: schedules.Structure, key: jax.Array
) -> transformer.Params:
    """Where an arm starts; the same for arms that are built the same."""
    return transformer.init(config_lib.architecture(config, structure), key)


def heldout(config: ConfigDict, task: Task, key: jax.Array) -> tuple[Batch, jax.Array]:
    """The sequences that judge, and exact Bayes on them."""
    batch = _several(task, key, config.heldout)
    return batch, jax.vmap(task.bayes)(batch)


def schedule(
    config: ConfigDict, structure: schedules.Structure, rates: dict
) -> schedules.Schedule:
    """How an arm moves."""
    architecture = config_lib.architecture(config, structure)

    def loss_and_gradient(params, batch: Batch, key: jax.Array):
        keys = jax.vmap(lambda n: jax.random.fold_in(key, n))(
            jnp.arange(len(batch.inputs))
        )
        keys = keys if architecture.dropout_rate > 0 else None
        return jax.value_and_grad(
            lambda params: _loss(architecture, params, batch, keys=keys)
        )(params)

    def hold(params, batch: Batch) -> tuple[transformer.Held, ...]:
        heads = _apply(architecture, params, batch.inputs).heads
        return tuple(transformer.Held(layer.query, layer.key) for layer in heads)

    def value_gradient(params, batch: Batch, held):
        return jax.grad(lambda p: _loss(architecture, p, batch, held=held))(params)

    return schedules.build_layered(
        structure,
        rates,
        loss_and_gradient,
        schedules.HeldModel(hold, value_gradient),
        steps=config.steps,
    )


def reading(config: ConfigDict, structure: schedules.Structure) -> Architecture:
    """What an evaluation hangs on beside the weights; nothing is dropped in one."""
    trained = config_lib.architecture(config, structure)
    return dataclasses.replace(trained, dropout_rate=0.0)


def evaluate(
    config: ConfigDict,
    reading: Architecture,
    key: jax.Array,
    params: transformer.Params,
    train: tuple[Batch, jax.Array],
    heldout: tuple[Batch, jax.Array],
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Metrics of sequences and exact Bayes on them; and the attention of the probes."""
    of_train = _scores(_apply(reading, params, train[0].inputs).logit, *train)
    batch, log_bayes = heldout
    activations = _apply(reading, params, batch.inputs)
    of_heldout = _scores(activations.logit, *heldout)
    metrics = {f"train_{name}": value for name, value in of_train.items()}
    metrics |= {
        f"heldout_{name}": of_heldout.pop(name) for name in ("loss", "bayes_nll", "kl")
    }
    place = _scored(config, batch)
    by_position = _distances(_at(activations.logit, place), _at(log_bayes, place))
    metrics |= of_heldout | {
        f"heldout_{name}": jnp.mean(value) for name, value in by_position.items()
    }
    metrics |= {f"position_{name}": value for name, value in by_position.items()}
    calibrated = posterior.calibration(
        log_bayes, activations.logit, _weights(batch), _BINS
    )
    metrics["calibration_error"] = calibrated.error

    # Only nulls are drawn, which `look` asks for and XLA leaves out here.
    beliefs = _beliefs(config, batch, log_bayes, place)
    metrics |= _found(_of_streams(activations, beliefs, place, key))
    if not activations.heads:
        return metrics, {}
    probes = _probed(config, batch)
    heads = _by_head(_probed(config, activations.heads))
    weight = _attention(heads)
    metrics |= _law_statistics(reading, params, probes)
    metrics |= _found(_of_values(activations, log_bayes, place, key, 1))
    metrics |= _found(_of_keys(config, activations, batch, key, 1))
    align = _of_each_head(diagnostics.query_key_alignment)
    alignment = align(weight, heads.query, heads.key)
    metrics["query_key_alignment"] = _mean(alignment, axes=(1, 3))
    entropy = _of_each_head(attention.attention_entropy)(weight)
    metrics["attention_entropy"] = jnp.mean(entropy)
    return metrics, {"attention": weight}


def trail_shapes(config: ConfigDict, reading: Architecture, params) -> Any:
    """Shapes of what is kept of an evaluation: the attention of the probes."""
    del params
    if reading.kind != "transformer":
        return {}
    length = catalogue.TASKS[config.task.name].positions(config.task)
    shape = (reading.depth, config.probe, reading.heads, length, length)
    return {"attention": jax.ShapeDtypeStruct(shape, jnp.float32)}


def looks(config: ConfigDict) -> bool:
    """Whether finished seeds are looked back at."""
    del config
    return True


def look_inputs(config: ConfigDict, problems) -> tuple[Batch, jax.Array]:
    """What `look` is given of problems that lead with a slot."""
    del config
    return problems.heldout, problems.log_bayes_heldout


def look(
    config: ConfigDict,
    reading: Architecture,
    key: jax.Array,
    trail: dict[str, jax.Array],
    final: transformer.Params,
    batch: Batch,
    log_bayes: jax.Array,
) -> trajectory.Seen:
    """What there is to see of a finished seed: nulls, ablations, longer sequences."""
    long_key, *null_keys = jax.random.split(key, 4)
    place = _scored(config, batch)
    activations = _apply(reading, final, batch.inputs)
    calibrated = posterior.calibration(
        log_bayes, activations.logit, _weights(batch), _BINS
    )
    at_scored = _at(log_bayes, place)
    traits = {
        "parameters": jnp.float32(transformer.size(reading)),
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
    beliefs = _beliefs(config, batch, log_bayes, place)
    traits |= _nulls(_of_streams(activations, beliefs, place, null_keys[0]))
    if config.stretch > 1:
        traits["long_kl_bits"] = _long_kl(config, reading, final, long_key)
    if not activations.heads:
        return trajectory.Seen({}, traits)
    weight = trail["attention"]
    traits["attention_map"] = jnp.mean(weight[-1], axis=1)
    traits |= _nulls(_of_values(activations, log_bayes, place, null_keys[1], _DRAWS))
    traits |= _nulls(_of_keys(config, activations, batch, null_keys[2], _DRAWS))
    traits |= _manifold(config, activations, at_scored, place)
    traits |= _without_parts(reading, final, activations, batch, log_bayes)
    drift = jnp.sum(jnp.abs(weight - weight[-1:]), axis=-1) / 2
    return trajectory.Seen(
        {"attention_drift": jnp.mean(drift, axis=(2, 4))},  # (E, L, H)
        traits,
    )


# --- scores


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


def _scores(
    logit: jax.Array, batch: Batch, log_bayes: jax.Array
) -> dict[str, jax.Array]:
    def one(logit, batch: Batch, log_bayes):
        weights = batch.weights
        return {
            "loss": losses.cross_entropy(logit, batch.targets, weights),
            "bayes_nll": losses.cross_entropy(log_bayes, batch.targets, weights),
            "kl": losses.kl_to_bayes(log_bayes, logit, weights),
            "accuracy": losses.accuracy(logit, batch.targets, weights),
            "predictive_entropy": losses.predictive_entropy(logit, weights),
        }

    scores = jax.vmap(one)(logit, batch, log_bayes)
    return {name: jnp.mean(value) for name, value in scores.items()}


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


def _long_kl(config: ConfigDict, reading: Architecture, params, key) -> jax.Array:
    """KL to Bayes by scored position of the longest sequences, in bits."""
    fields = config_lib.stretched(config)
    # Only how long it is differs: of embeddings there is no task that is stretched.
    task = catalogue.TASKS[config.task.name].build(fields, key)
    batch = _several(task, key, config.heldout)
    logit = _apply(reading, params, batch.inputs).logit
    place = _scored(config, batch, fields)
    log_bayes = jax.vmap(task.bayes)(batch)
    return jnp.mean(
        jax.vmap(posterior.kl)(_at(log_bayes, place), _at(logit, place)), axis=0
    )


def _several(task: Task, key: jax.Array, count: int) -> Batch:
    return jax.vmap(lambda n: task.sample(jax.random.fold_in(key, n)))(
        jnp.arange(count)
    )


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


# --- positions


def _scored(config: ConfigDict, batch: Batch, fields=None) -> jax.Array:
    """Positions with a weight, in order (N, n)."""
    tunnel = catalogue.TASKS[config.task.name].tunnel
    count = tunnel.scored(config.task if fields is None else fields)
    return jnp.argsort(_weights(batch) == 0, axis=1, stable=True)[:, :count]


def _at(array: jax.Array, place: jax.Array) -> jax.Array:
    """Rows (N, n, ...) of an array (N, T, ...)."""
    return jax.vmap(lambda rows, chosen: rows[chosen])(array, place)


# --- geometry; each with its nulls, of so many draws


def _beliefs(config: ConfigDict, batch: Batch, log_bayes, place) -> jax.Array:
    """Probabilities of what a posterior is about, at scored positions (N n, S)."""
    log_beliefs = catalogue.TASKS[config.task.name].tunnel.log_beliefs
    if log_beliefs is not None:
        log_bayes = jax.vmap(lambda x: log_beliefs(config.task, x))(batch.inputs)
    return jnp.exp(_flat(_at(log_bayes, place)))


def _of_streams(activations, beliefs, place, key) -> dict:
    """How well beliefs are read from the residual stream, behind each layer."""
    count, per_sequence = place.shape
    held_out = jnp.arange(count * per_sequence) >= (count // 2) * per_sequence

    def one(features: jax.Array) -> geometry.ReadOut:
        return geometry.belief_read_out(features, beliefs, held_out, key, ridge=_RIDGE)

    streams = jnp.stack([_flat(_at(x, place)) for x in activations.residual])
    found = jax.lax.map(one, streams)
    return {"belief_read_out": {"": found.found, "_permuted": found.permuted}}


def _of_values(activations, log_bayes, place, key, draws: int) -> dict:
    """Whether what each layer's values deliver is ordered by posterior entropy."""
    entropy = jax.vmap(posterior.entropy)(_at(log_bayes, place))
    contexts = jnp.stack(
        [_at(_joined(layer.context), place) for layer in activations.heads]
    )

    def axis(points: jax.Array, entropy: jax.Array) -> geometry.EntropyAxis:
        return geometry.entropy_axis(
            _flat(points),
            entropy.reshape(-1),
            key,
            draws=draws,
            block=place.shape[1],  # so that position is in the null
        )

    def one(points: jax.Array):
        # Where entropy is a matter of position, so is any axis of position.
        within = points - jnp.mean(points, axis=0)[None]
        rest = entropy - jnp.mean(entropy, axis=0)[None]
        spread = jnp.max(jnp.abs(rest)) > 1e-4  # else rounding, which has an order too
        rest = jnp.where(spread, rest, 0)
        return axis(points, entropy), axis(within, rest)

    found, within = jax.lax.map(one, contexts)
    return {
        "entropy_axis": {
            "": found.found,
            "_random": found.random_direction,
            "_permuted": found.permuted,
        },
        "entropy_axis_within": {
            "": within.found,
            "_random": within.random_direction,
            "_permuted": within.permuted,
        },
        "main_axis_share": {"": found.one_axis},
    }


def _of_keys(config: ConfigDict, activations, batch: Batch, key, draws: int) -> dict:
    """How orthogonal the keys of what a posterior is about are, head by head.

    One for each kind of token, and without positions: equal tokens have equal keys,
    and rotated ones would be compared by where they stand.
    """
    tokens = batch.inputs[: config.probe]
    first, end, count = catalogue.TASKS[config.task.name].tunnel.keys(config.task)
    if count == 0:
        place = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape[:2])
    else:
        other = (tokens < first) | (tokens >= end)
        place = jnp.argsort(other, axis=1, stable=True)[:, :count]
    shown = jnp.take_along_axis(tokens, place, axis=1) if tokens.ndim == 2 else None
    keys = _by_head(_probed(config, activations.heads)).plain_key
    keys = jnp.swapaxes(keys, 2, 3)  # (L, N, T, H, d)
    keys = jnp.swapaxes(jax.vmap(_at, (0, None))(keys, place), 2, 3)
    if shown is not None:
        again = jnp.tril(shown[:, :, None] == shown[:, None], -1).any(axis=2)
        keys = jnp.where(again[None, :, None, :, None], 0, keys)
    axes = _of_each_head(lambda k: geometry.key_axes(k, key, draws=draws))(keys)
    named = {"": axes.found, "_random": axes.random_keys, "_shuffled": axes.shuffled}
    return {"key_orthogonality": {n: _mean(a, axes=(1,)) for n, a in named.items()}}


def _manifold(config: ConfigDict, activations, log_bayes, place) -> dict:
    """Contexts of the probes along their two principal axes, to be drawn."""
    chosen, entropy = place[: config.probe], jax.vmap(posterior.entropy)(log_bayes)

    def one(context: jax.Array) -> jax.Array:
        points = _flat(_at(_joined(context)[: config.probe], chosen))
        axes = diagnostics.manifold(points)
        return diagnostics.coordinates(axes, points)[:, :2]

    contexts = jnp.stack([layer.context for layer in activations.heads])
    return {
        "manifold": jax.lax.map(one, contexts),
        "manifold_entropy_bits": entropy[: config.probe].reshape(-1),
    }


def _found(answers: dict) -> dict[str, jax.Array]:
    return {name: _or_nan(of_name[""]) for name, of_name in answers.items()}


def _nulls(answers: dict) -> dict[str, jax.Array]:
    return {
        name + null: _or_nan(answer)
        for name, of_name in answers.items()
        for null, answer in of_name.items()
        if null
    }


def _or_nan(answer) -> jax.Array:
    if not isinstance(answer, diagnostics.Answer):
        return answer
    return jnp.where(answer.known, answer.value, jnp.nan)


def _mean(answer: diagnostics.Answer, axes: tuple[int, ...]) -> jax.Array:
    """Mean of the known along some axes; NaN where none is."""
    count = jnp.sum(answer.known, axis=axes)
    total = jnp.sum(jnp.where(answer.known, answer.value, 0), axis=axes)
    return jnp.where(count > 0, total / jnp.maximum(count, 1), jnp.nan)


# --- heads


def _law_statistics(reading: Architecture, params, probes: Batch) -> dict:
    """What the laws say of each head, (L, H), of each probe's own loss."""

    def one(batch: Batch):
        def loss(taps):
            activations = transformer.apply(reading, params, batch.inputs, taps=taps)
            return losses.cross_entropy(activations.logit, batch.targets, batch.weights)

        return jax.grad(loss)(transformer.zero_taps(reading, len(batch.inputs)))

    layers = jax.vmap(one)(probes)
    names = (
        "relative_entropy",
        "routing_pressure",
        "largest_advantage",
        "score_gradient_norm",
        "value_gradient_norm",
    )
    return {
        name: jnp.stack([jnp.mean(getattr(s, name), axis=0) for s in layers])
        for name in names
    }


def _probed(config: ConfigDict, of_sequences):
    """Of what leads with the held-out sequences, that of the probes."""
    return jax.tree.map(lambda leaf: leaf[: config.probe], of_sequences)


def _attention(heads: transformer.Heads) -> jax.Array:
    """A of every head (L, N, H, T, T)."""
    mask = attention.causal_mask(heads.query.shape[3])

    def one(query: jax.Array, key: jax.Array) -> jax.Array:
        return attention.weights(attention.scores(query, key), mask)

    return _of_each_head(one)(heads.query, heads.key)


def _by_head(layers: tuple[transformer.Heads, ...]) -> transformer.Heads:
    """All layers as one, (L, N, H, T, d): shared keys and values with each head."""
    num_heads = layers[0].query.shape[2]

    def together(*leaves: jax.Array) -> jax.Array:
        array = jnp.moveaxis(jnp.stack(leaves), 3, 2)
        return jnp.repeat(array, num_heads // array.shape[2], axis=2)

    return jax.tree.map(together, *layers)


def _of_each_head(function):
    """Maps over layers, sequences and heads."""
    return jax.vmap(jax.vmap(jax.vmap(function)))


def _joined(context: jax.Array) -> jax.Array:
    """(N, T, H d) of (N, T, H, d)."""
    return context.reshape(*context.shape[:2], -1)


def _flat(array: jax.Array) -> jax.Array:
    """(N n, ...) of (N, n, ...)."""
    return array.reshape(-1, *array.shape[2:])


# --- ablation


def _without_parts(
    reading: Architecture, params, activations, batch: Batch, log_bayes: jax.Array
) -> dict[str, jax.Array]:
    """KL to Bayes without each head, each MLP, each layer, in bits."""
    depth, num_heads = reading.depth, reading.heads
    has_mlp = bool(activations.mlp)
    contexts = jnp.stack(
        [jnp.mean(layer.context, axis=(0, 1)) for layer in activations.heads]
    )
    mlps = jnp.zeros((depth, reading.width), contexts.dtype)
    if has_mlp:
        mlps = jnp.stack([jnp.mean(x, axis=(0, 1)) for x in activations.mlp])

    one_head = np.eye(depth * num_heads, dtype=bool).reshape(-1, depth, num_heads)
    one_layer = np.eye(depth, dtype=bool)
    heads = np.concatenate(
        [
            one_head,
            np.repeat(one_layer[:, :, None], num_heads, axis=2),
            np.zeros((depth, depth, num_heads), bool),
            np.repeat(one_layer[:, :, None], num_heads, axis=2),
        ]
    )
    none = np.zeros((depth * (num_heads + 1), depth), bool)
    of_mlp = np.concatenate([none, one_layer, one_layer])

    def without(scale: float) -> jax.Array:
        def one(parts) -> jax.Array:
            ablation = transformer.Ablation(*parts, scale * contexts, scale * mlps)
            logit = _apply(reading, params, batch.inputs, ablation=ablation).logit
            kl = jax.vmap(losses.kl_to_bayes)(log_bayes, logit, _weights(batch))
            return jnp.mean(kl) / math.log(2)

        return jax.lax.map(one, (jnp.asarray(heads), jnp.asarray(of_mlp)))

    found = {}
    for how, scale in (("zeroed", 0.0), ("averaged", 1.0)):
        kl = without(scale)
        of_head, of_heads, of_mlps, of_layers = jnp.split(
            kl, depth * (num_heads + np.arange(3))
        )
        found[f"head_{how}_kl_bits"] = of_head.reshape(depth, num_heads)
        found[f"heads_{how}_kl_bits"] = of_heads
        if has_mlp:
            found[f"mlp_{how}_kl_bits"] = of_mlps
        found[f"layer_{how}_kl_bits"] = of_layers
    return found
