"""Small transformers, and baselines without attention, on tasks with exact Bayes.

Geometry is of all scored positions of the held-out sequences, or of their heads on the
first `analysed_sequences` of them. Each question is asked of the weights before the
first step too: that is its null of random initialisation.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxattn.algorithms import FixedModel, LayeredModel
from jaxattn.experiments import kind as kinds
from jaxattn.experiments import layered
from jaxattn.experiments import sequences as sequences_lib
from jaxattn.experiments.catalogue import Catalogue
from jaxattn.experiments.experiment import Arm, Experiment
from jaxattn.experiments.head import FIELDS as HEAD_FIELDS
from jaxattn.experiments.layered import Evaluation
from jaxattn.experiments.sequences import Sequences
from jaxattn.fields import (
    FLAG,
    ConfigError,
    Field,
    Fields,
    integer,
    number,
    one_of,
    require,
    some_of,
)
from jaxattn.models import transformer
from jaxattn.models.transformer import Architecture
from jaxattn.tasks import TaskSpec

# Of the model, each of which an arm may set anew for itself.
MODEL_FIELDS: dict[str, Field] = {
    "kind": one_of(transformer.KINDS),
    "depth": integer(1, 1000),
    "width": integer(1, 100_000),
    "heads": integer(1, 1000),
    "kv_heads": integer(1, 1000),
    "d_head": integer(1, 100_000),
    "mlp_width": integer(0, 1_000_000),  # 0: no MLP
    "residual": FLAG,
    "norm": one_of(transformer.NORMS),
    "positions": one_of(transformer.POSITIONS),
    "bias": FLAG,
}
_OF_MLP = ("kind", "depth", "width", "mlp_width", "residual", "norm", "positions")
# Kind of model -> the fields that it depends on.
_FIELDS_OF = {
    "transformer": tuple(MODEL_FIELDS),
    "mlp": (*_OF_MLP, "bias"),
    "history_mlp": (*_OF_MLP, "bias"),
    "gru": ("kind", "depth", "width", "positions", "bias"),
}
_COMMON = ("seeds", "seed", "steps", "eval_every", "batch_size", "fresh", "run_arms")
FIELDS: dict[str, Field] = {
    **{name: HEAD_FIELDS[name] for name in (*_COMMON, "baseline")},
    "heldout": integer(4, 1_000_000),  # sequences to evaluate on
    "analysed_sequences": integer(1, 1_000_000),  # of them, on which heads are analysed
    # Length of the longest evaluated sequences, over that of those trained on.
    "eval_length_factor": number(1, 1000),
    **{f"model.{name}": field for name, field in MODEL_FIELDS.items()},
}


def _specs(catalogue: Catalogue) -> dict[str, TaskSpec]:
    """The tasks on which transformers can be trained."""
    return {name: s for name, s in catalogue.tasks.items() if s.transformer is not None}


def _fields(config: ConfigDict, catalogue: Catalogue) -> Fields:
    return {
        **FIELDS,
        **kinds.task_fields(config, _specs(catalogue)),
        "measures": some_of(catalogue.measures, least=0),
    }


def architecture_of(
    config: ConfigDict, spec: TaskSpec, static: Mapping[str, Any]
) -> Architecture:
    """Builds the architecture of an arm.

    Args:
      config: for transformers, its fields each right.
      spec: of the task.
      static: what the arm sets anew.

    Raises:
      ValueError: fields that do not fit together; begins with FIELD=VALUE.
    """
    own = {n: static[n] for n in MODEL_FIELDS if n in static}
    task = config.task.to_dict()
    return Architecture(
        num_tokens=spec.transformer.num_tokens(task),
        d_x=task.get("d_x", 0),
        num_classes=spec.num_classes(task),
        length=spec.positions(longest(spec, task, config.eval_length_factor)),
        value_norm=static.get("value_norm", False),
        dropout_rate=static.get("dropout_rate", 0.0),
        **(config.model.to_dict() | own),
    )


def longest(spec: TaskSpec, fields: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """The task fields of the longest evaluated sequences."""
    longer = spec.transformer.longer
    if longer is None:
        return dict(fields)
    return {**fields, longer: round(factor * fields[longer])}


def _check(config: ConfigDict, catalogue: Catalogue) -> None:
    kinds.check_baseline(config, catalogue)
    spec, fields = catalogue.tasks[config.task.name], config.task.to_dict()
    kinds.check_task(config, spec)
    factor, longer = config.eval_length_factor, spec.transformer.longer
    where = f"eval_length_factor={factor!r}"
    if longer is None and factor > 1:
        raise ConfigError(f"{where}: must be 1 with task {config.task.name!r}")
    if factor > 1 and longest(spec, fields, factor)[longer] == fields[longer]:
        raise ConfigError(
            f"{where}: makes no longer sequences; must be 1, or large enough that"
            f" task.{longer}={fields[longer]} becomes more"
        )
    require("analysed_sequences", config.analysed_sequences, integer(1, config.heldout))
    for name in config.arms:
        _check_arm(config, name, catalogue)


def _check_arm(config: ConfigDict, name: str, catalogue: Catalogue) -> None:
    arm = config.arms[name]
    algorithm = catalogue.algorithms[arm.algorithm]
    static = kinds.static_fields(arm, KIND, algorithm)
    where = {field: f"arms.{name}.{field}" for field in arm}
    try:
        model = architecture_of(config, catalogue.tasks[config.task.name], static)
    except ValueError as error:  # FIELD=VALUE: must be ...
        field, _, said = str(error).partition("=")
        raise ConfigError(f"{where.get(field, f'model.{field}')}={said}") from None
    for field in arm:
        if field in MODEL_FIELDS and field not in _FIELDS_OF[model.kind]:
            raise ConfigError(
                f"{where[field]}={arm[field]!r}: no such field for a {model.kind}; must"
                f" be one of {', '.join(_FIELDS_OF[model.kind])}"
            )
    for field, must in _wrong(config, model):
        value = getattr(model, field)
        raise ConfigError(f"{where.get(field, f'model.{field}')}={value!r}: {must}")
    attends = model.kind == "transformer"
    if algorithm.layers is None or (algorithm.fixes_attention and not attends):
        raise ConfigError(
            f"{where['algorithm']}={arm.algorithm!r}: must be one that does not need"
            f" {'one head' if algorithm.layers is None else 'attention'}"
        )
    wrong = algorithm.wrong_in_layers(arm)
    if wrong is not None:
        field, must = wrong
        raise ConfigError(f"{where[field]}={arm[field]!r}: must be {must} in layers")


def _wrong(config: ConfigDict, model: Architecture) -> Iterator[tuple[str, str]]:
    """Fields of a model that do not fit the config, each with what it must be."""
    if model.kind == "history_mlp" and config.eval_length_factor > 1:
        yield "kind", "must be one for longer sequences, or eval_length_factor 1"
    if model.mlp_width == 0 and model.kind in ("mlp", "history_mlp"):
        yield "mlp_width", "must be 1 or more in an MLP"
    if model.kind != "transformer":
        for field in ("value_norm", "dropout_rate"):
            if getattr(model, field):
                yield field, "must be left out without attention"


def _resolve(config: ConfigDict, catalogue: Catalogue) -> Experiment:
    fields, spec = config.task.to_dict(), catalogue.tasks[config.task.name]
    sequences = Sequences(spec, fields, config.batch_size, config.fresh)
    measures = {name: catalogue.measures[name] for name in config.get("measures", ())}
    evaluation = Evaluation(
        sequences,
        config.heldout,
        config.analysed_sequences,
        longest(spec, fields, config.eval_length_factor),
        measures,
    )
    arms = [_arm(config, name, catalogue, evaluation) for name in config.run_arms]
    facts = sequences_lib.facts(
        "transformer", spec, fields, kinds.claims_of(config), measures
    )
    return Experiment(
        name=config.name,
        seeds=config.seeds,
        root=config.seed,
        steps=config.steps,
        eval_every=config.eval_every,
        arms=tuple(arms),
        draw=evaluation.draw,
        batch=sequences.batch,
        judged=layered.JUDGED,
        axes=layered.AXES,
        config=config.to_dict(),
        facts=facts
        | {
            "task": facts["task"]
            | {
                "scored": spec.transformer.scored(fields),
                "position_name": spec.transformer.position_name,
                "longer": spec.transformer.longer,
            },
            "architectures": {
                arm.name: dataclasses.asdict(arm.reading) for arm in arms
            },
        },
        impossible=sequences_lib.impossible(fields),
        needs=sequences_lib.mask_needs(spec, fields),
    )


KIND = kinds.Kind(
    command="train",
    fields=_fields,
    check=_check,
    resolve=_resolve,
    optional=("measures",),
    arm_fields=MODEL_FIELDS,
)


def _arm(
    config: ConfigDict, name: str, catalogue: Catalogue, evaluation: Evaluation
) -> Arm:
    fields = config.arms[name]
    algorithm = catalogue.algorithms[fields.algorithm]
    static = kinds.static_fields(fields, KIND, algorithm)
    trained = architecture_of(config, evaluation.sequences.spec, static)
    model = LayeredModel(
        layered.loss_and_gradient(trained),
        FixedModel(layered.fix_attention(trained), layered.value_gradient(trained)),
        config.steps,
    )
    # Nothing is dropped in an evaluation.
    reading = dataclasses.replace(trained, dropout_rate=0.0)
    return Arm(
        name=name,
        program=(fields.algorithm, *sorted(static.items())),
        reading=reading,
        rates=kinds.rates_of(fields, algorithm),
        start=lambda key: transformer.init(trained, key),
        algorithm=lambda rates: algorithm.layers(static, rates, model),
        score=evaluation.score(reading),
        retrace=evaluation.retrace(reading),
    )
