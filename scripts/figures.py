"""Draws finished runs again: python scripts/figures.py RUN [RUN ...] [--html] [--pdf].

From what lies in the directories alone, tables and report.md too. For a whole run that
was trained with --nofigures it is the first time.
"""

import sys
from pathlib import Path

from absl import app, flags, logging

from jaxattn import command, launch, runs

_HTML = flags.DEFINE_bool("html", False, "also write the report as one page")
_PDF = flags.DEFINE_bool("pdf", False, "also draw the figures as PDF")


def main(arguments: list[str]) -> int:
    """Draws; returns the exit code."""
    logging.set_verbosity(logging.WARNING)  # JAX tells which backends it lacks
    paths = arguments[1:]
    if not paths:
        command.stop("RUN: not given; allowed: run directories, as in results/sticky")
    output = launch.Output(True, _PDF.value, _HTML.value)
    for path in paths:
        try:
            written = launch.redraw(Path(path), output)
        except runs.RunError as error:
            command.stop(str(error))
        print("\n".join(map(str, written)))
    return 0


if __name__ == "__main__":
    app.run(lambda arguments: sys.exit(main(arguments)))
