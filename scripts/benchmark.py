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

from jaxattn import attention, report, schedules, stats, sweep
from jaxattn import config as config_lib
from jaxattn.tasks.base import Batch

_LENGTH = flags.DEFINE_integer("length", 2000, "symbols of the chain; T is one less", 2)
_REPEATS = flags.DEFINE_integer("repeats", 30, "interleaved repeats", 6)
_CALLS = 5  # in a row: a training loop finds its own data in cache, not its rival's
_JSON = flags.DEFINE_string("json", None, "also write the numbers to this file")

Timing = dict[str, list[float]]  # what -> seconds of each repeat


def main(_) -> int:
    """Runs; returns the exit code."""
    logging.set_verbosity(logging.WARNING)
    config = config_lib.load("configs/sticky.py")
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
    if _JSON.value:
        Path(_JSON.value).write_text(json.dumps(summary, indent=2) + "\n", "utf-8")
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
    threads = [int(thread) for thread in os.listdir("/proc/self/task")]
    try:
        for thread in threads:
            os.sched_setaffinity(thread, {core})
        yield
    finally:
        for thread in threads:
            os.sched_setaffinity(thread, before)


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
    app.run(lambda argv: sys.exit(main(argv)))
