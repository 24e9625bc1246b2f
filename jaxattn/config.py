"""Configs: load one, override its fields, refuse a wrong one in a line for people."""

import difflib
import importlib.util
import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxattn import schedules, transformer
from jaxattn.tasks import catalogue, hmm


class ConfigError(ValueError):
    """A config that cannot run. The message names field, value and what is allowed."""


class Rule(NamedTuple):
    """What a field may hold, and how it is read from a command line."""

    allowed: str
    accepts: Callable[[Any], bool]
    parse: Callable[[str], Any] = str  # raises ValueError


def _parse_whole(text: str) -> int:
    number = float(text)  # 1e3 is a way to write 1000
    if not number.is_integer():
        raise ValueError(text)
    return int(text) if text.strip("+-").isdecimal() else int(number)


def _parse_flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _whole(low: int, high: int) -> Rule:
    return Rule(
        f"a whole number from {low} to {high}",
        lambda v: type(v) is int and low <= v <= high,
        _parse_whole,
    )


def _wholes(low: int) -> Rule:
    return Rule(
        f"whole numbers from {low}, separated by commas, none twice",
        lambda v: (
            isinstance(v, tuple)
            and all(type(x) is int and x >= low for x in v)
            and len(set(v)) == len(v)
        ),
        lambda text: tuple(map(_parse_whole, text.split(","))) if text else (),
    )


def _number(low: float, high: float) -> Rule:
    return Rule(
        f"a number from {low:g} to {high:g}",
        lambda v: type(v) in (int, float) and low <= v <= high,
        float,
    )


def _one_of(names) -> Rule:
    return Rule(
        f"one of {', '.join(names)}", lambda v: isinstance(v, str) and v in names
    )


_FLAG = Rule("true or false", lambda v: type(v) is bool, _parse_flag)
_NAMES = Rule(
    "names, separated by commas, none twice",
    lambda v: (
        isinstance(v, tuple)
        and len(v) > 0
        and all(isinstance(name, str) for name in v)
        and len(set(v)) == len(v)
    ),
    lambda text: tuple(part.strip() for part in text.split(",")),
)
_RATE = _number(0, 1e30)  # what float32 holds, with room
_SHARE = Rule(
    "a number above 0, at most 1",
    lambda v: type(v) in (int, float) and 0 < v <= 1,
    float,
)
_POSITIVES = Rule(
    "numbers from 1e-12 to 1e12, rising, separated by commas",
    lambda v: (
        isinstance(v, tuple)
        and len(v) > 0
        and all(type(x) in (int, float) and 1e-12 <= x <= 1e12 for x in v)
        # Also as what the programs are given.
        and all(a < b for a, b in itertools.pairwise(map(np.float32, v)))
    ),
    lambda text: tuple(float(part) for part in text.split(",")),
)
_FLAGS = Rule(
    "false, true or both, separated by a comma",
    lambda v: (
        isinstance(v, tuple)
        and all(type(x) is bool for x in v)
        and 0 < len(v) == len(set(v))
    ),
    lambda text: tuple(_parse_flag(part.strip()) for part in text.split(",")),
)

FIELDS: dict[str, Rule] = {
    "seeds": _whole(1, 1_000_000),
    "seed": _whole(0, 2**31 - 1),  # of the root key
    "steps": _whole(1, 1_000_000_000),
    "eval_every": _whole(1, 1_000_000_000),
    "batch_size": _whole(1, 100_000),
    "fresh": _FLAG,
    "gradient": _one_of(schedules.GRADIENTS),
    "diagnostics_length": _whole(0, 10_000),  # 0: none
    "snapshot_seeds": _wholes(0),
    "snapshots": _whole(2, 10_000),
    "snapshot_length": _whole(1, 10_000),
    "run_arms": _NAMES,
    "baseline": Rule("the name of an arm", lambda v: isinstance(v, str)),
    "model.d_k": _whole(1, 100_000),
    "model.d_v": _whole(1, 100_000),
    "model.init_scale": _number(0, 1e30),
    "model.bias": _FLAG,
    "task.name": _one_of([n for n, task in catalogue.TASKS.items() if task.one_head]),
    "task.length": _whole(2, 1_000_000),
    "task.num_symbols": _whole(2, 1000),
    "task.num_classes": _whole(2, 1000),
    "task.d_x": _whole(1, 100_000),
    "task.stay": _number(0, 1),
    "task.embedding_seed": _whole(-1, 2**31 - 1),  # -1: each seed has its own
}

