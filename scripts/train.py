"""Trains every arm of a config on every seed, and writes a run directory.

python scripts/train.py --config=configs/sticky.py[:VARIANT] [--workdir=DIR]
    [--config.NAME=VALUE ...] [--html] [--pdf] [--nofigures] [--weights]

How it runs: --workers, --seeds_together, --memory_share, --checkpoint_seconds,
--nocache; as one of several processes --distributed, or --coordinator, --processes and
--process.
"""

import os
import re
import shlex
import sys
from pathlib import Path

import jax
from absl import app, flags, logging

from jaxattn import command, launch, processes, runs
from jaxattn import config as config_lib

_CONFIG = flags.DEFINE_string("config", None, "a config file, with :VARIANT behind it")
_WORKDIR = flags.DEFINE_string("workdir", None, "default results/<config>[-variant]")
_FIGURES = flags.DEFINE_bool("figures", True, "draw them; scripts/figures.py can later")
_HTML = flags.DEFINE_bool("html", False, "also write the report as one page")
_PDF = flags.DEFINE_bool("pdf", False, "also draw the figures as PDF")
_WEIGHTS = flags.DEFINE_bool("weights", False, "also write what each arm ended with")
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


def main(overrides: list[tuple[str, str]]) -> int:
    """Runs; returns the exit code."""
    logging.set_verbosity(logging.WARNING)  # JAX tells which backends it lacks
    try:
        config = command.read_config(
            _CONFIG.value, overrides, config_lib.check, "configs/sticky.py"
        )
        if _WEIGHTS.value and not config_lib.is_tunnel(config):
            raise config_lib.ConfigError(
                "weights=True: allowed with transformers, see configs/bijection.py"
            )
        command.keep_programs(_CACHE.value)
        _join()
        workdir = Path(_WORKDIR.value or Path("results") / config.name)
        summary = launch.train(config, workdir, _way())
    except processes.ProcessLostError as error:
        _leave(f"{error}; the same command goes on from the last checkpoint, if any")
    except (config_lib.ConfigError, runs.RunError, processes.ProcessError) as error:
        command.stop(str(error))
    except launch.StoppedError as place:
        if processes.leads():
            again = shlex.join(["python", *sys.argv])
            if jax.process_count() > 1:
                again = "the same commands, for every process"
            print(f"\nstopped with {place}; go on with:\n{again}", file=sys.stderr)
        return 130
    if processes.leads():
        print(launch.terminal(config, summary))
        what = "report.html, " if _HTML.value else ""
        what += "report.md, summary.json, metrics.npz"
        what += ", figures/" if _FIGURES.value else ""
        print(f"Written to {workdir}: {what}")
    return 0


def _join() -> None:
    """Joins the other processes, if there are any, before JAX does anything."""
    given = _COORDINATOR.value, _PROCESSES.value, _PROCESS.value
    if _DISTRIBUTED.value or any(value is not None for value in given):
        if not _DISTRIBUTED.value and None in given:
            raise config_lib.ConfigError(
                f"coordinator={given[0]!r}, processes={given[1]}, process={given[2]}:"
                " one is missing; allowed: all three, or --distributed"
            )
        if given[0] is not None and not re.fullmatch(r".+:\d+", given[0]):
            raise config_lib.ConfigError(
                f"coordinator={given[0]!r}: allowed: HOST:PORT of process 0"
            )
        processes.join(*given)


def _way() -> launch.Way:
    return launch.Way(
        workers=_WORKERS.value or (_cores() if jax.default_backend() == "cpu" else 1),
        together=_TOGETHER.value,
        memory_share=_SHARE.value,
        checkpoint_seconds=_CHECKPOINT.value,
        output=launch.Output(_FIGURES.value, _PDF.value, _HTML.value, _WEIGHTS.value),
    )


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _leave(message: str) -> None:
    """Ends this process at once: the others can't be waited for."""
    print(f"train.py: {message}", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    app.run(lambda overrides: sys.exit(main(overrides)), flags_parser=command.split)
