"""How much memory a compiled program needs, and how much there is."""

import os
from collections.abc import Iterator
from pathlib import Path

import jax

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


def of_program(program: jax.stages.Compiled) -> int:
    """Bytes on a device that a program needs beside its arguments, as XLA says."""
    found = program.memory_analysis()
    return found.temp_size_in_bytes + found.output_size_in_bytes


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
