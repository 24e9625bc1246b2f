"""The proof of the laws: a config in, a table out, exit code 1 if one does not hold."""

import sys
import threading
from typing import Any

from ml_collections import ConfigDict

from jaxattn.analysis import runs
from jaxattn.cli import command, listing
from jaxattn.cli.command import Line
from jaxattn.engine import progress
from jaxattn.experiments import config as config_lib
from jaxattn.proof import prove as proof


def main(line: Line) -> int:
    """Runs; returns the exit code."""
    if line.flags.list:
        return listing.show(line)
    config = command.read_config(line, config_lib.check_proof, proof=True)
    workdir = command.workdir(line, config)
    try:
        with (
            progress.signals_kept("when all is written") as signals,
            runs.claimed(workdir, config),
        ):
            summary = signals.left_behind(lambda: _prove(config))
            text = proof.terminal(summary)
            print(text)
            with runs.staged(workdir) as stage:
                runs.write_config(stage, config)
                (stage / "report.txt").write_text(text, "utf-8")
                runs.write_summary(stage, summary)
    except progress.StoppedError:
        print("\nstopped; nothing was written", file=sys.stderr)
        command.leave(130)
    print(f"Written to {workdir}: summary.json, report.txt, config.json")
    return 0 if summary["holds"] else 1


def _prove(config: ConfigDict) -> dict[str, Any]:
    total, done, lock = proof.work(config), 0, threading.Lock()
    with progress.shown(config.name, total, unit="pass") as tell:

        def passed(what: str, more: int) -> None:  # called by several threads
            nonlocal done
            with lock:
                done += more
                tell(done, what)

        return proof.prove(config, passed)


COMMAND = command.Command(
    about="Checks every law by hand, by autodiff and by central differences. The exit"
    " code is 1 if one does not hold.",
    flags=command.CONFIG_FLAGS,
    main=main,
    examples=("--config=gradients:smoke", "--config=gradients --list"),
    errors=(runs.RunError,),
)
