"""What every picture shares: style, colours, bands, scales, small multiples."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxattn.analysis import stats
from jaxattn.runs import Run

STYLE = Path(__file__).with_name("paper.mplstyle")
NARROWEST = 5.2  # inches of a figure, for its title and legend
# Of the legend of `stairs`.
WILSON = "{} seeds; shaded, while some but not all have come: 95 % interval (Wilson)"


class Band(NamedTuple):
    """A middle over seeds and its pointwise 95 % interval, shaded around a curve."""

    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray


def band(curves: np.ndarray) -> Band:
    """Mean over seeds of each point, with Student's interval.

    Args:
      curves: (seed, E); a seed with a non-finite value anywhere is left out.

    Returns:
      Band of (E,) arrays; no width with one seed, all NaN without any.
    """
    kept = curves[np.isfinite(curves).all(axis=1)]
    points = [stats.estimate(values) for values in kept.T]
    mean = np.array([np.nan if p.mean is None else p.mean for p in points])
    ends = [p.ci95 or (m, m) for p, m in zip(points, mean, strict=True)]
    return Band(mean, *np.array(ends).T)


class Picture(NamedTuple):
    """What draws a picture of a run, and how to read it."""

    draw: Callable[[Run], Figure]
    caption: str  # a sentence


def save(
    pictures: Mapping[str, Picture], run: Run, folder: Path, *, pdf: bool
) -> dict[str, str]:
    """Draws pictures of a run in the style of the house.

    Args:
      pictures: by name.
      run: with its summary.
      folder: to write to; made if it is not there.
      pdf: also as vector graphics.

    Returns:
      Name of each PNG file -> its caption.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(fname=STYLE):
        for name, picture in pictures.items():
            figure = picture.draw(run)
            figure.savefig(folder / f"{name}.png")
            if pdf:
                figure.savefig(folder / f"{name}.pdf")
    return {f"{name}.png": picture.caption for name, picture in pictures.items()}


def relative_attention(weight: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Attention relative to equal shares among the unmasked sources.

    Args:
      weight: a (n, n).
      allowed: boolean mask (n, n).

    Returns:
      a_ij times the number of j that i may look at (n, n); NaN where it may not.
    """
    count = allowed.sum(axis=1, keepdims=True)
    return np.where(allowed, weight * count, np.nan)


def log_if_wide(axes: Axes, which: str, values: np.ndarray) -> None:
    """A log scale where an arm that over-fits would flatten all the others."""
    values = values[np.isfinite(values)]
    if len(values) == 0 or values.min() <= 0 or values.max() < 5 * values.min():
        return
    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    axis.set_major_formatter("{x:g}")
    # Below two decades the powers of ten alone are too few labels.
    few = values.max() < 100 * values.min()
    axis.set_minor_locator(matplotlib.ticker.LogLocator(subs=(2, 5) if few else ()))
    axis.set_minor_formatter("{x:g}")
    axes.tick_params(axis=which, which="minor", length=3.5)  # as long as the major


def floor(axes: Axes, height: float | None, name: str) -> None:
    """A line at what no model can beat, or what takes no learning."""
    if height is not None:
        style = {"chance": ":", "exact Bayes": "--"}[name]
        axes.axhline(height, color="0.35", linestyle=style, linewidth=1.2, label=name)


def shade(axes: Axes, x: np.ndarray, y: Band, **style) -> None:
    """A curve with its interval."""
    (line,) = axes.plot(x, y.middle, **style)
    axes.fill_between(x, y.low, y.high, color=line.get_color(), alpha=0.2, linewidth=0)


def stairs(axes: Axes, steps: np.ndarray, y: Band, colour: str, label: str) -> None:
    """A share that rises in steps, with its interval."""
    axes.plot(steps, y.middle, color=colour, label=label, drawstyle="steps-post")
    # Where none or all have come intervals would only cover each other.
    between = (y.middle > 0) & (y.middle < 1)
    axes.fill_between(
        steps,
        y.low,
        y.high,
        between,
        color=colour,
        alpha=0.15,
        linewidth=0,
        step="post",
    )
    axes.set_xlim(0, steps[-1])
    axes.set_ylim(-0.03, 1.03)


def legend(figure: Figure, axes: Axes, title: str) -> None:
    """What the lines of an axes are, below all of a figure."""
    handles, labels = axes.get_legend_handles_labels()
    widest = 0.07 * max(map(len, labels), default=0) + 0.6  # inches, about
    fit = max(int(figure.get_figwidth() / widest), 1)
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(max(len(labels), 1), fit),
        title=title,
    )


def panels(
    count: int, width: float, height: float, *, most: int = 5, share: bool = True
) -> tuple[Figure, list[Axes]]:
    """A figure of small multiples.

    Args:
      count: how many, at least 1.
      width: of each, inches.
      height: of each, inches.
      most: in a row.
      share: whether they have the same scales, and are named at the rim only.

    Returns:
      The figure, and its axes in the order of reading.
    """
    rows = -(-count // most)
    columns = -(-count // rows)
    size = max(width * columns + 0.7, NARROWEST), height * rows + 0.7
    figure = Figure(figsize=size, layout="constrained")
    return figure, divided(figure, count, columns, share=share)


def divided(figure, count: int, columns: int, *, share: bool = True) -> list[Axes]:
    """So many axes in a figure, or a part of one, in the order of reading."""
    rows = -(-count // columns)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=share)
    for place, axis in enumerate(axes.flat):
        if place >= count:
            axis.set_axis_off()
        elif share and place + columns >= count:  # the lowest of its column
            axis.tick_params(labelbottom=True)
    return list(axes.flat[:count])


def name_axes(axes: Sequence[Axes], x: str, y: str) -> None:
    """Names the axes of small multiples where no other lies below or to the left."""
    places = [axis.get_subplotspec() for axis in axes]
    spots = {(place.rowspan.start, place.colspan.start) for place in places}
    for axis, place in zip(axes, places, strict=True):
        below = place.rowspan.stop, place.colspan.start
        if below not in spots:
            axis.set_xlabel(x)
        if place.is_first_col():
            axis.set_ylabel(y)


def dots(
    axis: Axes, row: int, colour: str, values: np.ndarray, estimate: dict[str, Any]
) -> None:
    """One arm's row: every seed pale, the mean and its interval strong."""
    style = {"alpha": 0.3, "markersize": 4, "markeredgewidth": 0}
    axis.plot(values, np.full(len(values), row), "o", color=colour, **style)
    mean = estimate["mean"]
    if mean is not None:
        ends = estimate["ci95"] or (mean, mean)
        axis.plot(ends, [row, row], color=colour, linewidth=2.5)
        axis.plot(mean, row, "o", color=colour, markersize=6)


def colours(arms: Sequence[str]) -> list[str]:
    """A colour for each arm."""
    names = _cycle()
    return [names[index % len(names)] for index in range(len(arms))]


@functools.cache
def _cycle() -> list[str]:
    """The colours of the style, read once."""
    style = matplotlib.rc_params_from_file(STYLE, use_default_template=False)
    return style["axes.prop_cycle"].by_key()["color"]
