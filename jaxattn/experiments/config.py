"""Configs: load one, override its fields, refuse a wrong one in a line for people."""

import difflib
import importlib.util
import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict
from ml_collections.config_dict import RequiredValueError

import jaxattn
from jaxattn.algorithms import schedules
from jaxattn.models import transformer
from jaxattn.tasks import catalogue, hmm


class ConfigError(ValueError):
    """A config that cannot run. The message names field, value and what is allowed."""

    def __init__(self, message: str):
        """In one line, though a value may be written in several."""
        super().__init__(" ".join(message.split("\n")))


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


def parts(text: str) -> list[str]:
    """The elements of a tuple as typed: a,b or (a, b) or ('a', 'b'), or nothing."""
    text = text.strip()
    if text[:1] + text[-1:] in ("()", "[]"):
        text = text[1:-1]
    found = [part.strip() for part in text.split(",")]
    if not found[-1]:  # nothing at all, or a comma at the end
        found.pop()
    return [re.sub(r"""^(['"])(.*)\1$""", r"\2", part) for part in found]


def _tuple_of(parse: Callable[[str], Any]) -> Callable[[str], tuple]:
    return lambda text: tuple(map(parse, parts(text)))


def whole(low: int, high: int) -> Rule:
    """Whole numbers in a range."""
    return Rule(
        f"a whole number from {low} to {high}",
        lambda v: type(v) is int and low <= v <= high,
        _parse_whole,
    )


def wholes(low: int, *, least: int = 0) -> Rule:
    """At least so many whole numbers from one on."""
    some = f", {least} or more of them" if least else ""
    return Rule(
        f"whole numbers from {low}, separated by commas, none twice{some}",
        lambda v: (
            isinstance(v, tuple)
            and len(v) >= least
            and all(type(x) is int and x >= low for x in v)
            and len(set(v)) == len(v)
        ),
        _tuple_of(_parse_whole),
    )


def number(low: float, high: float) -> Rule:
    """Numbers in a range."""
    return Rule(
        f"a number from {low:g} to {high:g}",
        lambda v: type(v) in (int, float) and low <= v <= high,
        float,
    )


def one_of(names) -> Rule:
    """One of some names."""
    return Rule(
        f"one of {', '.join(names)}", lambda v: isinstance(v, str) and v in names
    )


def some_of(names) -> Rule:
    """Some of some names, in any order."""
    return Rule(
        f"one or more of {', '.join(names)}, separated by commas, none twice",
        lambda v: _NAMES.accepts(v) and set(v) <= set(names),
        _tuple_of(str),
    )


FLAG = Rule("true or false", lambda v: type(v) is bool, _parse_flag)
_NAMES = Rule(
    "names, separated by commas, none twice",
    lambda v: (
        isinstance(v, tuple)
        and len(v) > 0
        and all(isinstance(name, str) for name in v)
        and len(set(v)) == len(v)
    ),
    _tuple_of(str),
)
_RATE = number(0, 1e30)  # what float32 holds, with room
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
    _tuple_of(float),
)
_FLAGS = Rule(
    "false, true or both, separated by a comma",
    lambda v: (
        isinstance(v, tuple)
        and all(type(x) is bool for x in v)
        and 0 < len(v) == len(set(v))
    ),
    _tuple_of(_parse_flag),
)

FIELDS: dict[str, Rule] = {
    "seeds": whole(1, 1_000_000),
    "seed": whole(0, 2**31 - 1),  # of the root key
    "steps": whole(1, 1_000_000_000),
    "eval_every": whole(1, 1_000_000_000),
    "batch_size": whole(1, 100_000),
    "fresh": FLAG,
    "gradient": one_of(schedules.GRADIENTS),
    "diagnostics_length": whole(0, 10_000),  # 0: none
    "snapshot_seeds": wholes(0),
    "snapshots": whole(2, 10_000),
    "snapshot_length": whole(1, 10_000),
    "run_arms": _NAMES,
    "baseline": Rule("the name of an arm", lambda v: isinstance(v, str)),
    "model.d_k": whole(1, 100_000),
    "model.d_v": whole(1, 100_000),
    "model.init_scale": number(0, 1e30),
    "model.bias": FLAG,
    "task.name": one_of([n for n, task in catalogue.TASKS.items() if task.one_head]),
    "task.length": whole(2, 1_000_000),
    "task.num_symbols": whole(2, 1000),
    "task.num_classes": whole(2, 1000),
    "task.d_x": whole(1, 100_000),
    "task.stay": number(0, 1),
    "task.embedding_seed": whole(-1, 2**31 - 1),  # -1: each seed has its own
}

