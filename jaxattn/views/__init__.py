"""What people read of a run: tables, reports, pictures, a page."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxattn.runs import Run, RunError


class View(NamedTuple):
    """How a kind of run is summed up and shown."""

    summarise: Callable[[Run, dict[str, float]], dict[str, Any]]  # -> summary.json
    terminal: Callable[[dict[str, Any]], str]  # the tables for 80 columns
    # Of a summary, and the paths of pictures with their captions: report.md.
    markdown: Callable[[dict[str, Any], Mapping[str, str]], str]
    csv_table: Callable[[dict[str, Any]], str]
    draw: Callable[..., dict[str, str]]  # (run, folder, pdf=) -> file -> caption


def _numbers(kind: str, report: str, pictures: str) -> Callable[[], View]:
    """Returns what loads a view; pictures only when they are drawn."""

    def load() -> View:
        analysis = importlib.import_module(f"jaxattn.analysis.{kind}")
        text = importlib.import_module(f"jaxattn.views.{report}")
        tables = importlib.import_module("jaxattn.views.tables")

        def draw(run: Run, folder: Path, *, pdf: bool = False) -> dict[str, str]:
            # Late: matplotlib takes a second, that tables need not wait for.
            module = importlib.import_module(f"jaxattn.views.{pictures}")
            return module.draw(run, folder, pdf=pdf)

        return View(
            analysis.summarise, text.terminal, text.markdown, tables.csv_table, draw
        )

    return load


VIEWS: Mapping[str, Callable[[], View]] = MappingProxyType(
    {
        "head": _numbers("head", "head_report", "head_figures"),
        "grid": _numbers("grid", "grid_report", "grid_figures"),
        "transformer": _numbers("layers", "layers_report", "layers_figures"),
    }
)


def view_of(run: Run) -> View:
    """Returns the view that a run asks for.

    Args:
      run: the name of its view is among its facts.

    Raises:
      RunError: there is no such view.
    """
    name = run.attrs["facts"]["view"]
    if name not in VIEWS:
        raise RunError(
            f"run={run.attrs['path']!r}: view {name!r} is unknown; must be one of"
            f" {', '.join(VIEWS)}"
        )
    return VIEWS[name]()


def side_by_side(found: Sequence[Run]) -> str:
    """Puts finished runs in one table, see `head_report.side_by_side`."""
    from jaxattn.views import head_report

    return head_report.side_by_side(found)
