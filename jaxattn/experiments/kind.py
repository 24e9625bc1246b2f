"""What a kind of experiment must say of its configs, and how a config is checked."""

import re
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxattn.algorithms import AlgorithmSpec
from jaxattn.experiments.catalogue import Catalogue
from jaxattn.experiments.config import flatten, require_plain
from jaxattn.experiments.experiment import Claim
from jaxattn.fields import (
    TEXT,
    ConfigError,
    Field,
    Fields,
    nearest,
    one_of,
    require,
    three_nearest,
)
from jaxattn.tasks import TaskSpec

_CLAIM: dict[str, Field] = {
    "text": TEXT,
    "arm": TEXT,
    "baseline": TEXT,
    "metric": TEXT,
    "direction": one_of(("less", "more")),
}


_GROUPS = ("arms", "claims")  # of groups, which are checked one by one


class Kind(NamedTuple):
    """A kind of experiment, as functions of its configs."""

    command: str  # that it is for: "train" or "check"
    # Rules of the fields of a config, whose values may still be wrong.
    fields: Callable[[ConfigDict, Catalogue], Fields]
    check: Callable[[ConfigDict, Catalogue], None]  # of fields that are each right
    resolve: Callable[[ConfigDict, Catalogue], Any]  # of a config that is checked
    optional: tuple[str, ...] = ()  # fields that may be left out
    # That any arm may set beside those of its algorithm.
    arm_fields: Fields = MappingProxyType({})


def check_fields(config: ConfigDict, kind: Kind, catalogue: Catalogue) -> None:
    """Raises ConfigError for the first field, arm or claim that is wrong by itself."""
    require_plain(config)
    rules, fields = kind.fields(config, catalogue), flatten(config)
    if "task.name" in fields:  # the task decides on other fields
        require("task.name", fields["task.name"], rules["task.name"])
    for field, value in fields.items():
        if field in ("name", "experiment") or field.partition(".")[0] in _GROUPS:
            continue
        if field not in rules:
            likely = three_nearest(field, rules)
            raise ConfigError(f"{field}={value!r}: no such field{likely}")
        require(field, value, rules[field])
    for field, rule in rules.items():
        if field not in fields and field not in kind.optional:
            raise ConfigError(f"{field}: missing; must be {rule.must}")
    _check_arms(config, kind, catalogue)
    for name, claim in _group(config, "claims").items():
        _check_claim(f"claims.{name}", claim, config)


def _group(config: ConfigDict, name: str) -> Mapping[str, Any]:
    group = config.get(name, {})
    if not isinstance(group, ConfigDict | Mapping):
        raise ConfigError(f"{name}={group!r}: must be a group of groups")
    return group


def _check_arms(config: ConfigDict, kind: Kind, catalogue: Catalogue) -> None:
    arms = _group(config, "arms")
    if len(arms) == 0:
        raise ConfigError("arms: must have a group for each arm")
    for arm in config.run_arms:
        if arm not in arms:
            raise ConfigError(
                f"run_arms={','.join(config.run_arms)!r}: unknown arm {arm!r}"
                f"{nearest(arm, arms)}; must be some of {', '.join(arms)}"
            )
    for name, arm in arms.items():
        if not re.fullmatch(r"[\w-]+", name):
            raise ConfigError(f"arms={name!r}: must have letters, digits, _ and - only")
        _check_arm(f"arms.{name}", arm, kind, catalogue)


def _check_arm(where: str, arm: Any, kind: Kind, catalogue: Catalogue) -> None:
    if not isinstance(arm, ConfigDict):
        raise ConfigError(f"{where}={arm!r}: must be a group of fields")
    algorithm = arm.get("algorithm")
    require(f"{where}.algorithm", algorithm, one_of(catalogue.algorithms))
    spec = catalogue.algorithms[algorithm]
    for name, rule in spec.static(arm).items():  # they decide on others
        require(f"{where}.{name}", arm.get(name), rule)
    rules = arm_rules(arm, kind, catalogue)
    for name, value in arm.items():
        if name not in rules:
            shape = ", ".join(
                f"{n} {arm[n]!r}" for n in ("algorithm", *spec.static(arm))
            )
            raise ConfigError(
                f"{where}.{name}={value!r}: no such field with {shape}"
                f"{nearest(name, rules)}; must be one of {', '.join(rules)}"
            )
    for name, rule in rules.items():
        require(f"{where}.{name}", arm.get(name), rule)