# Of the model of a transformer, each of which an arm may set anew for itself.
MODEL_RULES: dict[str, Rule] = {
    "kind": one_of(transformer.KINDS),
    "depth": whole(1, 1000),
    "width": whole(1, 100_000),
    "heads": whole(1, 1000),
    "kv_heads": whole(1, 1000),
    "d_head": whole(1, 100_000),
    "mlp_width": whole(0, 1_000_000),  # 0: no MLP
    "residual": FLAG,
    "norm": one_of(transformer.NORMS),
    "positions": one_of(transformer.POSITIONS),
    "bias": FLAG,
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
    "task.name": one_of([n for n, task in catalogue.TASKS.items() if task.tunnel]),
    "heldout": whole(4, 1_000_000),  # sequences that judge
    "probe": whole(1, 1_000_000),  # of them, on which heads are looked at
    "stretch": number(1, 1000),  # times the length, of the longest sequences judged
    **{f"model.{name}": rule for name, rule in MODEL_RULES.items()},
    "task.num_pairs": whole(1, 100_000),
    "task.num_states": whole(2, 1000),
    "task.num_observations": whole(1, 1_000_000),
    "task.process": one_of(hmm.PROCESSES),
    "task.num_keys": whole(1, 100_000),
    "task.num_values": whole(2, 1000),
    "task.num_queries": whole(1, 100_000),
    "task.filler": whole(0, 1_000_000),
    "task.novel": number(0, 1),
}

# Of a config with a grid, which says which ways of drawing sequences are on it.
GRID_FIELDS: dict[str, Rule] = {
    **{
        field: rule
        for field, rule in FIELDS.items()
        if field not in ("fresh", "baseline", "diagnostics_length")
        and not field.startswith("snapshot")
    },
    "seeds": whole(2, 1_000_000),  # rates are tuned on the others
    "grid.scale": _POSITIVES,
    "grid.ratio": _POSITIVES,
    "grid.fresh": _FLAGS,
    "grid.threshold": number(0, 1e30),
}

# What the report calls the parts of a map of `two_timescale`.
GRID_SCHEDULES = ("sgd", "values_fast", "routing_fast")

# Of a config for scripts/check_gradients.py.
PROOF_FIELDS: dict[str, Rule] = {
    "seeds": whole(1, 100_000),
    "seed": FIELDS["seed"],
    "shapes": whole(1, 1000),
    "longest": whole(3, 1000),
    "widest": whole(3, 1000),
    "bounds.float64": number(0, 1),
    "bounds.float32": number(0, 1),
    "bounds.difference": number(0, 1),
    "slopes.problems": whole(1, 100_000),
    "slopes.decades": number(4, 12),
    "slopes.rates": whole(2, 10_000),
    "slopes.tolerance": number(0, 1),
    "shares.seeds": whole(1, 100_000),
    "shares.steps": whole(3, 1_000_000),
    **{
        field: rule
        for field, rule in FIELDS.items()
        if field.split(".")[0] in ("model", "task", "run_arms")
    },
    # All is dense there, in float64, and no estimate of memory is made.
    **{"task.length": whole(2, 2000), "task.d_x": whole(1, 1000)},
    **{"model.d_k": whole(1, 1000), "model.d_v": whole(1, 1000)},
}


def shipped() -> dict[str, Path]:
    """The config files that come with jaxattn, by name."""
    package = Path(jaxattn.__file__).parent
    inside = package / "configs"  # of a wheel; a checkout has them beside the package
    folder = inside if inside.is_dir() else package.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("[!_]*.py"))}


def find(path_text: str) -> Path:
    """The file that a command line means.

    Args:
      path_text: a Python file; or "sticky" or "configs/sticky.py", which are the file
        configs/sticky.py here, or else the one that comes with jaxattn.

    Raises:
      ConfigError: no such file.
    """
    named, ours = Path(path_text), shipped()
    if re.fullmatch(r"[\w-]+", path_text):
        named = Path("configs", f"{path_text}.py")
    if named.suffix == ".py" and named.is_file():
        return named
    if named.stem in ours and named == Path("configs", ours[named.stem].name):
        return ours[named.stem]
    raise ConfigError(
        f"config={path_text!r}: no such file{nearest(named.stem, ours)}; allowed: a"
        f" Python file, or one of {', '.join(ours)}; with :VARIANT behind it if wanted"
    )


def load(path_and_variant: str) -> ConfigDict:
    """Reads a config file.

    Args:
      path_and_variant: "configs/sticky.py" or "sticky:smoke", see `find`.

    Returns:
      The config, its `name` set to the file's name with "-variant" appended.

    Raises:
      ConfigError: no such file or variant, or a file that fails.
    """
    return load_with_module(path_and_variant)[0]


