"""The proof of the laws: a config in, a table out, exit code 1 if one does not hold."""

import sys
import threading
from typing import Any

from jaxattn.cli import command, listing
from jaxattn.cli.command import Line
from jaxattn.engine import StoppedError, progress
from jaxattn.experiments import resolve
from jaxattn.experiments.proof import ProofSettings
from jaxattn.proof import prove as proof
from jaxattn.runs import RunError, directory, provenance, write


def main(line: Line) -> int:
    """Runs; returns the exit code."""
    if line.flags.list:
        return listing.show(line)
    source = command.read_config(line, "check")
    settings = resolve(source.config, source.catalogue)
    workdir = command.workdir(line, settings.name)
    record = write.plain({"config": settings.config}) | provenance.provenance()
    try:
        with (
            progress.signals_kept("when all is written") as signals,
            directory.claimed(workdir, record),
        ):
            summary = signals.left_behind(lambda: _prove(settings))
            text = proof.terminal(summary)
            print(text)
            with directory.staged(workdir) as stage:
                write.write_record(stage, record)
                (stage / "report.txt").write_text(text, "utf-8")
                write.write_summary(stage, summary)
    except StoppedError:
        print("\nstopped; nothing was written", file=sys.stderr)
        command.leave(130)
    print(f"Written to {workdir}: summary.json, report.txt, config.json")
    return 0 if summary["holds"] else 1


def _prove(settings: ProofSettings) -> dict[str, Any]:
    total, done, lock = proof.work(settings), 0, threading.Lock()
    with progress.shown(settings.name, total, unit="pass") as tell:

        def passed(what: str, more: int) -> None:  # called by several threads
            nonlocal done
            with lock:
                done += more
                tell(done, what)

        return proof.prove(settings, passed)


COMMAND = command.Command(
    about="Checks every law by hand, by autodiff and by central differences. The exit"
    " code is 1 if one does not hold.",
    flags=command.CONFIG_FLAGS,
    main=main,
    examples=("--config=gradients:smoke", "--config=gradients --list"),
    errors=(RunError,),
)
