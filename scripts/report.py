"""Puts finished runs side by side: python scripts/report.py RUN [RUN ...]."""

import sys

from absl import app

from jaxattn import command, report, runs


def main(arguments: list[str]) -> int:
    """Prints; returns the exit code."""
    paths = arguments[1:]
    if not paths:
        command.stop("RUN: not given; allowed: run directories, as in results/sticky")
    try:
        found = [runs.load_finished(path) for path in paths]
    except runs.RunError as error:
        command.stop(str(error))
    print(report.side_by_side(found), end="")
    return 0


if __name__ == "__main__":
    app.run(lambda arguments: sys.exit(main(arguments)))
