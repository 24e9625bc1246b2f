"""Training: a config in, a run directory out."""

import math
import os
import re
import sys
from pathlib import Path

import jax

from jaxattn import engine, runs, views
from jaxattn.cli import command, figures, listing
from jaxattn.cli.command import Flag, Line
from jaxattn.engine import processes, progress
from jaxattn.engine.training import NotCompiledError
from jaxattn.experiments import resolve
from jaxattn.fields import FLAG, TEXT, ConfigError, integer, number
from jaxattn.views import publish

_PORT = re.compile(r".+:(\d+)")


def main(line: Line) -> int:
    """Runs; returns the exit code."""
    flags = line.flags
    if flags.list:
        return listing.show(line)
    _check_flags(line)
    source = command.read_config(line, "train")
    experiment = resolve(source.config, source.catalogue)
    if flags.weights and "architectures" not in experiment.facts:
        raise ConfigError(
            "weights=True: must be left out but with transformers, see"
            " configs/bijection.py"
        )
    workdir = command.workdir(line, experiment.name)
    command.keep_programs(flags.cache)
    try:
        if flags.distributed or flags.coordinator:
            processes.join(flags.coordinator, flags.processes, flags.process)
        run = engine.train(
            experiment,
            workdir=workdir,
            settings=_settings(line),
            finish=publish.tables,
        )
        if flags.figures or flags.html:
            processes.led(lambda: _draw(line, workdir))
    except processes.ProcessLostError as error:
        what = f"{error}; the same command goes on from the last checkpoint, if any"
        _say(f"{command.name_of(line.argv[0])}: {what}")
        command.leave(1)  # the others can't be waited for
    except NotCompiledError as place:
        _say(f"\nstopped while compiling; {place} is as it was; begin again with:")
        _say(line.again())
        command.leave(130)
    except _NotDrawnError:
        _say(f"\nstopped while drawing; all numbers are in {workdir}; draw them with:")
        _say(figures.invocation(line, str(workdir)))
        if jax.process_count() == 1:  # others want to hear that this one is done
            command.leave(130)
        return 130
    except engine.StoppedError as place:
        if processes.leads():
            again = line.again()
            if jax.process_count() > 1:
                again = "the same commands, for every process"
            _say(f"\nstopped with {place}; go on with:\n{again}")
        return 130
    if processes.leads():
        summary = runs.load_finished(workdir).attrs["summary"]
        print(views.view_of(run).terminal(summary))
        what = "report.html, " if flags.html else ""
        what += "report.md, summary.json, metrics.npz"
        what += ", figures/" if flags.figures else ""
        print(f"Written to {workdir}: {what}")
    return 0


class _NotDrawnError(engine.StoppedError):
    """A signal came while pictures were drawn, by a thread; all else is written."""


def _draw(line: Line, workdir: Path) -> None:
    flags = line.flags
    output = publish.Output(flags.figures, flags.pdf, flags.html)
    try:
        with progress.signals_kept("when its files are written") as signals:
            print("drawing figures ...", flush=True)
            publish.draw(workdir, output, signals.left_behind)
    except engine.StoppedError:
        raise _NotDrawnError from None


def _check_flags(line: Line) -> None:
    """Raises FlagError for flags that do not go together."""
    flags = line.flags
    if flags.pdf and not flags.figures:
        raise command.FlagError("pdf=True: must be left out with --nofigures")
    of_one = {name: getattr(flags, name) for name in _OF_PROCESS}
    given = [f"{name}={value!r}" for name, value in of_one.items() if value is not None]
    if flags.distributed and given:
        raise command.FlagError(
            f"distributed=True, {', '.join(given)}: must be --distributed, where the"
            " cluster says the rest, or the others alone"
        )
    if not given:
        return
    if None in of_one.values():
        missing = ", ".join(f"{name}={value!r}" for name, value in of_one.items())
        raise command.FlagError(
            f"{missing}: one is missing; must be all three, or --distributed"
        )
    port = _PORT.fullmatch(flags.coordinator)
    if port is None or not 1 <= int(port[1]) <= 65535:
        raise command.FlagError(
            f"coordinator={flags.coordinator!r}: must be HOST:PORT of process 0, a"
            " port from 1 to 65535"
        )
    if flags.process >= flags.processes:
        raise command.FlagError(
            f"process={flags.process}: must be an integer from 0 to"
            f" {flags.processes - 1} with processes={flags.processes}"
        )


def _settings(line: Line) -> engine.Settings:
    flags = line.flags
    return engine.Settings(
        together=flags.seeds_together,
        workers=flags.workers or (_cores() if jax.default_backend() == "cpu" else 1),
        memory_share=flags.memory_share,
        checkpoint_seconds=flags.checkpoint_seconds,
        keep_weights=flags.weights,
    )


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _say(text: str) -> None:
    print(text, file=sys.stderr)


_OF_PROCESS = ("coordinator", "processes", "process")
COMMAND = command.Command(
    about="Trains every arm of a config on every seed, and writes a run directory."
    " What changes a number is a field of the config, what does not is a flag.",
    flags=(
        *command.CONFIG_FLAGS,
        Flag("figures", True, FLAG, "draw figures"),
        *command.FIGURE_FLAGS,
        Flag("weights", False, FLAG, "also write what each arm ended with"),
        Flag(
            *("workers", 0, integer(0, 100_000)),
            "batches of seeds at once; 0: one for each core of a CPU",
        ),
        Flag(
            *("seeds_together", 0, integer(0, 1_000_000)),
            "of a batch on each device; 0: 1 on a CPU, else what fits",
        ),
        Flag(
            *("memory_share", 0.5, number(0, 1)),
            "of each device, to be used",
        ),
        Flag(
            *("checkpoint_seconds", 60.0, number(0, math.inf)),
            "between checkpoints, at the next evaluation",
        ),
        Flag("cache", True, FLAG, "keep compiled programs for the next run"),
        Flag(
            *("distributed", False, FLAG),
            "be one of several processes; the cluster says which",
        ),
        Flag("coordinator", None, TEXT, "HOST:PORT of process 0, without one"),
        Flag("processes", None, integer(1, 100_000), "how many there are"),
        Flag("process", None, integer(0, 100_000), "which this is, from 0"),
    ),
    main=main,
    examples=(
        "--list",
        "--config=sticky:smoke",
        "--config=sticky --config.seeds=16 --html",
        "--config=sticky --list",
    ),
    errors=(runs.RunError, processes.ProcessError),
)
