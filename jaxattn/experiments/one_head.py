"""One attention head as what a sweep trains: how it starts, moves, is scored, seen.

`wind_tunnel` offers the same names for transformers. All functions are of one seed;
`config` is static.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jaxattn.algorithms import schedules
from jaxattn.measures import trajectory
from jaxattn.tasks import catalogue
from jaxattn.tasks.base import Batch, Task
from jaxattn.theory import attention, losses
from jaxattn.theory.attention import Params

# Of the training sequence ("train_...") and of the held-out one.
METRICS = (
    "train_loss",
    "train_bayes_nll",
    "train_kl",
    "train_accuracy",
    "train_predictive_entropy",
    "train_attention_entropy",
    "heldout_loss",
    "heldout_bayes_nll",
    "heldout_kl",
    "accuracy",
    "predictive_entropy",
    "attention_entropy",
)
# Where one of these is not finite, a seed has diverged.
JUDGED = METRICS
# What is behind the axes of arms, seeds and evaluations.
AXES: dict[str, tuple[str, ...]] = {}


def init(config: ConfigDict, structure: schedules.Structure, key: jax.Array) -> Params:
    """Where an arm starts; the same, whatever its structure."""
    del structure
    return attention.init_params(
        key,
        d_x=config.task.d_x,
        d_k=config.model.d_k,
        d_v=config.model.d_v,
        num_classes=catalogue.TASKS[config.task.name].num_classes(config.task),
        scale=config.model.init_scale,
        bias=config.model.bias,
    )


def heldout(config: ConfigDict, task: Task, key: jax.Array) -> tuple[Batch, jax.Array]:
    """The sequence that judges, and exact Bayes on it."""
    del config
    batch = task.sample(key)
    return batch, task.bayes(batch)


def schedule(
    config: ConfigDict, structure: schedules.Structure, rates: dict
) -> schedules.Schedule:
    """How an arm moves."""
    causal = catalogue.TASKS[config.task.name].causal
    wiring = schedules.Wiring(causal, structure.value_norm, structure.dropout_rate)
    gradient = functools.partial(schedules.GRADIENTS[config.gradient], wiring=wiring)
    mix = functools.partial(schedules.MIXES[config.gradient], causal=causal)
    return schedules.build(structure, rates, gradient, mix, steps=config.steps)


def reading(config: ConfigDict, structure: schedules.Structure) -> bool:
    """What an evaluation hangs on beside the weights: whether values have a norm."""
    del config
    return structure.value_norm


def evaluate(
    config: ConfigDict,
    reading: bool,
    key: jax.Array,
    params: Params,
    train: tuple[Batch, jax.Array],
    heldout: tuple[Batch, jax.Array],
) -> tuple[dict[str, jax.Array], None]:
    """Each of `METRICS`, of sequences and exact Bayes on them.

    None: for looking back the weights are kept, see `trail_shapes`.
    """
    del key  # nothing is drawn
    on_train = jax.lax.map(lambda x: _scores(config, reading, params, *x), train)
    found = _scores(config, reading, params, *heldout)
    metrics = {f"train_{name}": jnp.mean(value) for name, value in on_train.items()}
    metrics |= {
        f"heldout_{name}": found.pop(name) for name in ("loss", "bayes_nll", "kl")
    }
    return metrics | found, None


def trail_shapes(config: ConfigDict, reading: bool, params: Params) -> Params:
    """Shapes of what is kept of an evaluation, from those of the weights."""
    del config, reading
    return params


def looks(config: ConfigDict) -> bool:
    """Whether finished seeds are looked back at."""
    return bool(config.get("diagnostics_length"))


def look_inputs(config: ConfigDict, problems) -> tuple:
    """What `look` is given of problems that lead with a slot."""
    return shown(config, problems, config.diagnostics_length)


def look(
    config: ConfigDict,
    reading: bool,
    key: jax.Array,
    trail: Params,
    final: Params,
    shown: Batch,
    of_bayes: tuple[Batch, jax.Array],
) -> trajectory.Seen:
    """What there is to see of a finished seed, along its way."""
    del final  # the trail ends with it
    mask = head_mask(config, len(shown.inputs))
    seen = trajectory.look(trail, shown, mask, key, value_norm=reading)
    whole, log_bayes = of_bayes
    traits = {
        "bayes_accuracy": losses.tied_accuracy(log_bayes, whole.targets, whole.weights),
        "bayes_predictive_entropy": losses.predictive_entropy(log_bayes, whole.weights),
    }
    return seen._replace(traits=seen.traits | traits)


def picture(
    config: ConfigDict, reading: bool, trail: Params, shown: Batch
) -> dict[str, jax.Array]:
    """Arrays of some evaluations, see `trajectory.picture`."""
    mask = head_mask(config, len(shown.inputs))
    return trajectory.picture(trail, shown, mask, value_norm=reading)


def shown_length(config: ConfigDict, length: int) -> int:
    """How many positions are looked at, of so many asked for.

    All where a head looks everywhere, or it would be another.
    """
    task = catalogue.TASKS[config.task.name]
    positions = task.positions(config.task)
    return min(length, positions) if task.causal else positions


def shown(
    config: ConfigDict, problems, length: int
) -> tuple[Batch, tuple[Batch, jax.Array]]:
    """The first positions of what is looked at, and all of it with exact Bayes.

    Of problems that lead with a slot.
    """
    whole, log_bayes = problems.heldout, problems.log_bayes_heldout
    if catalogue.TASKS[config.task.name].shown == "train":
        train = problems.train, problems.log_bayes_train
        whole, log_bayes = jax.tree.map(lambda leaf: leaf[:, 0], train)
    size = shown_length(config, length)
    return jax.tree.map(lambda leaf: leaf[:, :size], whole), (whole, log_bayes)


def head_mask(config: ConfigDict, length: int) -> np.ndarray | None:
    """What a head of the config's task may look at; None for everything."""
    causal = catalogue.TASKS[config.task.name].causal
    return attention.causal_mask(length) if causal else None


def _scores(
    config: ConfigDict,
    reading: bool,
    params: Params,
    batch: Batch,
    log_bayes: jax.Array,
) -> dict[str, jax.Array]:
    mask = head_mask(config, len(batch.inputs))
    readout = attention.readout(params, batch.inputs, mask, value_norm=reading)
    logit, weights = readout.logit, batch.weights
    share = losses.position_shares(weights, len(logit), logit.dtype)
    return {
        "loss": losses.cross_entropy(logit, batch.targets, weights),
        "bayes_nll": losses.cross_entropy(log_bayes, batch.targets, weights),
        "kl": losses.kl_to_bayes(log_bayes, logit, weights),
        "accuracy": losses.accuracy(logit, batch.targets, weights),
        "predictive_entropy": losses.predictive_entropy(logit, weights),
        "attention_entropy": jnp.vdot(share, readout.attention_entropy),
    }
