"""One attention head, trained on a task whose Bayes-optimal answer is known."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jaxattn.algorithms import HeadModel, gradients, on_grid
from jaxattn.experiments import kind as kinds
from jaxattn.experiments import sequences as sequences_lib
from jaxattn.experiments.catalogue import Catalogue
from jaxattn.experiments.experiment import (
    Arm,
    Experiment,
    Grid,
    Options,
    Problem,
    Scores,
    Snapshots,
    stream,
)
from jaxattn.experiments.sequences import Sequences
from jaxattn.fields import (
    FLAG,
    NAMES,
    TEXT,
    ConfigError,
    Field,
    Fields,
    integer,
    integers,
    number,
    one_of,
    require,
    some_of,
)
from jaxattn.measures import scores, trajectory
from jaxattn.measures.base import Measure, Observed
from jaxattn.measures.trajectory import Retraced
from jaxattn.tasks import Batch, TaskSpec
from jaxattn.theory import attention, losses
from jaxattn.theory.attention import Params

FIELDS: dict[str, Field] = {
    "seeds": integer(1, 1_000_000),
    "seed": integer(0, 2**31 - 1),  # of the root key
    "steps": integer(1, 1_000_000_000),
    "eval_every": integer(1, 1_000_000_000),
    "batch_size": integer(1, 100_000),
    "fresh": FLAG,
    "gradient": one_of(gradients.GRADIENTS),
    "diagnostics_length": integer(0, 10_000),  # 0: none
    "snapshot_seeds": integers(0),
    "snapshots": integer(2, 10_000),
    "snapshot_length": integer(1, 10_000),
    "run_arms": NAMES,
    "baseline": TEXT,
    "model.d_k": integer(1, 100_000),
    "model.d_v": integer(1, 100_000),
    "model.init_scale": number(0, 1e30),
    "model.bias": FLAG,
}
_SNAPSHOT_AXES = {
    "attention": ("query", "source"),
    "query": ("query", "d_k"),
    "key": ("source", "d_k"),
    "value": ("source", "d_v"),
    "upstream": ("query", "d_v"),
    "target": ("query",),
}
# Where one of these is not finite, a seed has diverged.
_JUDGED = tuple(
    [f"train_{name}" for name in (*scores.NAMES, "attention_entropy")]
    + ["heldout_loss", "heldout_bayes_nll", "heldout_kl"]
    + ["accuracy", "predictive_entropy", "attention_entropy"]
)


def head_tasks(catalogue: Catalogue) -> dict[str, TaskSpec]:
    """The tasks on which one head can be trained."""
    return {name: spec for name, spec in catalogue.tasks.items() if spec.head}


def _fields(config: ConfigDict, catalogue: Catalogue) -> Fields:
    return {
        **FIELDS,
        **kinds.task_fields(config, head_tasks(catalogue)),
        "measures": some_of(catalogue.measures, least=0),
    }


def _check(config: ConfigDict, catalogue: Catalogue) -> None:
    kinds.check_baseline(config, catalogue)
    for seed in config.snapshot_seeds:
        require("snapshot_seeds", seed, integer(0, config.seeds - 1))
    spec = catalogue.tasks[config.task.name]
    kinds.check_task(config, spec)
    if spec.shown == "train":
        # Of other sequences nothing can be known, nor learned.
        for field, only in (("fresh", False), ("batch_size", 1)):
            if config[field] != only:
                raise ConfigError(
                    f"{field}={config[field]!r}: must be {only} with task"
                    f" {config.task.name!r}"
                )
    if config.get("measures") and not config.diagnostics_length:
        raise ConfigError(
            f"diagnostics_length={config.diagnostics_length!r}: must be 1 or more with"
            " measures, which are of so many positions"
        )
    count = -(-config.steps // config.eval_every) + 1
    length = spec.positions(config.task.to_dict())
    if config.diagnostics_length and count * length >= 2**31:  # more than XLA can count
        raise ConfigError(
            f"eval_every={config.eval_every!r}: makes {count} evaluations of {length}"
            " positions, too many to look back at; must be larger, or"
            " diagnostics_length 0"
        )


def _resolve(config: ConfigDict, catalogue: Catalogue) -> Experiment:
    spec = catalogue.tasks[config.task.name]
    size = _analysed_length(spec, config.task.to_dict(), config.snapshot_length)

    def allowed() -> dict[str, np.ndarray]:
        mask = _mask(spec, size)
        everything = np.ones((size, size), bool)
        return {"attention_allowed": everything if mask is None else mask}

    snapshots = Snapshots(
        seeds=tuple(sorted(config.snapshot_seeds)),
        count=config.snapshots,
        axes={**_SNAPSHOT_AXES, "attention_allowed": _SNAPSHOT_AXES["attention"]},
        constants=allowed,
        field="snapshot_length" if spec.causal else "task.length",
    )
    return build(
        config,
        catalogue,
        view="head",
        fresh=config.fresh,
        analysed=Analysed(
            config.diagnostics_length,
            config.snapshot_length if config.snapshot_seeds else 0,
            {name: catalogue.measures[name] for name in config.get("measures", ())},
        ),
        snapshots=snapshots if config.snapshot_seeds else None,
    )


KIND = kinds.Kind(
    command="train",
    fields=_fields,
    check=_check,
    resolve=_resolve,
    optional=("measures",),
)


class Analysed(NamedTuple):
    """What is analysed of a head beside its scores."""

    diagnostics_length: int = 0  # positions that diagnostics are of; 0: none
    snapshot_length: int = 0  # positions that snapshots are of; 0: none
    measures: Mapping[str, Measure] = {}  # of the user, by name


def build(
    config: ConfigDict,
    catalogue: Catalogue,
    *,
    view: str,
    fresh: bool,
    analysed: Analysed,
    snapshots: Snapshots | None = None,
    grid: Grid | None = None,
) -> Experiment:
    """Builds the experiment of a config of one head, also of one over a grid.

    Args:
      config: checked.
      catalogue: of tasks and algorithms.
      view: name of the view that shows the run.
      fresh: whether each step draws new sequences; on a grid its points say so.
      analysed: beside the scores.
      snapshots: that are recorded, if any.
      grid: of rates.
    """
    fields = config.task.to_dict()
    spec = catalogue.tasks[config.task.name]
    sequences = Sequences(spec, fields, config.batch_size, fresh)
    facts = sequences_lib.facts(
        view, spec, fields, kinds.claims_of(config), analysed.measures
    )
    length = _analysed_length(spec, fields, analysed.diagnostics_length)
    return Experiment(
        name=config.name,
        seeds=config.seeds,
        root=config.seed,
        steps=config.steps,
        eval_every=config.eval_every,
        arms=tuple(
            _arm(config, name, catalogue, sequences, analysed, grid)
            for name in config.run_arms
        ),
        draw=functools.partial(draw, sequences),
        batch=sequences.batch,
        judged=_JUDGED,
        axes={},
        config=config.to_dict(),
        facts=facts | {"diagnosed_positions": length},
        grid=grid,
        snapshots=snapshots,
        impossible=sequences_lib.impossible(fields),
        needs=sequences_lib.mask_needs(spec, fields),
    )


def _arm(
    config: ConfigDict,
    name: str,
    catalogue: Catalogue,
    sequences: Sequences,
    analysed: Analysed,
    grid: Grid | None,
) -> Arm:
    fields = config.arms[name]
    algorithm = catalogue.algorithms[fields.algorithm]
    static = kinds.static_fields(fields, KIND, algorithm)
    causal, value_norm = sequences.spec.causal, static.get("value_norm", False)
    wiring = gradients.Wiring(causal, value_norm, static.get("dropout_rate", 0.0))
    model = HeadModel(
        functools.partial(gradients.GRADIENTS[config.gradient], wiring=wiring),
        functools.partial(gradients.MIXES[config.gradient], causal=causal),
        config.steps,
    )
    rates = kinds.rates_of(fields, algorithm)
    if grid is not None:
        rates = on_grid(rates, grid.points["scale"], grid.points["ratio"])
    head = _Head(sequences, value_norm, analysed)
    return Arm(
        name=name,
        program=(fields.algorithm, *sorted(static.items())),
        reading=value_norm,
        rates=rates,
        start=initial(config, sequences.spec),
        algorithm=lambda rates: algorithm.head(static, rates, model),
        score=head.score,
        retrace=head.retrace if analysed.diagnostics_length else None,
        snapshots=head.snapshots if analysed.snapshot_length else None,
    )


def initial(config: ConfigDict, spec: TaskSpec) -> Callable[[jax.Array], Params]:
    """Returns key -> the parameters that every arm starts from."""
    return functools.partial(
        attention.init_params,
        d_x=config.task.d_x,
        d_k=config.model.d_k,
        d_v=config.model.d_v,
        num_classes=spec.num_classes(config.task.to_dict()),
        scale=config.model.init_scale,
        bias=config.model.bias,
    )


def draw(sequences: Sequences, key: jax.Array) -> Problem:
    """Draws the problem of a seed.

    Args:
      sequences: of the task.
      key: of the seed.
    """
    task = sequences.task(key)
    train = sequences.of_step(key, 0)
    heldout = task.sample(stream(key, "eval"))
    log_bayes = task.bayes(heldout)
    return Problem(train, heldout, jax.vmap(task.bayes)(train), log_bayes)


@dataclasses.dataclass(frozen=True)
class _Head:
    """What is asked of a head, as closures of one seed."""

    sequences: Sequences
    value_norm: bool  # whether its values have a LayerNorm
    analysed: Analysed

    def score(
        self, key: jax.Array, params: Params, problem: Problem, step, options: Options
    ) -> Scores:
        """Means over the training sequences ("train_...") and on the held-out one."""
        train = self.sequences.trained_on(key, step, options, problem)
        on_train = jax.lax.map(lambda x: self._scores(params, *x), train)
        found = self._scores(params, problem.heldout, problem.log_bayes_heldout)
        metrics = {f"train_{name}": jnp.mean(v) for name, v in on_train.items()}
        metrics |= {
            f"heldout_{name}": found.pop(name) for name in ("loss", "bayes_nll", "kl")
        }
        if self.analysed.measures:
            metrics |= self._measured(key, params, problem)
        return Scores(metrics | found, None)

    def retrace(
        self, key: jax.Array, trail: Params, final: Params, problem: Problem
    ) -> Retraced:
        """What the head did at every evaluation, and Bayes to compare with."""
        seen, (whole, log_bayes) = self._analysed(
            problem, self.analysed.diagnostics_length
        )
        mask = _mask(self.sequences.spec, len(seen.inputs))
        walk = stream(key, "walk")
        found = trajectory.retrace(trail, seen, mask, walk, value_norm=self.value_norm)
        bayes = {
            "bayes_accuracy": losses.tied_accuracy(
                log_bayes, whole.targets, whole.weights
            ),
            "bayes_predictive_entropy": losses.predictive_entropy(
                log_bayes, whole.weights
            ),
        }
        return found._replace(traits=found.traits | bayes)

    def snapshots(self, trail: Params, problem: Problem) -> dict[str, jax.Array]:
        """Arrays of some evaluations, see `trajectory.snapshots`."""
        seen, _ = self._analysed(problem, self.analysed.snapshot_length)
        mask = _mask(self.sequences.spec, len(seen.inputs))
        return trajectory.snapshots(trail, seen, mask, value_norm=self.value_norm)

    def _scores(
        self, params: Params, batch: Batch, log_bayes: jax.Array
    ) -> dict[str, jax.Array]:
        mask = _mask(self.sequences.spec, len(batch.inputs))
        readout = attention.readout(
            params, batch.inputs, mask, value_norm=self.value_norm
        )
        logit = readout.logit
        share = losses.position_shares(batch.weights, len(logit), logit.dtype)
        entropy = jnp.vdot(share, readout.attention_entropy)
        return scores.scores(logit, batch, log_bayes) | {"attention_entropy": entropy}

    def _measured(
        self, key: jax.Array, params: Params, problem: Problem
    ) -> dict[str, jax.Array]:
        length = self.analysed.diagnostics_length
        seen, (_, log_bayes) = self._analysed(problem, length)
        mask = _mask(self.sequences.spec, len(seen.inputs))
        output = attention.forward(
            params, seen.inputs, mask, value_norm=self.value_norm
        )
        observed = Observed(params, seen, log_bayes[: len(seen.inputs)], output)
        walk = stream(key, "walk")
        return sequences_lib.measured(self.analysed.measures, walk, observed)

    def _analysed(
        self, problem: Problem, length: int
    ) -> tuple[Batch, tuple[Batch, jax.Array]]:
        """The first positions of the analysed sequence; all of it with exact Bayes."""
        whole, log_bayes = problem.heldout, problem.log_bayes_heldout
        if self.sequences.spec.shown == "train":
            train = problem.train, problem.log_bayes_train
            whole, log_bayes = jax.tree.map(lambda leaf: leaf[0], train)
        size = _analysed_length(self.sequences.spec, self.sequences.fields, length)
        return jax.tree.map(lambda leaf: leaf[:size], whole), (whole, log_bayes)


def _analysed_length(spec: TaskSpec, fields: Mapping[str, Any], length: int) -> int:
    """How many positions are analysed, of so many asked for.

    All of them where a head attends to all, or it would be another head.
    """
    positions = spec.positions(fields)
    return min(length, positions) if spec.causal else positions


def _mask(spec: TaskSpec, length: int) -> np.ndarray | None:
    """What a head may attend to; None for everything."""
    return attention.causal_mask(length) if spec.causal else None
