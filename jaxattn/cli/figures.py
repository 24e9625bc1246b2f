"""Drawing: from what lies in the directories of runs alone."""

import shlex
import sys

from jaxattn import runs
from jaxattn.cli import command
from jaxattn.cli.command import Line
from jaxattn.engine import StoppedError, progress
from jaxattn.views import publish

RUNS = "RUN [RUN ...]"


def main(line: Line) -> int:
    """Draws; returns the exit code."""
    output = publish.Output(True, line.flags.pdf, line.flags.html)
    paths = require_runs(line)
    for path in paths:
        runs.load_finished(path)  # all of them, before the first is drawn
    for path in paths:
        print(f"drawing {path} ...", file=sys.stderr, flush=True)
        try:
            with progress.signals_kept("when its files are written") as signals:
                written = publish.draw(path, output, signals.left_behind)
        except StoppedError:
            print(
                f"\nstopped while drawing; {path} is as it was; draw it with:\n"
                f"{invocation(line, path)}",
                file=sys.stderr,
            )
            command.leave(130)
        print("\n".join(map(str, written)), flush=True)
        if signals:
            return 130
    return 0


def require_runs(line: Line) -> list[str]:
    """The words of a command line; raises FlagError where there are none."""
    if not line.words:
        raise command.FlagError(
            "RUN: not given; must be run directories, as in results/sticky"
        )
    return line.words


def invocation(line: Line, path: str) -> str:
    """The command that draws a run, by a script if this is one."""
    start = command.sibling(line.argv[0], "figures")
    flags = [f" --{name}" for name in ("html", "pdf") if getattr(line.flags, name)]
    return f"{start} {shlex.quote(path)}{''.join(flags)}"


COMMAND = command.Command(
    about="Draws finished runs again, and writes their tables and report.md anew, from"
    " what lies in the directories alone. For a run that was trained with --nofigures"
    " it is the first time.",
    flags=command.FIGURE_FLAGS,
    main=main,
    examples=("results/sticky", "results/sticky results/toy --html"),
    words=RUNS,
    errors=(runs.RunError,),
)
