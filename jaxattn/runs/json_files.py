"""JSON files of a run: written strictly, and read with a check of their shape."""

import json
import reprlib
from pathlib import Path
from typing import Any


class RunError(RuntimeError):
    """A run directory that cannot be used. The message says what to do."""


def as_json(content: Any) -> str:
    """Formats content; raises ValueError for a NaN, which is no number to hand on."""
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file."""
    path.write_text(as_json(content), encoding="utf-8")


def read_json(path: Path, shape: Any, what: str = "workdir") -> Any:
    """Reads a JSON file, if its content is of a shape, see `misfit`.

    Args:
      path: of the file.
      shape: that its content must have.
      what: the folder is, for the message.

    Raises:
      RunError: it cannot be read, or has another shape.
    """
    try:
        content = json.loads(path.read_text("utf-8"), parse_constant=_refuse)
        wrong = misfit(content, shape)
    except FileNotFoundError as error:
        wrong = f"not a run directory: {error.strerror}"
    except (ValueError, RecursionError, OSError) as error:
        wrong = cause(error)
    if wrong:
        raise not_of_a_run(path, wrong, what)
    return content


def not_of_a_run(path: Path, wrong: str, what: str = "workdir") -> RunError:
    """Blames a file for what is wrong in it, see `read_json`."""
    return RunError(
        f"{what}={str(path.parent)!r}: its {path.name} is not of a run ({wrong});"
        f" use another {what}, or remove the file and run again"
    )


def cause(error: Exception) -> str:
    """Says in one line what an error is."""
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def misfit(value: Any, shape: Any, name: str = "it") -> str:
    """Says what of a value has another shape; empty if nothing has.

    Args:
      value: read from JSON.
      shape: a type; {"name": shape of it, ...: shape of all others}; [shape of each],
        or [shape, shape] of just so many; a range or frozenset that it is in; or a
        tuple of shapes, one of which it must have.
      name: of the value, for the message.
    """
    if isinstance(shape, tuple):
        found = [misfit(value, of, name) for of in shape]
        return "" if "" in found else found[-1]
    if isinstance(shape, range | frozenset):
        fits = type(value) in (int, str) and value in shape
        return "" if fits else f"{name} is {reprlib.repr(value)}"
    kind = type(shape) if isinstance(shape, dict | list) else shape
    if type(value) is not kind:
        return f"{name} is a {type(value).__name__}"
    inner: list[tuple[str, Any, Any]] = []
    if kind is list:
        of_each = shape * len(value) if len(shape) == 1 else shape
        if len(value) != len(of_each):
            return f"{name} has {len(value)} entries"
        pairs = enumerate(zip(value, of_each, strict=True))
        inner = [(f"{name}[{n}]", v, of) for n, (v, of) in pairs]
    elif kind is dict:
        missing = [key for key in shape if key is not ... and key not in value]
        if missing:
            return f"{name} has no {missing[0]!r}"
        wanted = {key: shape.get(key, shape.get(...)) for key in value}
        inner = [(key, value[key], of) for key, of in wanted.items() if of is not None]
    found = (misfit(v, of, key) for key, v, of in inner)
    return next(filter(None, found), "")


def differing(held: dict, wanted: dict, prefix: str = "") -> list[str]:
    """Lists dotted names of what differs between two nested dicts."""
    names = []
    for key in sorted(held.keys() | wanted.keys()):
        old, new = held.get(key), wanted.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            names += differing(old, new, f"{prefix}{key}.")
        elif old != new:
            names.append(f"{prefix}{key}")
    return names