# Of the model of a transformer, each of which an arm may set anew for itself.
MODEL_RULES: dict[str, Rule] = {
    "kind": _one_of(transformer.KINDS),
    "depth": _whole(1, 1000),
    "width": _whole(1, 100_000),
    "heads": _whole(1, 1000),
    "kv_heads": _whole(1, 1000),
    "d_head": _whole(1, 100_000),
    "mlp_width": _whole(0, 1_000_000),  # 0: no MLP
    "residual": _FLAG,
    "norm": _one_of(transformer.NORMS),
    "positions": _one_of(transformer.POSITIONS),
    "bias": _FLAG,
}

_OF_MLP = ("kind", "depth", "width", "mlp_width", "residual", "norm", "positions")
# Kind of model -> the fields that it hangs on.
MODEL_FIELDS: dict[str, tuple[str, ...]] = {
    "transformer": tuple(MODEL_RULES),
    "mlp": (*_OF_MLP, "bias"),
    "history_mlp": (*_OF_MLP, "bias"),
    "gru": ("kind", "depth", "width", "positions", "bias"),
}

# Of a config for transformers, and baselines without attention.
TUNNEL_FIELDS: dict[str, Rule] = {
    **{
        field: FIELDS[field]
        for field in (
            *("seeds", "seed", "steps", "eval_every", "batch_size", "fresh"),
            *("run_arms", "baseline", "task.length", "task.num_symbols"),
            *("task.d_x", "task.stay", "task.embedding_seed"),
        )
    },
    "task.name": _one_of([n for n, task in catalogue.TASKS.items() if task.tunnel]),
    "heldout": _whole(4, 1_000_000),  # sequences that judge
    "probe": _whole(1, 1_000_000),  # of them, on which heads are looked at
    "stretch": _number(1, 1000),  # times the length, of the longest sequences judged
    **{f"model.{name}": rule for name, rule in MODEL_RULES.items()},
    "task.num_pairs": _whole(1, 100_000),
    "task.num_states": _whole(2, 1000),
    "task.num_observations": _whole(1, 1_000_000),
    "task.process": _one_of(hmm.PROCESSES),
    "task.num_keys": _whole(1, 100_000),
    "task.num_values": _whole(2, 1000),
    "task.num_queries": _whole(1, 100_000),
    "task.filler": _whole(0, 1_000_000),
    "task.novel": _number(0, 1),
}

# Of a config with a grid, which says which ways of drawing sequences are on it.
GRID_FIELDS: dict[str, Rule] = {
    **{
        field: rule
        for field, rule in FIELDS.items()
        if field not in ("fresh", "baseline", "diagnostics_length")
        and not field.startswith("snapshot")
    },
    "seeds": _whole(2, 1_000_000),  # rates are tuned on the others
    "grid.scale": _POSITIVES,
    "grid.ratio": _POSITIVES,
    "grid.fresh": _FLAGS,
    "grid.threshold": _number(0, 1e30),
}

# What the report calls the parts of a map of `two_timescale`.
GRID_SCHEDULES = ("sgd", "values_fast", "routing_fast")

# Of a config for scripts/check_gradients.py.
PROOF_FIELDS: dict[str, Rule] = {
    "seeds": _whole(1, 100_000),
    "seed": FIELDS["seed"],
    "shapes": _whole(1, 1000),
    "longest": _whole(3, 1000),
    "widest": _whole(3, 1000),
    "bounds.float64": _number(0, 1),
    "bounds.float32": _number(0, 1),
    "bounds.difference": _number(0, 1),
    "slopes.problems": _whole(1, 100_000),
    "slopes.decades": _number(4, 12),
    "slopes.rates": _whole(2, 10_000),
    "slopes.tolerance": _number(0, 1),
    "shares.seeds": _whole(1, 100_000),
    "shares.steps": _whole(3, 1_000_000),
    **{
        field: rule
        for field, rule in FIELDS.items()
        if field.split(".")[0] in ("model", "task", "run_arms")
    },
}


