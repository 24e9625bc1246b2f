"""Times the laws against autodiff of the dense forward pass, as ratios.

python scripts/benchmark.py [--length=2000] [--repeats=30] [--json=FILE]
"""

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from absl import app, flags, logging

from jaxattn import attention, command, report, schedules, stats, sweep
from jaxattn import config as config_lib
from jaxattn.tasks.base import Batch

_LENGTH = flags.DEFINE_integer("length", 2000, "symbols of the chain; T is one less", 2)
_REPEATS = flags.DEFINE_integer("repeats", 30, "interleaved repeats", 6)
_CALLS = 5  # in a row: a training loop finds its own data in cache, not its rival's
_JSON = flags.DEFINE_string("json", None, "also write the numbers to this file")

Timing = dict[str, list[float]]  # what -> seconds of each repeat


def main(overrides: list[tuple[str, str]]) -> int:
    """Runs; returns the exit code."""
    logging.set_verbosity(logging.WARNING)
    if overrides:
        command.stop(f"unexpected argument '--config.{overrides[0][0]}'")
    path = Path(_JSON.value) if _JSON.value else None
    if path and not path.parent.is_dir():
        command.stop(f"json={str(path)!r}: no such folder; allowed: a file in one")
    config = config_lib.load(str(Path(__file__).parents[1] / "configs" / "sticky.py"))
    config.task.length = _LENGTH.value
    problem = jax.jit(functools.partial(sweep.draw_problem, config))(0)
    sequence = jax.tree.map(lambda leaf: leaf[0], problem.train)
    programs = {
        name: jax.jit(functools.partial(gradient, causal=True))
        .lower(problem.params, sequence)
        .compile()
        for name, gradient in schedules.GRADIENTS.items()
    }
    calls = {
        name: functools.partial(_call, program, problem.params, sequence)
        for name, program in programs.items()
    }
    found = {}
    cores = _cores()
    everything = f"{len(cores)} cores" if cores else jax.devices()[0].device_kind
    if len(cores) > 1:
        with _pinned(cores[0]):
            found["one core"] = _interleaved(calls)
        found[f"{everything}, a sequence each"] = _interleaved(
            {name: _at_once(call, len(cores)) for name, call in calls.items()}
        )
    found[f"{everything}, one sequence"] = _interleaved(calls)

    summary = {
        "what": "loss and gradient of one head on one sequence, float32, causal",
        "positions": len(sequence.targets),
        "repeats": _REPEATS.value,
        "calls": _CALLS,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "rows": {name: _ratio(timing) for name, timing in found.items()},
    }
    print(_table(summary))
    if path:
        path.write_text(json.dumps(summary, indent=2) + "\n", "utf-8")
    return 0


def _call(program: Callable, params: attention.Params, sequence: Batch) -> None:
    jax.block_until_ready(program(params, sequence))


def _at_once(call: Callable[[], None], number: int) -> Callable[[], None]:
    """The call in so many threads; as the sweep deals seeds."""
    pool = ThreadPoolExecutor(number)
    return lambda: list(pool.map(lambda _: call(), range(number)))


def _interleaved(calls: dict[str, Callable[[], None]]) -> Timing:
    """Seconds of a call, all in turn, so that a slow moment falls on all alike."""
    seconds: Timing = {name: [] for name in calls}
    for call in calls.values():
        call()  # the first pays for memory
    for _ in range(_REPEATS.value):
        for name, call in calls.items():
            started = time.perf_counter()
            for _ in range(_CALLS):
                call()
            seconds[name].append((time.perf_counter() - started) / _CALLS)
    return seconds


def _cores() -> list[int]:
    """Cores that this process may use, where that can be asked and changed."""
    if jax.default_backend() != "cpu" or not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(0))


@contextlib.contextmanager
def _pinned(core: int) -> Iterator[None]:
    """Holds every thread of this process, XLA's too, on one core."""
    before = os.sched_getaffinity(0)
    try:
        _hold({core})
        yield
    finally:
        _hold(before)


def _hold(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)


def _ratio(timing: Timing) -> dict:
    laws, autodiff = (np.array(timing[name]) for name in ("laws", "autodiff"))
    return {
        "laws_ms": 1e3 * float(np.median(laws)),
        "autodiff_ms": 1e3 * float(np.median(autodiff)),
        "ratio": stats.median(autodiff / laws)._asdict(),
    }


def _table(summary: dict) -> str:
    rows = [["", "laws, ms", "autodiff, ms", "ratio [95 %]"]]
    for name, row in summary["rows"].items():
        low, high = row["ratio"]["ci95"]
        rows.append(
            [
                name,
                f"{row['laws_ms']:.2f}",
                f"{row['autodiff_ms']:.2f}",
                f"{row['ratio']['median']:.2f} [{low:.2f}, {high:.2f}]",
            ]
        )
    return (
        f"{summary['what']}\nT = {summary['positions']}, sizes of"
        f" configs/sticky.py; medians of {summary['repeats']} interleaved"
        f"\nrepeats of {summary['calls']} calls\n\n{report.text_table(rows)}\n"
    )


if __name__ == "__main__":
    app.run(lambda overrides: sys.exit(main(overrides)), flags_parser=command.split)
