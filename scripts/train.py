"""Trains every arm of a config on every seed, and writes a run directory.

python scripts/train.py --config=configs/sticky.py[:VARIANT] [--workdir=DIR]
    [--pdf] [--config.NAME=VALUE ...]
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict
from tqdm import tqdm

from jaxattn import command, figures, phase, phase_figures, report, runs, sweep
from jaxattn import config as config_lib

_CONFIG = flags.DEFINE_string("config", None, "a config file, with :VARIANT behind it")
_WORKDIR = flags.DEFINE_string("workdir", None, "default results/<config>[-variant]")
_STOP = (signal.SIGINT, signal.SIGTERM)
_PDF = flags.DEFINE_bool("pdf", False, "also draw the figures as PDF")


def main(overrides: list[tuple[str, str]]) -> int:
    """Runs; returns the exit code."""
    logging.set_verbosity(logging.WARNING)  # JAX tells which backends it lacks
    try:
        config = command.read_config(
            _CONFIG.value, overrides, config_lib.check, "configs/sticky.py"
        )
        workdir = Path(_WORKDIR.value or Path("results") / config.name)
        with runs.claimed(workdir, config):
            summary = _run(config, workdir)
    except (config_lib.ConfigError, runs.RunError) as error:
        command.stop(str(error))
    except KeyboardInterrupt:
        print(
            "\ninterrupted; the same command goes on from the last checkpoint",
            file=sys.stderr,
        )
        return 130
    print(_tables(config)[0].terminal(summary))
    print(f"Written to {workdir}: report.md, summary.json, metrics.npz, figures/")
    return 0


def _tables(config: ConfigDict):
    """What reads a run of this config, and what draws it."""
    return (phase, phase_figures) if "grid" in config else (report, figures)


def _run(config: ConfigDict, workdir: Path) -> dict:
    tables, pictures = _tables(config)
    device, workers = jax.local_devices()[0].device_kind, _workers()
    points = sweep.cells(config) // config.seeds
    over = f" x {points} points" if points > 1 else ""
    print(f"{config.name}: {', '.join(config.run_arms)}; {config.seeds} seeds{over}")
    print(f"{config.steps} steps, {workers} x {device}; compiling ...", flush=True)
    started = time.perf_counter()
    program = sweep.build(config, workers=workers)
    compiled = time.perf_counter()
    carry, before = sweep.start(program), 0.0
    kept = runs.load_checkpoint(workdir, carry)
    if kept is not None:
        carry, before = kept
        print(f"going on from step {carry.step}")
    carry = _train(program, carry, workdir, lambda: _since(compiled) + before)
    wall = {"compile": compiled - started, "run": _since(compiled) + before}

    with runs.staged(workdir) as stage:
        run = runs.write_metrics(stage, config, sweep.finish(program, carry))
        summary = tables.summarise(run, wall)
        run = run._replace(summary=summary)
        names = pictures.draw(run, stage / "figures", pdf=_PDF.value)
        (stage / "summary.csv").write_text(tables.csv_table(summary), "utf-8")
        paths = [f"figures/{name}" for name in names]
        (stage / "report.md").write_text(tables.markdown(summary, paths), "utf-8")
        runs.write_summary(stage, summary)
    runs.remove_checkpoints(workdir)
    return summary


def _workers() -> int:
    """One per core on a CPU, one on an accelerator."""
    if jax.default_backend() != "cpu":
        return 1
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _since(moment: float) -> float:
    return time.perf_counter() - moment


def _train(
    program: sweep.Sweep,
    carry: sweep.Carry,
    workdir: Path,
    seconds: Callable[[], float],
) -> sweep.Carry:
    config = program.config
    per_step = sweep.cells(config) * len(config.run_arms)
    with tqdm(
        total=config.steps * per_step,
        initial=int(carry.step) * per_step,
        unit="seed-step",
        dynamic_ncols=True,
    ) as bar:
        while carry.step < config.steps:
            before = int(carry.step)
            with _signals_kept() as kept:
                carry = sweep.advance(program, carry, bar.update)
                bar.set_description(f"step {carry.step}/{config.steps}")
                every = config.checkpoint_every
                due = kept or int(carry.step) // every > before // every
                if due and carry.step < config.steps:
                    runs.save_checkpoint(workdir, config, carry, seconds())
            if kept and carry.step < config.steps:
                raise KeyboardInterrupt
    return carry


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
