"""Fields of configs and flags: what one may hold, how text is read, what an error says.

By hand rather than by a validation library: a field is read from a command line too,
where 1e3 is an integer and a,b a tuple, and its rule is printed by `--list`.
"""

import difflib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np


class ConfigError(ValueError):
    """A config that cannot run. The message names field, value and what it must be."""

    def __init__(self, message: str):
        """Joins the lines of a message, since a value may be written in several."""
        super().__init__(" ".join(message.split("\n")))


class Field(NamedTuple):
    """What a field may hold, and how it is read from a command line."""

    must: str  # completes "must be ..."
    accepts: Callable[[Any], bool]
    parse: Callable[[str], Any] = str  # raises ValueError


Fields = Mapping[str, Field]


def require(name: str, value: Any, field: Field) -> None:
    """Raises ConfigError, in one line, for a value that a field does not accept.

    Args:
      name: dotted name of the field.
      value: to check.
      field: its rule.
    """
    if not field.accepts(value):
        raise ConfigError(f"{name}={value!r}: must be {field.must}")


def parse_integer(text: str) -> int:
    """Reads an integer; 1e3 is 1000. Raises ValueError for another text."""
    number = float(text)
    if not number.is_integer():
        raise ValueError(text)
    return int(text) if text.strip("+-").isdecimal() else int(number)


def parse_flag(text: str) -> bool:
    """Reads true or false. Raises ValueError for another text."""
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def parts(text: str) -> list[str]:
    """Splits a tuple as typed: a,b or (a, b) or ('a', 'b'), or nothing."""
    text = text.strip()
    if text[:1] + text[-1:] in ("()", "[]"):
        text = text[1:-1]
    found = [part.strip() for part in text.split(",")]
    if not found[-1]:  # nothing at all, or a comma at the end
        found.pop()
    return [re.sub(r"""^(['"])(.*)\1$""", r"\2", part) for part in found]


def _tuple_of(parse: Callable[[str], Any]) -> Callable[[str], tuple]:
    return lambda text: tuple(map(parse, parts(text)))


def _is_tuple(value: Any, accepts: Callable[[Any], bool], least: int = 1) -> bool:
    """Whether a value is a tuple of accepted elements, none of them twice."""
    return (
        isinstance(value, tuple)
        and len(value) >= least
        and all(map(accepts, value))
        and len(set(value)) == len(value)
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def integer(low: int, high: int) -> Field:
    """Integers from low to high."""
    return Field(
        f"an integer from {low} to {high}",
        lambda v: type(v) is int and low <= v <= high,
        parse_integer,
    )


def integers(low: int, *, least: int = 0) -> Field:
    """Tuples of at least so many distinct integers, each at least low."""
    some = f", {least} or more of them" if least else ""
    return Field(
        f"integers from {low}, separated by commas, none twice{some}",
        lambda v: _is_tuple(v, lambda x: type(x) is int and x >= low, least),
        _tuple_of(parse_integer),
    )


def number(low: float, high: float) -> Field:
    """Numbers from low to high."""
    return Field(
        f"a number from {low:g} to {high:g}",
        lambda v: _is_number(v) and low <= v <= high,
        float,
    )


def one_of(names: Iterable[str]) -> Field:
    """One of some names."""
    names = tuple(names)
    return Field(
        f"one of {', '.join(names)}", lambda v: isinstance(v, str) and v in names
    )


def some_of(names: Iterable[str], *, least: int = 1) -> Field:
    """Tuples of distinct names out of some, in any order."""
    names = tuple(names)
    return Field(
        f"one or more of {', '.join(names)}, separated by commas, none twice"
        if names
        else "nothing, as there are none to name",
        lambda v: _is_tuple(v, lambda x: isinstance(x, str) and x in names, least),
        _tuple_of(str),
    )


FLAG = Field("true or false", lambda v: type(v) is bool, parse_flag)
FLAGS = Field(
    "false, true or both, separated by a comma",
    lambda v: _is_tuple(v, lambda x: type(x) is bool),
    _tuple_of(parse_flag),
)
TEXT = Field("text that is not empty", lambda v: isinstance(v, str) and v != "")
NAMES = Field(
    "names, separated by commas, none twice",
    lambda v: _is_tuple(v, lambda x: isinstance(x, str)),
    _tuple_of(str),
)
RATE = number(0, 1e30)  # what float32 holds, with room
SHARE = Field(
    "a number above 0, at most 1", lambda v: _is_number(v) and 0 < v <= 1, float
)
BELOW_ONE = Field(
    "a number from 0, below 1", lambda v: _is_number(v) and 0 <= v < 1, float
)
RISING = Field(
    "numbers from 1e-12 to 1e12, rising, separated by commas",
    lambda v: (
        _is_tuple(v, lambda x: _is_number(x) and 1e-12 <= x <= 1e12)
        # Also in the precision that the programs compute in.
        and all(a < b for a, b in itertools.pairwise(map(np.float32, v)))
    ),
    _tuple_of(float),
)


def nearest(name: str, names: Iterable[str]) -> str:
    """Suggests what someone may have meant; empty if nothing is near.

    Args:
      name: as typed.
      names: that there are.
    """
    close = difflib.get_close_matches(name, list(names), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def three_nearest(name: str, names: Iterable[str]) -> str:
    """Suggests the three names most like one: of hundreds, nobody wants them all."""
    *others, last = map(repr, difflib.get_close_matches(name, list(names), 3, 0))
    listed = f"{', '.join(others)} or {last}" if others else last
    return f", did you mean {listed}? (--list shows all)"