def load_with_module(path_and_variant: str) -> tuple[ConfigDict, ModuleType]:
    """The same, and the module that the file is, with its docstring and VARIANTS."""
    path_text, _, variant = path_and_variant.partition(":")
    path = find(path_text)
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config(variant)
        if isinstance(config, ConfigDict):
            config = ConfigDict(config)  # a copy, for changes
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
    with config.ignore_type(), config.unlocked():  # whatever it was
        config.name = f"{path.stem}-{variant}" if variant else path.stem
    _require_plain(config)
    return config, module


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
            f"variant={variant!r}: unknown{nearest(variant, variants)}; allowed:"
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
    known = overridable(config)
    if field not in known:
        group = [name for name in known if name.startswith(field + ".")]
        if group:
            some = ", ".join(group[:3]) + (", ..." if len(group) > 3 else "")
            raise ConfigError(
                f"{field}={text!r}: a group; allowed: to set one of {some}"
            )
        raise ConfigError(f"{field}={text!r}: no such field{_three(field, known)}")
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
    _require_plain(config)
    require_kind(config, proof=False)
    if "grid" in config:
        _check_fields(config, GRID_FIELDS)
        _check_grid_arms(config)
        return
    if is_tunnel(config):
        _check_fields(config, TUNNEL_FIELDS)
        _check_tunnel(config)
        return
    _check_fields(config, FIELDS)
    _check_baseline(config)
    for seed in config.snapshot_seeds:
        _require("snapshot_seeds", seed, whole(0, config.seeds - 1))
    if catalogue.TASKS[config.task.name].shown == "train":
        # Of other sequences nothing can be known, nor learned.
        for field, only in (("fresh", False), ("batch_size", 1)):
            if config[field] != only:
                task = config.task.name
                raise ConfigError(
                    f"{field}={config[field]!r}: allowed with task {task!r}: {only}"
                )


def _require_plain(config: ConfigDict) -> None:
    """Raises ConfigError for a value of a type that no rule is made for."""
    try:
        fields = flatten(config)
    except (RequiredValueError, TypeError) as error:  # what cannot be given or sorted
        raise ConfigError(
            f"config: {error}; allowed: fields with names of text, and a value for each"
        ) from None
    for field, value in fields.items():
        for part in (field, *(value if isinstance(value, tuple | list) else [value])):
            if type(part) not in (bool, int, float, str):
                raise ConfigError(
                    f"{field}={value!r}: has a {type(part).__name__}; allowed: Python's"
                    " own numbers, text, True, False, or tuples of them"
                )


def is_proof(config: ConfigDict) -> bool:
    """Whether a config is for checking the laws, and not for training."""
    return "bounds" in config


