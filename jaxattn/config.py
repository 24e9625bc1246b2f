"""Configs: load one, override its fields, refuse a wrong one in a line for people."""

import difflib
import importlib.util
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxattn import schedules
from jaxattn.tasks import catalogue


class ConfigError(ValueError):
    """A config that cannot run. The message names field, value and what is allowed."""


class Rule(NamedTuple):
    """What a field may hold."""

    allowed: str
    accepts: Callable[[Any], bool]


def _whole(low: int, high: int = 2**31 - 1) -> Rule:
    return Rule(
        f"a whole number from {low}" + (f" to {high}" if high < 2**31 - 1 else " up"),
        lambda v: type(v) is int and low <= v <= high,
    )


def _number(low: float, high: float = math.inf) -> Rule:
    return Rule(
        f"a number from {low:g}" + (f" to {high:g}" if high < math.inf else " up"),
        lambda v: type(v) in (int, float) and low <= v <= high and math.isfinite(v),
    )


def _one_of(names) -> Rule:
    return Rule(f"one of {', '.join(names)}", lambda v: v in names)


_FLAG = Rule("true or false", lambda v: type(v) is bool)
_NAMES = Rule(
    "names, separated by commas, none twice",
    lambda v: isinstance(v, tuple) and len(v) > 0 and len(set(v)) == len(v),
)
_RATE = _number(0)

FIELDS: dict[str, Rule] = {
    "name": Rule("a name", lambda v: isinstance(v, str) and v != ""),
    "seeds": _whole(1),
    "seed": _whole(0),
    "steps": _whole(1),
    "eval_every": _whole(1),
    "checkpoint_every": _whole(1),
    "batch_size": _whole(1),
    "fresh": _FLAG,
    "gradient": _one_of(schedules.GRADIENTS),
    "vmap_seeds": _whole(0),
    "snapshot_seed": _whole(0),
    "snapshot_length": _whole(1),
    "run_arms": _NAMES,
    "baseline": Rule("the name of an arm", lambda v: isinstance(v, str)),
    "model.d_k": _whole(1),
    "model.d_v": _whole(1),
    "model.init_scale": _number(0),
    "model.bias": _FLAG,
    "task.name": _one_of(catalogue.TASKS),
    "task.length": _whole(2),
    "task.num_symbols": _whole(2),
    "task.d_x": _whole(1),
    "task.stay": _number(0, 1),
    "task.embedding": _one_of(catalogue.EMBEDDINGS),
    "task.embedding_seed": _whole(0),
}


def load(path_and_variant: str) -> ConfigDict:
    """Reads a config file.

    Args:
      path_and_variant: "configs/sticky.py" or "configs/sticky.py:smoke".

    Returns:
      The config, its `name` set to the file's name with "-variant" appended.

    Raises:
      ConfigError: no such file, or no such variant.
    """
    path_text, _, variant = path_and_variant.partition(":")
    path = Path(path_text)
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(
            f"config={path_text!r}: no such file; give a Python file such as"
            " configs/sticky.py, with :VARIANT behind it if wanted"
        )
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(variant)
    config.name = f"{path.stem}-{variant}" if variant else path.stem
    return config


def vary(config: ConfigDict, variants: Mapping[str, Mapping], variant: str) -> None:
    """Applies a named variant, a mapping from dotted field to value, in place.

    Args:
      config: to change.
      variants: name -> changes.
      variant: the one asked for; "" is the config as it is.

    Raises:
      ConfigError: no such variant.
    """
    if variant and variant not in variants:
        raise ConfigError(
            f"variant={variant!r}: unknown{_nearest(variant, variants)}; allowed:"
            f" {', '.join(variants)}, or none"
        )
    config.update_from_flattened_dict(variants.get(variant, {}))