def load(path_and_variant: str) -> ConfigDict:
    """Reads a config file.

    Args:
      path_and_variant: "configs/sticky.py" or "configs/sticky.py:smoke".

    Returns:
      The config, its `name` set to the file's name with "-variant" appended.

    Raises:
      ConfigError: no such file or variant, or a file that fails.
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
    try:
        spec.loader.exec_module(module)
        config = module.get_config(variant)
    except ConfigError:
        raise
    except Exception as error:  # whatever a person's own file may raise
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"config={path_text!r}: cannot be read ({cause}); allowed: a Python file"
            " with get_config(variant)"
        ) from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(
            f"config={path_text!r}: get_config gave a {type(config).__name__}; allowed:"
            " an ml_collections.ConfigDict"
        )
    config = ConfigDict(config)  # a copy that is not locked
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
    """Sets one field from the command line, in place.

    A whole number may be written 1e3. Names are separated by commas.

    Args:
      config: to change.
      field: dotted name.
      text: the value as typed.

    Raises:
      ConfigError: no such field, or a value of another type.
    """
    known = _overridable(config)
    if field not in known:
        group = [name for name in known if name.startswith(field + ".")]
        if group:
            raise ConfigError(
                f"{field}={text!r}: a group; allowed: to set one of {', '.join(group)}"
            )
        raise ConfigError(
            f"{field}={text!r}: no such field{_nearest(field, known)}"
            f"; allowed: {', '.join(known)}"
        )
    try:
        value = known[field].parse(text)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{field}={text!r}: allowed: {known[field].allowed}"
        ) from None
    with config.ignore_type(), config.unlocked():
        config.update_from_flattened_dict({field: value})


def check(config: ConfigDict) -> None:
    """Raises ConfigError, in one line, for the first thing wrong with a config."""
    if "grid" in config:
        _check_fields(config, GRID_FIELDS)
        _check_grid_arms(config)
        return
    if is_tunnel(config):
        _check_fields(config, TUNNEL_FIELDS)
        _check_tunnel(config)
        return
    _check_fields(config, FIELDS)
    _require("baseline", config.baseline, _one_of(config.arms))
    for seed in config.snapshot_seeds:
        _require("snapshot_seeds", seed, _whole(0, config.seeds - 1))
    if catalogue.TASKS[config.task.name].shown == "train":
        # Of other sequences nothing can be known, nor learned.
        for field, only in (("fresh", False), ("batch_size", 1)):
            if config[field] != only:
                task = config.task.name
                raise ConfigError(
                    f"{field}={config[field]!r}: allowed with task {task!r}: {only}"
                )


def is_tunnel(config: ConfigDict) -> bool:
    """Whether a config is for transformers, and not for one head."""
    model = config.get("model")
    return isinstance(model, ConfigDict) and "kind" in model


def architecture(
    config: ConfigDict, structure: schedules.Structure
) -> transformer.Architecture:
    """What the model of an arm is built as.

    Args:
      config: for transformers, checked.
      structure: of the arm.
    """
    task = catalogue.TASKS[config.task.name]
    fields = stretched(config)
    return transformer.Architecture(
        num_tokens=task.tunnel.num_tokens(config.task),
        d_x=config.task.get("d_x", 0),
        num_classes=task.num_classes(config.task),
        length=task.positions(fields),
        value_norm=structure.value_norm,
        dropout_rate=structure.dropout_rate,
        **(config.model.to_dict() | dict(structure.model)),
    )


def stretched(config: ConfigDict) -> ConfigDict:
    """The `task` fields of the longest sequences that judge."""
    fields = ConfigDict(config.task)
    longer = catalogue.TASKS[config.task.name].tunnel.longer
    if longer is not None:
        fields[longer] = round(config.stretch * fields[longer])
    return fields


def _check_tunnel(config: ConfigDict) -> None:
    _require("baseline", config.baseline, _one_of(config.arms))
    tunnel = catalogue.TASKS[config.task.name].tunnel
    wrong = tunnel.wrong(config.task)
    if wrong is not None:
        field, allowed = wrong
        raise ConfigError(f"task.{field}={config.task[field]!r}: allowed: {allowed}")
    if tunnel.longer is None and config.stretch > 1:
        raise ConfigError(
            f"stretch={config.stretch!r}: allowed with task {config.task.name!r}: 1"
        )
    longer = tunnel.longer
    if config.stretch > 1 and stretched(config)[longer] == config.task[longer]:
        raise ConfigError(
            f"stretch={config.stretch!r}: makes no longer sequences; allowed: 1, or"
            f" more, so that task.{longer}={config.task[longer]} becomes more"
        )
    _require("probe", config.probe, _whole(1, config.heldout))
    for arm in config.arms:
        of_arm = config.arms[arm]
        model = architecture(config, structure(of_arm))
        here = {name: f"arms.{arm}.{name}" for name in of_arm}
        for name in of_arm:
            if name in MODEL_RULES and name not in MODEL_FIELDS[model.kind]:
                raise ConfigError(
                    f"arms.{arm}.{name}={of_arm[name]!r}: no such field for a"
                    f" {model.kind}; allowed: {', '.join(MODEL_FIELDS[model.kind])}"
                )
        for field, fits, allowed in (
            (
                "kv_heads",
                model.kind != "transformer" or model.heads % model.kv_heads == 0,
                "a divisor of heads",
            ),
            (
                "d_head",
                not model.positions.endswith("rotary") or model.d_head % 2 == 0,
                "an even number with rotary positions",
            ),
            (
                "kind",
                model.kind != "history_mlp" or config.stretch == 1,
                "a kind that can see longer sequences, with a stretch above 1",
            ),
            (
                "mlp_width",
                model.mlp_width > 0 or model.kind in ("transformer", "gru"),
                "1 or more in an MLP",
            ),
            (
                "positions",
                not model.positions.endswith("rotary") or model.kind == "transformer",
                "none or learned without attention",
            ),
        ):
            if not fits:
                where = here.get(field, f"model.{field}")
                value = getattr(model, field)
                raise ConfigError(f"{where}={value!r}: allowed: {allowed}")
        attends = model.kind == "transformer"
        if of_arm.schedule != "gradient" and not attends:
            raise ConfigError(
                f"arms.{arm}.schedule={of_arm.schedule!r}: allowed for a {model.kind}:"
                " gradient"
            )
        if of_arm.schedule == "em" and of_arm.m_step != "gradient":
            raise ConfigError(
                f"arms.{arm}.m_step={of_arm.m_step!r}: allowed in layers: gradient"
            )
        if (model.value_norm or model.dropout_rate) and not attends:
            name = "value_norm" if model.value_norm else "dropout_rate"
            raise ConfigError(
                f"arms.{arm}.{name}={of_arm[name]!r}: allowed with attention alone"
            )


def _check_grid_arms(config: ConfigDict) -> None:
    two_timescale = [
        arm for arm in config.run_arms if config.arms[arm].schedule == "two_timescale"
    ]
    if len(two_timescale) > 1:
        raise ConfigError(
            f"run_arms={','.join(config.run_arms)!r}: {' and '.join(two_timescale)} are"
            " maps of one schedule; allowed: one arm of schedule 'two_timescale'"
        )
    for arm in config.run_arms:
        if arm in GRID_SCHEDULES:
            raise ConfigError(
                f"run_arms={','.join(config.run_arms)!r}: {arm!r} names a part of the"
                " two_timescale map; allowed: another name"
            )


def check_proof(config: ConfigDict) -> None:
    """The same for a config of scripts/check_gradients.py."""
    _check_fields(config, PROOF_FIELDS)
    for arm in config.arms:
        for name in (*_WIRING_RULES, *MODEL_RULES):
            if name in config.arms[arm]:
                value = config.arms[arm][name]
                raise ConfigError(f"arms.{arm}.{name}={value!r}: no such field here")


def _check_fields(config: ConfigDict, rules: dict[str, Rule]) -> None:
    fields = flatten(config)
    rules = _of_task(config, rules)
    for field, value in fields.items():
        if field != "name" and field.split(".")[0] != "arms":
            if field not in rules:
                raise ConfigError(
                    f"{field}={value!r}: no such field{_nearest(field, rules)}"
                    f"; allowed: {', '.join(rules)}"
                )
            _require(field, value, rules[field])
    for field in rules:
        if field not in fields:
            raise ConfigError(f"{field}: missing; allowed: {rules[field].allowed}")
    arms = config.get("arms")
    if not isinstance(arms, ConfigDict) or len(arms) == 0:
        raise ConfigError(f"arms={arms!r}: allowed: a group with a group for each arm")
    for arm in config.run_arms:
        if arm not in arms:
            raise ConfigError(
                f"run_arms={','.join(config.run_arms)!r}: unknown arm {arm!r}"
                f"{_nearest(arm, arms)}; allowed: {', '.join(arms)}"
            )
    for arm in arms:
        if not re.fullmatch(r"[\w.-]+", arm):
            raise ConfigError(f"arms={arm!r}: allowed: letters, digits, _, - and .")
        _check_arm(f"arms.{arm}", arms[arm], is_tunnel(config))


def _of_task(config: ConfigDict, rules: dict[str, Rule]) -> dict[str, Rule]:
    """The rules, less the fields of tasks other than that of the config."""
    name = flatten(config).get("task.name")
    if not isinstance(name, str) or name not in catalogue.TASKS:
        return rules  # and the rule for names says so
    own = {"task.name", *(f"task.{field}" for field in catalogue.TASKS[name].fields)}
    return {f: r for f, r in rules.items() if f in own or not f.startswith("task.")}


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
    fields = list(schedules.SCHEDULES[arm.schedule])
    fields += [name for name in (*_WIRING_RULES, "warm_up") if name in arm]
    model = tuple((name, arm[name]) for name in MODEL_RULES if name in arm)
    of_schedule = {name: arm[name] for name in fields}
    return schedules.Structure(arm.schedule, **of_schedule, model=model)


def rates(arm: ConfigDict) -> dict[str, float]:
    """The learning rates of an arm, and what else may vary without compiling."""
    return {name: arm[name] for name in schedules.rates_of(structure(arm))}


_STRUCTURE_RULES = {
    "optimizer": _one_of((*schedules.OPTIMIZERS, *schedules.SCHEDULED)),
    "m_step": _one_of(schedules.M_STEPS),
    "order": _one_of(schedules.ORDERS),
    "inner_steps": _whole(1, 1000),
}
# Of an arm that does not hold attention; may be left out.
_WIRING_RULES = {
    "value_norm": _FLAG,
    "dropout_rate": Rule(
        "a number from 0, below 1",
        lambda v: type(v) in (int, float) and 0 <= v < 1,
        float,
    ),
}
_BELOW_ONE = _WIRING_RULES["dropout_rate"]
_RATE_RULES = {"damping": _SHARE, "statistics_rate": _SHARE}  # the others: _RATE


def _arm_rules(arm: ConfigDict, of_tunnel: bool) -> dict[str, Rule]:
    """The fields of an arm, as far as those that decide on others are right."""
    rules = {"schedule": _one_of(schedules.SCHEDULES)}
    schedule = arm.get("schedule")
    fields = schedules.SCHEDULES.get(schedule, ()) if isinstance(schedule, str) else ()
    rules |= {name: _STRUCTURE_RULES[name] for name in fields}
    if schedule == "em":
        rules["optimizer"] = _one_of(schedules.OPTIMIZERS)
    if schedule in schedules.WIRED:
        rules |= {name: rule for name, rule in _WIRING_RULES.items() if name in arm}
    if of_tunnel:
        rules |= {name: rule for name, rule in MODEL_RULES.items() if name in arm}
    if schedule == "gradient" and arm.get("optimizer") in schedules.SCHEDULED:
        rules["warm_up"] = _BELOW_ONE
    if all(rule.accepts(arm.get(name)) for name, rule in rules.items()):
        names = schedules.rates_of(structure(arm))
        rules |= {name: _RATE_RULES.get(name, _RATE) for name in names}
    return rules


def _overridable(config: ConfigDict) -> dict[str, Rule]:
    """The fields that a command line may set; `name` follows from the file."""
    # A group that only one kind of config has tells which it is.
    known = PROOF_FIELDS if "bounds" in config else FIELDS
    known = GRID_FIELDS if "grid" in config else known
    known = TUNNEL_FIELDS if is_tunnel(config) else known
    rules = {field: known[field] for field in flatten(config) if field in known}
    for name, arm in config.get("arms", {}).items():
        if isinstance(arm, ConfigDict):
            of_arm = _arm_rules(arm, is_tunnel(config))
            rules |= {f"arms.{name}.{f}": of_arm[f] for f in arm if f in of_arm}
            if arm.get("schedule") in schedules.WIRED:
                rules |= {f"arms.{name}.{f}": rule for f, rule in _WIRING_RULES.items()}
            if is_tunnel(config):
                rules |= {f"arms.{name}.{f}": rule for f, rule in MODEL_RULES.items()}
    return rules


def _check_arm(where: str, arm: Any, of_tunnel: bool) -> None:
    if not isinstance(arm, ConfigDict):
        raise ConfigError(f"{where}={arm!r}: allowed: a group of fields")
    first = ("schedule", "warm_up", *_STRUCTURE_RULES, *_WIRING_RULES, *MODEL_RULES)
    for name, rule in _arm_rules(arm, of_tunnel).items():  # what decides on others
        if name in first:
            _require(f"{where}.{name}", arm.get(name), rule)
    rules = _arm_rules(arm, of_tunnel)
    for name, value in arm.items():
        if name not in rules:
            kind = f"schedule {arm.schedule!r}"
            if arm.schedule == "em":
                kind += f" with m_step {arm.m_step!r}"
            raise ConfigError(
                f"{where}.{name}={value!r}: no such field for {kind}"
                f"{_nearest(name, rules)}; allowed: {', '.join(rules)}"
            )
    for name, rule in rules.items():
        _require(f"{where}.{name}", arm.get(name), rule)


def _require(field: str, value: Any, rule: Rule) -> None:
    if not rule.accepts(value):
        raise ConfigError(f"{field}={value!r}: allowed: {rule.allowed}")


def _nearest(name: str, names) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
