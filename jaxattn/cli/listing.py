"""--list: which configs there are, and what is in one."""

import ast
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxattn.cli import command
from jaxattn.cli.command import Line
from jaxattn.experiments import Source, load, overridden, registry
from jaxattn.experiments.config import flatten, shipped

_LONG = 32  # characters of a field with its value


def show(line: Line) -> int:
    """Prints what --list asks for; returns the exit code."""
    if line.flags.config is None:
        print("\n".join(_configs(command.program(line.argv[0]))))
        return 0
    source = overridden(load(line.flags.config), line.overrides)
    registry.check(source.config, source.catalogue)
    wanted = registry.kind_of(source.config).command
    start = command.sibling(line.argv[0], wanted)
    title = f"{source.config.name}: {source.about}"
    print("\n".join(textwrap.wrap(title, command.WIDTH)))
    path, _, variant = line.flags.config.partition(":")
    some = variant or next(iter(source.variants), "")
    asked = f"{start} --config={path}{some and ':' + some}"
    print("\n".join(_content(source, asked)))
    return 0


def _configs(start: str) -> list[str]:
    """Those that come with jaxattn, and those here."""
    found = shipped()
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


def _content(source: Source, asked: str) -> list[str]:
    """Variants, arms and fields of a config, and the command that runs it."""
    config, catalogue, lines = source.config.to_dict(), source.catalogue, []
    if source.variants:
        rows = [(name, _fields(changes)) for name, changes in source.variants.items()]
        lines += ["", "Variants, and what they change:", *command.table(rows)]
    rows = []
    for name, arm in config["arms"].items():
        chosen = "* " if name in config["run_arms"] else "  "
        ordered = {"algorithm": arm["algorithm"]} | arm
        rows.append((chosen + name, _fields(ordered)))
    baseline = f"; baseline {config['baseline']}" if "baseline" in config else ""
    title = f"Arms (--config.arms.NAME.FIELD=VALUE); * in run_arms{baseline}"
    lines += ["", title, *command.table(rows)]
    used = {arm["algorithm"] for arm in config["arms"].values()}
    specs = catalogue.algorithms.items()
    rows = [(name, spec.about) for name, spec in specs if name in used]
    lines += ["", "Algorithms", *command.table(rows)]
    rows, values = [], flatten(source.config)
    for field, rule in registry.overridable(source.config, catalogue).items():
        if field in values and not field.startswith("arms."):
            shown, text = f"{field}={_text(values[field])}", rule.must
            if len(shown) > _LONG:
                shown, text = f"{field}=...", f"{_text(values[field])}; {text}"
            rows.append((shown, text))
    lines += ["", "Fields (--config.FIELD=VALUE), and what they must be"]
    lines += command.table(rows)
    again = f"  {asked} --config.seeds={config['seeds']}"
    return [*lines, "", "To run it, and with a field set", f"  {asked}", again]


def _fields(group: Mapping[str, Any], prefix: str = "") -> str:
    """Dotted names with values, on one line."""
    return "; ".join(
        _fields(value, f"{prefix}{name}.")
        if isinstance(value, Mapping)
        else f"{prefix}{name}={_text(value)}"
        for name, value in group.items()
    )


def _text(value: Any) -> str:
    """As it may be typed, if in quotes."""
    if isinstance(value, tuple):
        return ", ".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