def override(config: ConfigDict, field: str, text: str) -> None:
    """Sets one field from the command line, in place, keeping the field's type.

    A whole number may be written 1e3. Names are separated by commas.

    Args:
      config: to change.
      field: dotted name.
      text: the value as typed.

    Raises:
      ConfigError: no such field, or a value of another type.
    """
    known = flatten(config)
    if field not in known:
        group = [name for name in known if name.startswith(field + ".")]
        if group:
            raise ConfigError(
                f"{field}={text!r}: a group; set one of {', '.join(group)}"
            )
        raise ConfigError(
            f"{field}={text!r}: no such field{_nearest(field, known)}"
            f"; allowed: {', '.join(known)}"
        )
    value = _parse(field, text, known[field])
    config.update_from_flattened_dict({field: value})


def check(config: ConfigDict) -> None:
    """Raises ConfigError, in one line, for the first thing wrong with a config."""
    fields = flatten(config)
    for field, value in fields.items():
        if not field.startswith("arms."):
            if field not in FIELDS:
                raise ConfigError(
                    f"{field}={value!r}: no such field{_nearest(field, FIELDS)}"
                )
            _require(field, value, FIELDS[field])
    for field in FIELDS:
        if field not in fields:
            raise ConfigError(f"{field}: missing; allowed: {FIELDS[field].allowed}")
    for arm in config.run_arms:
        if arm not in config.arms:
            raise ConfigError(
                f"run_arms={','.join(config.run_arms)!r}: unknown arm {arm!r}"
                f"{_nearest(arm, config.arms)}; allowed: {', '.join(config.arms)}"
            )
    for arm in config.arms:
        _check_arm(f"arms.{arm}", config.arms[arm])
    _require("baseline", config.baseline, _one_of(config.arms))
    _require("snapshot_seed", config.snapshot_seed, _whole(0, config.seeds - 1))


def flatten(config: ConfigDict) -> dict[str, Any]:
    """Dotted name -> value, for every field that is not a group."""
    flat = {}
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            flat |= {f"{name}.{inner}": v for inner, v in flatten(value).items()}
        else:
            flat[name] = value
    return flat


def structure(arm: ConfigDict) -> schedules.Structure:
    """The part of an arm that shapes the compiled program."""
    return schedules.Structure(arm.schedule, arm.optimizer)


def rates(arm: ConfigDict) -> dict[str, float]:
    """The learning rates of an arm, by name."""
    return {name: arm[name] for name in schedules.SCHEDULES[arm.schedule][1]}


def _check_arm(where: str, arm: Any) -> None:
    if not isinstance(arm, ConfigDict):
        raise ConfigError(f"{where}={arm!r}: allowed: a group of fields")
    schedule = arm.get("schedule")
    _require(f"{where}.schedule", schedule, _one_of(schedules.SCHEDULES))
    optimizers, rate_names = schedules.SCHEDULES[schedule]
    rules = {"schedule": _one_of(schedules.SCHEDULES), "optimizer": _one_of(optimizers)}
    rules |= dict.fromkeys(rate_names, _RATE)
    for name, value in arm.items():
        if name not in rules:
            raise ConfigError(
                f"{where}.{name}={value!r}: no such field for schedule {schedule!r}"
                f"{_nearest(name, rules)}; allowed: {', '.join(rules)}"
            )
    for name, rule in rules.items():
        _require(f"{where}.{name}", arm.get(name), rule)


def _require(field: str, value: Any, rule: Rule) -> None:
    if not rule.accepts(value):
        raise ConfigError(f"{field}={value!r}: allowed: {rule.allowed}")


def _parse(field: str, text: str, old: Any) -> Any:
    try:
        if isinstance(old, bool):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if isinstance(old, int):
            try:
                return int(text)
            except ValueError:
                number = float(text)
                if not number.is_integer():
                    raise
                return int(number)
        if isinstance(old, float):
            return float(text)
        if isinstance(old, tuple):
            return tuple(part.strip() for part in text.split(","))
    except (ValueError, KeyError, OverflowError):
        kind = {bool: "true or false", int: "a whole number", float: "a number"}
        allowed = FIELDS[field].allowed if field in FIELDS else kind[type(old)]
        raise ConfigError(f"{field}={text!r}: allowed: {allowed}") from None
    return text


def _nearest(name: str, names) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
