"""One head at every point of a grid of learning rates."""

import dataclasses

import numpy as np
from ml_collections import ConfigDict

from jaxattn.experiments import head
from jaxattn.experiments import kind as kinds
from jaxattn.experiments.catalogue import Catalogue
from jaxattn.experiments.experiment import Experiment, Grid
from jaxattn.fields import FLAGS, RISING, ConfigError, Field, Fields, integer, number

_OF_HEAD = ("fresh", "baseline", "diagnostics_length", "snapshot")  # and not of a grid
FIELDS: dict[str, Field] = {
    **{n: rule for n, rule in head.FIELDS.items() if not n.startswith(_OF_HEAD)},
    "seeds": integer(2, 1_000_000),  # rates are tuned on the others
    "grid.scale": RISING,
    "grid.ratio": RISING,
    "grid.fresh": FLAGS,
    "grid.threshold": number(0, 1e30),
}
# What the report calls the parts of an arm that a ratio splits.
PARTS = ("sgd", "values_fast", "routing_fast")


def _fields(config: ConfigDict, catalogue: Catalogue) -> Fields:
    return {**FIELDS, **kinds.task_fields(config, head.head_tasks(catalogue))}


def _splitting(config: ConfigDict, catalogue: Catalogue) -> list[str]:
    """The arms that a ratio splits into SGD, fast values and fast routing."""
    return [
        arm
        for arm in config.run_arms
        if catalogue.algorithms[config.arms[arm].algorithm].splits_by_ratio
    ]


def _check(config: ConfigDict, catalogue: Catalogue) -> None:
    kinds.check_task(config, catalogue.tasks[config.task.name])
    splitting = _splitting(config, catalogue)
    if len(splitting) > 1:
        raise ConfigError(
            f"run_arms={','.join(config.run_arms)!r}: {' and '.join(splitting)} map the"
            " same rates; must have one of them"
        )
    for arm in splitting:
        kinds.require_motion(config, arm, "SGD, a part of it,", catalogue)
    for arm in config.run_arms:
        if arm in PARTS:
            raise ConfigError(
                f"run_arms={','.join(config.run_arms)!r}: {arm!r} is what a part of the"
                " map is called; must have another name"
            )


def _resolve(config: ConfigDict, catalogue: Catalogue) -> Experiment:
    axes = config.grid.fresh, config.grid.ratio, config.grid.scale
    fresh, ratio, scale = (axis.ravel() for axis in np.meshgrid(*axes, indexing="ij"))
    points = {
        "fresh": fresh,
        "ratio": ratio.astype(np.float32),
        "scale": scale.astype(np.float32),
    }
    equal = [
        arm
        for arm in _splitting(config, catalogue)
        if len({config.arms[arm][n] for n in _rates(config, arm, catalogue)}) == 1
    ]
    experiment = head.build(
        config,
        catalogue,
        view="grid",
        fresh=False,  # the points say so
        analysed=head.Analysed(),
        grid=Grid(points, {"fresh": fresh}),
    )
    facts = {**experiment.facts, "splits_by_ratio": equal}
    return dataclasses.replace(experiment, facts=facts)


def _rates(config: ConfigDict, arm: str, catalogue: Catalogue) -> list[str]:
    fields = config.arms[arm]
    return list(catalogue.algorithms[fields.algorithm].rates(fields))


KIND = kinds.Kind(command="train", fields=_fields, check=_check, resolve=_resolve)