def arm_rules(
    arm: ConfigDict, kind: Kind, catalogue: Catalogue, *, absent: bool = False
) -> dict[str, Field]:
    """Rules of the fields of an arm, as far as those that decide on others are right.

    Args:
      arm: its fields, maybe wrong.
      kind: of the experiment.
      catalogue: of algorithms.
      absent: also of those that may be left out, and are.
    """
    rules: dict[str, Field] = {"algorithm": one_of(catalogue.algorithms)}
    algorithm = arm.get("algorithm")
    if not rules["algorithm"].accepts(algorithm):
        return rules
    spec = catalogue.algorithms[algorithm]
    optional = {**spec.optional(arm), **kind.arm_fields}
    rules |= spec.static(arm)
    rules |= {n: rule for n, rule in optional.items() if absent or n in arm}
    return rules | dict(spec.rates(arm))


def static_fields(
    arm: ConfigDict, kind: Kind, spec: AlgorithmSpec
) -> dict[str, Hashable]:
    """The fields of an arm that shape its compiled program."""
    names = [*spec.static(arm)]
    names += [n for n in (*spec.optional(arm), *kind.arm_fields) if n in arm]
    return {name: arm[name] for name in names}


def rates_of(arm: ConfigDict, spec: AlgorithmSpec) -> dict[str, np.ndarray]:
    """The numbers of an arm that may vary without compiling anew."""
    return {name: np.float32(arm[name]) for name in spec.rates(arm)}


def task_fields(config: ConfigDict, specs: Mapping[str, TaskSpec]) -> Fields:
    """Rules of `task.*`: of its name, and of the fields of the task that it names."""
    rules = {"task.name": one_of(specs)}
    name = flatten(config).get("task.name")
    if rules["task.name"].accepts(name):
        rules |= {f"task.{n}": field for n, field in specs[name].fields.items()}
    return rules


def check_task(config: ConfigDict, spec: TaskSpec) -> None:
    """Raises ConfigError for fields of a task that do not fit together."""
    wrong = spec.transformer and spec.transformer.wrong(config.task.to_dict())
    if wrong:
        field, must = wrong
        raise ConfigError(f"task.{field}={config.task[field]!r}: must be {must}")


def _check_claim(where: str, claim: Any, config: ConfigDict) -> None:
    if not isinstance(claim, ConfigDict):
        raise ConfigError(f"{where}={claim!r}: must be a group of fields")
    for name, value in claim.items():
        if name not in _CLAIM:
            raise ConfigError(
                f"{where}.{name}={value!r}: no such field{nearest(name, _CLAIM)}; must"
                f" be one of {', '.join(_CLAIM)}"
            )
    for name, rule in _CLAIM.items():
        require(f"{where}.{name}", claim.get(name), rule)
    for name in ("arm", "baseline"):
        require(f"{where}.{name}", claim[name], one_of(config.arms))


def claims_of(config: ConfigDict) -> list[Claim]:
    """The claims of a config, in its order."""
    return [Claim(**claim.to_dict()) for claim in _group(config, "claims").values()]


def check_baseline(config: ConfigDict, catalogue: Catalogue) -> None:
    """Raises ConfigError where there would be nothing to compare with."""
    if config.baseline not in config.run_arms:
        raise ConfigError(
            f"baseline={config.baseline!r}: does not run; must be one of"
            f" run_arms={','.join(config.run_arms)}"
        )
    require_motion(config, config.baseline, "the baseline", catalogue)


def require_motion(
    config: ConfigDict, arm: str, what: str, catalogue: Catalogue
) -> None:
    """Raises ConfigError for an arm whose every learning rate is 0 in float32.

    Args:
      config: whose fields are right.
      arm: name.
      what: it is, for the message.
      catalogue: of algorithms.
    """
    fields = config.arms[arm]
    spec = catalogue.algorithms[fields.algorithm]
    rates = {
        f"arms.{arm}.{name}": fields[name]
        for name in spec.rates(fields)
        if name.endswith("_rate") and name != "statistics_rate"
    }
    closed = "statistics_rate" in spec.rates(fields)  # its values always move
    if rates and not closed and not any(map(np.float32, rates.values())):
        said = ", ".join(f"{field}={rate!r}" for field, rate in rates.items())
        raise ConfigError(f"{said}: {what} never moves; one rate must be above 0")