def require_kind(config: ConfigDict, *, proof: bool) -> None:
    """Raises ConfigError for a config of the other command.

    Args:
      config: to look at.
      proof: whether the laws are to be checked.
    """
    if is_proof(config) != proof:
        which = "the proof of the laws" if is_proof(config) else "training"
        command = ("check", "check_gradients") if is_proof(config) else ("train",) * 2
        raise ConfigError(
            f"config={config.get('name')!r}: is for {which}; allowed:"
            f" jaxattn {command[0]}, or scripts/{command[1]}.py"
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
    _check_baseline(config)
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
    _require("probe", config.probe, whole(1, config.heldout))
    for arm in config.arms:
        of_arm = config.arms[arm]
        here = {name: f"arms.{arm}.{name}" for name in of_arm}
        try:
            model = architecture(config, structure(of_arm))
        except ValueError as error:  # FIELD=VALUE: allowed: ...
            field, _, said = str(error).partition("=")
            where = here.get(field, f"model.{field}")
            raise ConfigError(f"{where}={said}") from None
        for name in of_arm:
            if name in MODEL_RULES and name not in MODEL_FIELDS[model.kind]:
                raise ConfigError(
                    f"arms.{arm}.{name}={of_arm[name]!r}: no such field for a"
                    f" {model.kind}; allowed: {', '.join(MODEL_FIELDS[model.kind])}"
                )
        for field, fits, allowed in (
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


def _check_baseline(config: ConfigDict) -> None:
    """Raises where there would be nothing to compare with."""
    if config.baseline not in config.run_arms:
        raise ConfigError(
            f"baseline={config.baseline!r}: not an arm that runs; allowed: one of"
            f" run_arms={','.join(config.run_arms)}"
        )
    _require_motion(config, config.baseline, "the baseline")


def _require_motion(config: ConfigDict, arm: str, what: str) -> None:
    """Raises for an arm whose every learning rate is 0, also as float32 has it."""
    learning = {
        f"arms.{arm}.{name}": rate
        for name, rate in rates(config.arms[arm]).items()
        if name.endswith("_rate") and name != "statistics_rate"
    }
    closed = "statistics_rate" in rates(config.arms[arm])  # its values always move
    if not closed and not any(map(np.float32, learning.values())):
        fields = ", ".join(f"{field}={rate!r}" for field, rate in learning.items())
        raise ConfigError(f"{fields}: {what} never moves; allowed: a rate above 0")


def _check_grid_arms(config: ConfigDict) -> None:
    two_timescale = [
        arm for arm in config.run_arms if config.arms[arm].schedule == "two_timescale"
    ]
    if len(two_timescale) > 1:
        raise ConfigError(
            f"run_arms={','.join(config.run_arms)!r}: {' and '.join(two_timescale)} are"
            " maps of one schedule; allowed: one arm of schedule 'two_timescale'"
        )
    for arm in two_timescale:
        _require_motion(config, arm, "SGD, a part of it,")
    for arm in config.run_arms:
        if arm in GRID_SCHEDULES:
            raise ConfigError(
                f"run_arms={','.join(config.run_arms)!r}: {arm!r} names a part of the"
                " two_timescale map; allowed: another name"
            )


def check_proof(config: ConfigDict) -> None:
    """The same for a config of scripts/check_gradients.py."""
    _require_plain(config)
    require_kind(config, proof=True)
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
                    f"{field}={value!r}: no such field{_three(field, rules)}"
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
                f"{nearest(arm, arms)}; allowed: {', '.join(arms)}"
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
    "optimizer": one_of((*schedules.OPTIMIZERS, *schedules.SCHEDULED)),
    "m_step": one_of(schedules.M_STEPS),
    "order": one_of(schedules.ORDERS),
    "inner_steps": whole(1, 1000),
}
# Of an arm that does not hold attention; may be left out.
_WIRING_RULES = {
    "value_norm": FLAG,
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
    rules = {"schedule": one_of(schedules.SCHEDULES)}
    schedule = arm.get("schedule")
    fields = schedules.SCHEDULES.get(schedule, ()) if isinstance(schedule, str) else ()
    rules |= {name: _STRUCTURE_RULES[name] for name in fields}
    if schedule == "em":
        rules["optimizer"] = one_of(schedules.OPTIMIZERS)
    if schedule in schedules.WIRED:
        rules |= {name: rule for name, rule in _WIRING_RULES.items() if name in arm}
    if of_tunnel:
        rules |= {name: rule for name, rule in MODEL_RULES.items() if name in arm}
    rates_fall = one_of(schedules.SCHEDULED).accepts(arm.get("optimizer"))
    if schedule == "gradient" and rates_fall:
        rules["warm_up"] = _BELOW_ONE
    if all(rule.accepts(arm.get(name)) for name, rule in rules.items()):
        names = schedules.rates_of(structure(arm))
        rules |= {name: _RATE_RULES.get(name, _RATE) for name in names}
    return rules


def overridable(config: ConfigDict) -> dict[str, Rule]:
    """The fields that a command line may set; `name` follows from the file."""
    # A group that only one kind of config has tells which it is.
    known = PROOF_FIELDS if is_proof(config) else FIELDS
    known = GRID_FIELDS if "grid" in config else known
    known = TUNNEL_FIELDS if is_tunnel(config) else known
    rules = {field: known[field] for field in flatten(config) if field in known}
    arms = config.get("arms")
    for name, arm in arms.items() if isinstance(arms, ConfigDict) else ():
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
                f"{nearest(name, rules)}; allowed: {', '.join(rules)}"
            )
    for name, rule in rules.items():
        _require(f"{where}.{name}", arm.get(name), rule)


def _require(field: str, value: Any, rule: Rule) -> None:
    if not rule.accepts(value):
        raise ConfigError(f"{field}={value!r}: allowed: {rule.allowed}")


def _three(name: str, names) -> str:
    """The three fields that are most like a name: of hundreds, none wants them all."""
    *others, last = map(repr, difflib.get_close_matches(name, list(names), 3, 0))
    listed = f"{', '.join(others)} or {last}" if others else last
    return f", did you mean {listed}? (--list shows all)"


def nearest(name: str, names) -> str:
    """What someone may have meant, as the end of a sentence; empty if nothing is near.

    Args:
      name: as typed.
      names: that there are.
    """
    close = difflib.get_close_matches(name, list(names), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
