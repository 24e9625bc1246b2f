"""Finished runs, side by side."""

from jaxattn import runs, views
from jaxattn.cli import command, figures
from jaxattn.cli.command import Line


def main(line: Line) -> int:
    """Prints; returns the exit code."""
    found = [runs.load_finished(path) for path in figures.require_runs(line)]
    print(views.side_by_side(found), end="")
    return 0


COMMAND = command.Command(
    about="Puts finished runs side by side.",
    flags=(),
    main=main,
    examples=("results/sticky results/sticky-full",),
    words=figures.RUNS,
    errors=(runs.RunError,),
)
