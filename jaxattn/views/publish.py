"""Tables, report, figures and page of a run, written into its directory at once."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jaxattn import views
from jaxattn.runs import Run, directory, load_finished, write


class Output(NamedTuple):
    """What is written of a finished run beside numbers and tables."""

    figures: bool = True  # all pictures, as PNG and GIF
    pdf: bool = False  # also as vector graphics
    html: bool = False  # also the report as one page


_ALL = Output()
# Calls what draws; may break it off, as `progress.Signals.left_behind` does.
DoneBy = Callable[[Callable[[], None]], None]


def tables(stage: Path, run: Run) -> None:
    """Writes summary.json, summary.csv and report.md of a run; for `engine.train`.

    Args:
      stage: to write into.
      run: with `wall_seconds` among its attributes.
    """
    run = _summarised(run, run.attrs["wall_seconds"])
    _write(Path(run.attrs["path"]), stage, run, Output(figures=False))


def draw(
    path: Path | str, output: Output = _ALL, done_by: DoneBy | None = None
) -> list[Path]:
    """Draws a finished run from its directory, and writes its tables anew.

    Args:
      path: of the run.
      output: what to write.
      done_by: draws; the default just does.

    Returns:
      The files.

    Raises:
      RunError: it is no finished run, or cannot be written.
    """
    path = Path(path)
    with directory.claimed(path, None):
        run = load_finished(path)
        wall = run.attrs["summary"]["wall_seconds"]
        # A page that is there would else tell of older tables.
        output = output._replace(html=output.html or (path / "report.html").exists())
        with _drawing(path, output) as stage:

            def write_all() -> None:
                _write(path, stage, _summarised(run, wall), output)

            (done_by or _do)(write_all)
            found = [file for file in stage.rglob("*") if file.is_file()]
            written = {path / file.relative_to(stage) for file in found}
    return sorted(written)


def _do(work: Callable[[], None]) -> None:
    work()


def _drawing(workdir: Path, output: Output) -> contextlib.AbstractContextManager[Path]:
    """A stage; figures that were drawn before, and are not in it, go if it moves in."""
    before = directory.drawn(workdir) if output.figures else None
    return directory.staged(workdir, instead_of=[f"figures/{n}" for n in before or ()])


def _summarised(run: Run, wall: dict[str, float]) -> Run:
    return run.assign_attrs(summary=views.view_of(run).summarise(run, wall))


def _write(workdir: Path, stage: Path, run: Run, output: Output) -> None:
    """Writes tables and pictures of a run with its summary into a stage."""
    view, summary = views.view_of(run), run.attrs["summary"]
    shown, listed = {}, directory.drawn(workdir)
    if output.figures:
        drawn = view.draw(run, stage / "figures", pdf=output.pdf)
        shown = {f"figures/{name}": caption for name, caption in drawn.items()}
        listed = directory.require_ours(workdir, stage, listed)
    text = view.markdown(summary, shown)
    (stage / "report.md").write_text(text, "utf-8")
    (stage / "summary.csv").write_text(view.csv_table(summary), "utf-8")
    if output.html:
        from jaxattn.views import html  # late: few want a page

        (stage / "report.html").write_text(html.page(text, stage), "utf-8")
    summary = summary if listed is None else summary | {"figures": listed}
    write.write_summary(stage, summary)
