"""How much memory a program will need, before it is compiled, and how much there is."""

import os
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.extend import core

# Where Linux says how much a container or a batch job may use: the group's name, and of
# both generations the root of groups and the file in each.
_GROUPS = Path("/proc/self/cgroup")
_LIMITS = (
    ("", Path("/sys/fs/cgroup"), "memory.max"),
    ("memory", Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
)


def size(tree) -> int:
    """Bytes of a tree of arrays or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def peak(jaxpr: core.ClosedJaxpr) -> int:
    """Bytes that a program needs at most beside its arguments, by what is alive when.

    Every operation is taken to write its results before its arguments, and what only it
    needs inside, are given back. XLA does better where it fuses operations or works in
    place: on the programs of `sweep` this was 1.6 to 2.5 times what XLA then asked for
    (with jax 0.12.0 down to 0.8 times; `sweep` adds a third, and tests/test_memory.py
    holds that to 1 to 4 times).

    Args:
      jaxpr: from `jax.make_jaxpr` or `jax.jit(...).trace`.
    """
    return _peak(jaxpr.jaxpr)


def of_device(device: jax.Device) -> int | None:
    """Bytes that a device has; on a CPU, that this machine or its container has.

    None where the device does not say.
    """
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    return of_host()


def of_host() -> int:
    """Bytes that this machine or its container has."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    return min([*found, *_limits()])


def _limits() -> Iterator[int]:
    """Limits of the groups of processes that this one is in, the outer ones too."""
    groups = _GROUPS.read_text().splitlines() if _GROUPS.is_file() else []
    for line in groups:
        _, kinds, name = line.split(":", 2)
        for kind, root, file in _LIMITS:
            if kind in kinds.split(","):
                inner = Path(name.lstrip("/"))
                for group in (inner, *inner.parents):
                    path = root / group / file
                    text = path.read_text().strip() if path.is_file() else ""
                    if text.isdecimal():  # else "max"
                        yield int(text)


def _peak(jaxpr: core.Jaxpr) -> int:
    last_use = {}
    for index, equation in enumerate(jaxpr.eqns):
        for variable in _variables(equation.invars):
            last_use[variable] = index
    for variable in _variables(jaxpr.outvars):
        last_use[variable] = len(jaxpr.eqns)

    made: dict[core.Var, int] = {}  # alive, and made in here
    alive = highest = 0
    for index, equation in enumerate(jaxpr.eqns):
        written = {v: _bytes(v) for v in equation.outvars}
        inside = max(map(_peak, _within(equation)), default=0)
        alive += sum(written.values())
        highest = max(highest, alive + inside)
        made |= written
        for variable in {*_variables(equation.invars), *written}:
            if last_use.get(variable, index) == index:
                alive -= made.pop(variable, 0)
    return highest


def _variables(atoms) -> Iterator[core.Var]:
    return (atom for atom in atoms if isinstance(atom, core.Var))


def _bytes(variable: core.Var) -> int:
    # Typed keys have no dtype of numpy's, and are few.
    kept = hasattr(variable.aval, "size") and hasattr(variable.aval.dtype, "itemsize")
    return variable.aval.size * variable.aval.dtype.itemsize if kept else 0


def _within(equation: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    for part in jax.tree.leaves(
        list(equation.params.values()),
        is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr),
    ):
        if isinstance(part, core.ClosedJaxpr):
            yield part.jaxpr
        elif isinstance(part, core.Jaxpr):
            yield part
