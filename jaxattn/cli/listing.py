"""--list: which configs there are, and what is in one."""

import ast
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxattn.cli import command
from jaxattn.cli.command import Line
from jaxattn.experiments import config as config_lib

_LONG = 32  # characters of a field with its value
_SCHEDULES = {
    "gradient": "one optimizer moves everything",
    "two_timescale": "a rate each for routing (queries, keys), values and output",
    "em": "attention held while an M-step moves the values, then a step of the rest",
}


def show(line: Line) -> int:
    """Prints what --list asks for; returns the exit code."""
    if line.flags.config is None:
        print("\n".join(_configs(command.program(line.argv[0]))))
        return 0
    config, module = config_lib.load_with_module(line.flags.config)
    for field, text in line.overrides:
        config_lib.override(config, field, text)
    proof = config_lib.is_proof(config)
    (config_lib.check_proof if proof else config_lib.check)(config)
    start = command.sibling(line.argv[0], "check" if proof else "train")
    title = f"{config.name}: {(module.__doc__ or '').partition(chr(10))[0]}"
    print("\n".join(textwrap.wrap(title, command.WIDTH)))
    path, _, variant = line.flags.config.partition(":")
    variants = getattr(module, "VARIANTS", {})
    some = variant or next(iter(variants), "")
    asked = f"{start} --config={path}{some and ':' + some}"
    print("\n".join(_content(config, variants, asked)))
    return 0


def _configs(start: str) -> list[str]:
    """Those that come with jaxattn, and those here."""
    found = config_lib.shipped()
    found |= {path.stem: path for path in sorted(Path("configs").glob("[!_]*.py"))}
    rows = [(name, _first_line(path)) for name, path in found.items()]
    return [
        "Configs, each with variants, arms and fields of its own:",
        *command.table(rows),
        "",
        "What is in one:",
        f"  {start} --config=NAME --list",
    ]


def _first_line(path: Path) -> str:
    """Of a file's docstring, without running it."""
    try:
        text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    except (OSError, SyntaxError, ValueError) as error:
        return f"cannot be read ({type(error).__name__})"
    return text.partition("\n")[0]


def _content(
    config: ConfigDict, variants: Mapping[str, Mapping[str, Any]], asked: str
) -> list[str]:
    """Variants, arms and fields of a config, and the command that runs it."""
    lines = []
    if variants:
        rows = [(name, _fields(changes)) for name, changes in variants.items()]
        lines += ["", "Variants, and what they change:", *command.table(rows)]
    rows = []
    for name, arm in config.arms.items():
        chosen = "* " if name in config.run_arms else "  "
        ordered = {"schedule": arm.schedule} | dict(arm.items())
        rows.append((chosen + name, _fields(ordered)))
    baseline = f"; baseline {config.baseline}" if "baseline" in config else ""
    title = f"Arms (--config.arms.NAME.FIELD=VALUE); * in run_arms{baseline}"
    lines += ["", title, *command.table(rows)]
    used = {arm.schedule for arm in config.arms.values()}
    rows = [(name, text) for name, text in _SCHEDULES.items() if name in used]
    lines += ["", "Schedules", *command.table(rows)]
    rows, values = [], config_lib.flatten(config)
    for field, rule in config_lib.overridable(config).items():
        if not field.startswith("arms."):
            shown, text = f"{field}={_text(values[field])}", rule.allowed
            if len(shown) > _LONG:
                shown, text = f"{field}=...", f"{_text(values[field])}; {text}"
            rows.append((shown, text))
    lines += ["", "Fields (--config.FIELD=VALUE), and what they may be"]
    lines += command.table(rows)
    again = f"  {asked} --config.seeds={config.seeds}"
    return [*lines, "", "To run it, and with a field set", f"  {asked}", again]


def _fields(group: Mapping[str, Any], prefix: str = "") -> str:
    """Dotted names with values, on one line."""
    return "; ".join(
        _fields(value, f"{prefix}{name}.")
        if isinstance(value, (Mapping, ConfigDict))
        else f"{prefix}{name}={_text(value)}"
        for name, value in group.items()
    )


def _text(value: Any) -> str:
    """As it may be typed, if in quotes."""
    if isinstance(value, tuple):
        return ", ".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
