"""Trains every arm of a config on every seed, and writes a run directory.

python scripts/train.py --config=configs/sticky.py[:VARIANT] [--workdir=DIR]
    [--pdf] [--config.NAME=VALUE ...]

How it runs: --workers, --seeds_together, --memory_share, --checkpoint_seconds,
--nocache; as one of several processes --distributed, or --coordinator, --processes and
--process.
"""

import contextlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict
from tqdm import tqdm

from jaxattn import (
    command,
    figures,
    phase,
    phase_figures,
    processes,
    report,
    runs,
    sweep,
)
from jaxattn import config as config_lib

_CONFIG = flags.DEFINE_string("config", None, "a config file, with :VARIANT behind it")
_WORKDIR = flags.DEFINE_string("workdir", None, "default results/<config>[-variant]")
_PDF = flags.DEFINE_bool("pdf", False, "also draw the figures as PDF")
_WORKERS = flags.DEFINE_integer(
    "workers", 0, "batches of seeds at once; 0: one for each core of a CPU", 0
)
_TOGETHER = flags.DEFINE_integer(
    "seeds_together", 0, "of a batch on each device; 0: 1 on a CPU, else what fits", 0
)
_SHARE = flags.DEFINE_float("memory_share", 0.5, "of each device, to be used", 0.0, 1.0)
_CHECKPOINT = flags.DEFINE_float(
    "checkpoint_seconds", 60.0, "between checkpoints, at the next evaluation", 0.0
)
_CACHE = flags.DEFINE_bool("cache", True, "keep compiled programs for the next run")
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "one of several processes; the cluster says which"
)
_COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0")
_PROCESSES = flags.DEFINE_integer("processes", None, "how many there are", 1)
_PROCESS = flags.DEFINE_integer("process", None, "which this is, from 0", 0)

_STOP = (signal.SIGINT, signal.SIGTERM)


class StoppedError(Exception):
    """Ctrl-C or SIGTERM came, and what there was to keep is kept."""


def main(overrides: list[tuple[str, str]]) -> int:
    """Runs; returns the exit code."""
    logging.set_verbosity(logging.WARNING)  # JAX tells which backends it lacks
    try:
        with _signals_kept() as signals:
            config = command.read_config(
                _CONFIG.value, overrides, config_lib.check, "configs/sticky.py"
            )
            workdir = Path(_WORKDIR.value or Path("results") / config.name)
            _set_up()
            described = json.dumps(runs.describe(config), sort_keys=True)
            processes.require_same("config, code and versions", described)
            with _claimed(workdir, config):
                summary = _run(config, workdir, signals)
    except processes.ProcessLostError as error:
        _leave(f"{error}; the same command goes on from the last checkpoint")
    except (config_lib.ConfigError, runs.RunError, processes.ProcessError) as error:
        command.stop(str(error))
    except StoppedError as stopped:
        if processes.leads():
            again = shlex.join(["python", *sys.argv])
            print(f"\nstopped {stopped}; go on with:\n{again}", file=sys.stderr)
        return 130
    if processes.leads():
        print(_tables(config)[0].terminal(summary))
        print(f"Written to {workdir}: report.md, summary.json, metrics.npz, figures/")
    return 0


def _set_up() -> None:
    """Kept programs, and the other processes, before JAX does anything."""
    if _CACHE.value:
        command.keep_programs()
    given = _COORDINATOR.value, _PROCESSES.value, _PROCESS.value
    if _DISTRIBUTED.value or any(value is not None for value in given):
        if not _DISTRIBUTED.value and None in given:
            raise config_lib.ConfigError(
                f"coordinator={given[0]!r}, processes={given[1]}, process={given[2]}:"
                " one is missing; allowed: all three, or --distributed"
            )
        processes.join(*given)


def _tables(config: ConfigDict):
    """What reads a run of this config, and what draws it."""
    return (phase, phase_figures) if "grid" in config else (report, figures)


@contextlib.contextmanager
def _claimed(workdir: Path, config: ConfigDict) -> Iterator[None]:
    """Process 0 holds the directory for all."""
    with contextlib.ExitStack() as stack:
        held = runs.claimed(workdir, config)
        processes.led(lambda: stack.enter_context(held), runs.RunError)
        yield


def _run(config: ConfigDict, workdir: Path, signals: list[int]) -> dict | None:
    content = processes.led(lambda: runs.read_checkpoint(workdir), runs.RunError)
    content = processes.hand_out(content or b"")
    on_cpu = jax.default_backend() == "cpu"
    plan = sweep.plan(
        config,
        jax.local_devices()[: 1 if on_cpu else None],
        together=_TOGETHER.value,
        workers=_WORKERS.value or (_cores() if on_cpu else 1),
        memory_share=_SHARE.value,
    )
    _say(_headline(config, plan))
    started = time.perf_counter()
    program = sweep.build(config, plan)
    compiled = time.perf_counter()
    carry, before = runs.resumed(program, content)
    if content:
        _say(f"going on from {_place(config, carry)}")
    carry = _train(program, carry, workdir, before, signals)
    wall = {"compile": compiled - started, "run": _since(compiled) + before}
    result = sweep.finish(program, carry)
    return processes.led(lambda: _write(config, workdir, result, wall), runs.RunError)


def _write(
    config: ConfigDict, workdir: Path, result: sweep.Result, wall: dict[str, float]
) -> dict:
    tables, pictures = _tables(config)
    with runs.staged(workdir) as stage:
        run = runs.write_metrics(stage, config, result)
        summary = tables.summarise(run, wall)
        run = run._replace(summary=summary)
        names = pictures.draw(run, stage / "figures", pdf=_PDF.value)
        (stage / "summary.csv").write_text(tables.csv_table(summary), "utf-8")
        paths = [f"figures/{name}" for name in names]
        (stage / "report.md").write_text(tables.markdown(summary, paths), "utf-8")
        runs.write_summary(stage, summary)
    runs.remove_checkpoints(workdir)
    return summary


def _headline(config: ConfigDict, plan: sweep.Plan) -> str:
    count = sweep.cells(config) // (config.seeds * len(config.run_arms))
    over = f" x {count} points" if count > 1 else ""
    kind, processes_ = plan.devices[0].device_kind, jax.process_count()
    units = f"{len(plan.devices)} x {kind}"
    where = " of each"
    if plan.devices[0].platform == "cpu":
        units, where = f"{kind}, {plan.workers} workers", ""
    units += f", {processes_} processes" if processes_ > 1 else ""
    on_each = plan.slots if not where else plan.together * plan.workers
    need, have = plan.seed_bytes * on_each / 2**30, plan.device_bytes / 2**30
    return (
        f"{config.name}: {', '.join(config.run_arms)}; {config.seeds} seeds{over},"
        f" {config.steps} steps\n"
        f"{units}: {plan.slots * processes_} seeds at once, which need about"
        f" {need:.2g} of {have:.3g} GiB{where}\ncompiling ..."
    )


def _place(config: ConfigDict, carry: sweep.Carry) -> str:
    begun = [f"seed {int(r.kept.seeds[0])} on, step {r.step}" for r in carry.rounds]
    done = sum(len(kept.seeds) for kept in carry.done)
    return "; ".join([f"{done} of {config.seeds} seeds done", *begun[:1]])


def _train(
    program: sweep.Sweep,
    carry: sweep.Carry,
    workdir: Path,
    before: float,
    signals: list[int],
) -> sweep.Carry:
    config = program.config
    done = sweep.steps_done(config, carry)
    began = saved = time.perf_counter()
    with tqdm(
        total=sweep.cells(config) * config.steps,
        initial=done,
        unit="seed-step",
        dynamic_ncols=True,
        disable=not processes.leads(),
    ) as bar:
        while not sweep.is_done(config, carry):
            late = _since(saved) >= _CHECKPOINT.value
            stop, due = processes.any_of(bool(signals), late)
            if stop or due:
                whole = sweep.collect(program, carry)
                seconds = _since(began) + before
                _save(workdir, config, whole, seconds)
                saved = time.perf_counter()
            if stop:
                raise StoppedError(f"with {_place(config, carry)}")
            carry = sweep.advance(program, carry)
            bar.set_description(_progress(config, carry))
            bar.update(sweep.steps_done(config, carry) - bar.n)
    rate = (sweep.steps_done(config, carry) - done) / _since(began)
    _say(f"{rate:,.0f} seed-steps a second")
    return carry


def _progress(config: ConfigDict, carry: sweep.Carry) -> str:
    step = int(carry.rounds[0].step) if carry.rounds else config.steps
    return f"seeds {int(carry.started)}/{config.seeds} step {step}/{config.steps}"


def _save(
    workdir: Path, config: ConfigDict, carry: sweep.Carry, seconds: float
) -> None:
    processes.led(
        lambda: runs.save_checkpoint(workdir, config, carry, seconds), runs.RunError
    )


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _since(moment: float) -> float:
    return time.perf_counter() - moment


def _say(text: str) -> None:
    if processes.leads():
        print(text, flush=True)


def _leave(message: str) -> None:
    """Ends this process at once: the others can't be waited for."""
    print(f"train.py: {message}", file=sys.stderr, flush=True)
    os._exit(1)


@contextlib.contextmanager
def _signals_kept() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM wait for the next checkpoint; a second one does not.

    Yields:
      What came. An exception raised wherever the program happens to be could be lost
      in a library, or leave something half done.
    """
    kept: list[int] = []

    def keep(number: int, frame) -> None:
        del frame
        kept.append(number)
        for name in before:
            signal.signal(name, signal.SIG_DFL)

    before = {name: signal.signal(name, keep) for name in _STOP}
    try:
        yield kept
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


if __name__ == "__main__":
    app.run(lambda overrides: sys.exit(main(overrides)), flags_parser=command.split)
