"""Pictures from a run over a grid of rates: maps, and every contender at its best."""

import functools
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.colors import Colormap, LogNorm, Normalize, SymLogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from jaxattn.analysis import entries, grid, stats
from jaxattn.runs import Run
from jaxattn.views import figures
from jaxattn.views.figures import Band, Picture

_REGIMES = {False: "one sequence", True: "fresh sequences"}
_DIVERGED, _NEVER = "#222222", "#d8d8d8"


class Map(NamedTuple):
    """A quantity over the grid."""

    title: str
    values: np.ndarray  # (arm, P), NaN where a seed diverged, inf where it never came
    norm: Normalize
    colours: str
    ticks: tuple[float, ...]


def draw(run: Run, folder: Path, *, pdf: bool = False) -> dict[str, str]:
    """Draws every picture of a run over a grid.

    Args:
      run: with its summary.
      folder: to write to; made if it is not there.
      pdf: also as vector graphics.

    Returns:
      Name of each PNG file -> its caption.
    """
    pictures = {
        "tuned": Picture(
            _tuned,
            "Every algorithm at the rates that were best on the other seeds: pale dots"
            " are seeds, strong ones their mean with its 95 % interval.",
        ),
        "arrival": Picture(
            _arrival,
            "How many seeds have come to the threshold, each algorithm at the rates"
            " that were fastest on the other seeds: the earlier a line rises, the"
            " faster.",
        ),
    }
    for name, shown in maps(run).items():
        pictures[name] = Picture(
            functools.partial(_map_figure, shown=shown),
            f"{shown.title}, over the rates of routing (across) and how many times"
            " faster values move (up); the star is the best point of each map.",
        )
    return figures.save(pictures, run, folder, pdf=pdf)


def arrival_data(run: Run) -> dict[str, Band]:
    """Share of seeds that have reached the threshold, by algorithm and regime."""
    step = run["step"].values
    return {
        title: Band(*stats.arrived(step, times))
        for title, times in grid.tuned_times(run).items()
    }


def _arrival(run: Run) -> Figure:
    """Share of seeds at the threshold against step, for each regime."""
    data, step = arrival_data(run), run["step"].values
    names = list(dict.fromkeys(title.rpartition("/")[0] for title in data))
    regimes = list(dict.fromkeys(title.rpartition("/")[2] for title in data))
    figure, axes = figures.panels(len(regimes), 3.9, 2.6)
    for axis, regime in zip(axes, regimes, strict=True):
        for name, colour in zip(names, figures.colours(names), strict=True):
            if f"{name}/{regime}" in data:
                figures.stairs(axis, step, data[f"{name}/{regime}"], colour, name)
        axis.set_title(_REGIMES[regime == "fresh"])
        axis.set_xlabel("step")
    threshold = run.attrs["config"]["grid"]["threshold"]
    axes[0].set_ylabel(f"share of seeds at KL ≤ {threshold:g}")
    seeds = run.attrs["summary"]["seeds"]
    figures.legend(figure, axes[0], figures.WILSON.format(seeds))
    return figure


def maps(run: Run) -> dict[str, Map]:
    """The numbers of the maps, by the name of the picture."""
    steps = run.attrs["config"]["steps"]
    ends = entries.final_metrics(run)
    diverged = np.isnan(ends["train_loss"]).any(axis=-1)
    start = float(run["heldout_kl"].values[0, 0, :, 0].mean())
    kl = ends["heldout_kl"].mean(axis=-1)
    gap = ends["train_loss"] - ends["heldout_loss"]
    times = grid.steps_to_threshold(run)
    threshold = run.attrs["config"]["grid"]["threshold"]
    first = run["step"].values[1]
    return {
        "kl": Map(
            f"Held-out KL to Bayes at the end, nats (white: {start:.2f}, where all"
            " began)",
            kl,
            LogNorm(start / 4, start * 4, clip=True),
            "RdBu_r",
            _rounded(start / 4, start * 4),
        ),
        "steps": Map(
            f"Steps to a held-out KL of {threshold:g}, median over seeds",
            np.where(diverged, np.nan, np.median(times, axis=-1)),
            LogNorm(first, steps),
            "viridis",
            _rounded(first, steps),
        ),
        "gap": Map(
            "Train loss less held-out loss at the end, nats (red: it remembers)",
            gap.mean(axis=-1),
            SymLogNorm(0.1, vmin=-10, vmax=10, base=10, clip=True),
            "RdBu",
            (-10, -1, -0.1, 0, 0.1, 1, 10),
        ),
    }


def _rounded(low: float, high: float) -> tuple[float, ...]:
    """Round numbers between two, a few for each decade."""
    decades = 10.0 ** np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
    return tuple(v for v in np.outer(decades, (1, 2, 5)).ravel() if low <= v <= high)


def _map_figure(run: Run, shown: Map) -> Figure:
    config, points = run.attrs["config"], grid.points_of(run)
    arms, regimes = config["run_arms"], list(dict.fromkeys(points.fresh.tolist()))
    figure = Figure(
        figsize=(2.2 * len(arms) + 1.2, 2.35 * len(regimes) + 1.1),
        layout="constrained",
    )
    axes = figure.subplots(
        len(regimes), len(arms), squeeze=False, sharex=True, sharey=True
    )
    colours = matplotlib.colormaps[shown.colours].with_extremes(bad=_DIVERGED)
    image = None
    for line, fresh in zip(axes, regimes, strict=True):
        for row, (axis, arm) in enumerate(zip(line, arms, strict=True)):
            mine = points.fresh == fresh
            image = _draw_map(axis, points, mine, shown, row, colours)
            if axis in axes[0]:
                axis.set_title(f"{arm}\n{_ratio_moves(config['arms'][arm])}")
        line[0].set_ylabel(f"{_REGIMES[fresh]}\nratio")
    _mark(run, axes, regimes)
    for axis in axes[-1]:
        axis.set_xlabel("scale (rate of W_Q, W_K, W_O)")
    bar = figure.colorbar(image, ax=axes, shrink=0.85)
    bar.set_ticks(shown.ticks, labels=[f"{tick:g}" for tick in shown.ticks])
    bar.ax.minorticks_off()
    figure.suptitle(shown.title, fontsize=10)
    keys = [
        ("*", "best held-out KL", "#ffd400"),
        ("o", "best SGD (ratio 1)", "#ffffff"),
        ("s", "a seed diverged", _DIVERGED),
    ]
    if np.isinf(shown.values).any():
        keys.append(("s", "half of the seeds never got there", _NEVER))
    figure.legend(
        handles=[
            matplotlib.lines.Line2D(
                [],
                [],
                linestyle="",
                marker=marker,
                label=label,
                markerfacecolor=face,
                markeredgecolor="black",
                markersize=9 if marker == "*" else 6,
            )
            for marker, label, face in keys
        ],
        loc="outside lower center",
        ncols=len(keys),
    )
    return figure


def _ratio_moves(arm: dict) -> str:
    """What the ratio does to an arm."""
    if "value_rate" in arm:
        return "W_V: scale x ratio"
    return f"ridge: {arm['ridge']:g} / ratio" if "ridge" in arm else "no ratio"


def _draw_map(
    axis,
    points: grid.Points,
    mine: np.ndarray,
    shown: Map,
    row: int,
    colours: Colormap,
):
    scale, ratio = (np.unique(axis_[mine]) for axis_ in (points.scale, points.ratio))
    values = shown.values[row, mine].reshape(len(ratio), len(scale))
    never = np.isinf(values)
    image = axis.pcolormesh(
        np.arange(len(scale)),
        np.arange(len(ratio)),
        np.ma.masked_where(never | np.isnan(values), values),
        norm=shown.norm,
        cmap=colours,
        shading="nearest",
    )
    axis.pcolormesh(
        np.arange(len(scale)),
        np.arange(len(ratio)),
        np.ma.masked_where(~never, np.ones_like(values)),
        cmap=matplotlib.colors.ListedColormap([_NEVER]),
        shading="nearest",
    )
    axis.set_facecolor(_DIVERGED)
    axis.grid(False)
    axis.set_xticks(range(len(scale)), [f"{value:g}" for value in scale], fontsize=7)
    axis.set_yticks(range(len(ratio)), [f"{value:g}" for value in ratio], fontsize=7)
    axis.xaxis.set_minor_locator(NullLocator())
    return image


def _mark(run: Run, axes, regimes: list[bool]) -> None:
    """The best point of each arm, and of SGD on the map that it lies on."""
    points = grid.points_of(run)
    kl = entries.final_metrics(run)["heldout_kl"]
    scale, ratio = np.unique(points.scale), np.unique(points.ratio)
    names = {"one": False, "fresh": True}

    def mark(row: int, fresh: bool, mine: np.ndarray, marker: str, face: str) -> None:
        best = grid.tuned(kl[row], mine).best
        axes[regimes.index(fresh), row].plot(
            np.searchsorted(scale, points.scale[best]),
            np.searchsorted(ratio, points.ratio[best]),
            marker,
            markersize=12 if marker == "*" else 7,
            markerfacecolor=face,
            markeredgecolor="black",
        )

    for fresh in regimes:
        for row in range(axes.shape[1]):
            mark(row, fresh, np.flatnonzero(points.fresh == fresh), "*", "#ffd400")
    for contender in grid.contenders(run):
        if contender.name == grid.BASELINE:
            mark(
                contender.row, names[contender.regime], contender.points, "o", "#ffffff"
            )


def _tuned(run: Run) -> Figure:
    """Each contender on every seed at the rates that were best on the others."""
    curves = run["heldout_kl"].values
    kl = entries.final_metrics(run)["heldout_kl"]
    contenders = grid.contenders(run)
    regimes = list(dict.fromkeys(contender.regime for contender in contenders))
    names = list(dict.fromkeys(contender.name for contender in contenders))
    colours = dict(zip(names, figures.colours(names), strict=True))
    figure = Figure(figsize=(9, 3.1 * len(regimes) + 0.6), layout="constrained")
    axes = figure.subplots(len(regimes), 2, squeeze=False, width_ratios=(1.5, 1))
    step, seed = run["step"].values, np.arange(curves.shape[2])
    for (left, right), regime in zip(axes, regimes, strict=True):
        mine = [contender for contender in contenders if contender.regime == regime]
        for place, contender in enumerate(mine):
            colour = colours[contender.name]
            others = grid.tuned(kl[contender.row], contender.points).others
            median, low, high = _median_band(curves[contender.row, others, seed])
            left.plot(step, median, color=colour, label=contender.name)
            left.fill_between(step, low, high, color=colour, alpha=0.15, linewidth=0)
            values = kl[contender.row, others, seed]
            estimate = run.attrs["summary"]["arms"][contender.title]["heldout_kl"]
            figures.dots(right, place, colour, values, estimate)
        sequences = _REGIMES[regime == "fresh"]
        left.set_title(f"{sequences}: distance to Bayes, held out")
        left.set_ylabel("KL(Bayes ‖ model), nats")
        left.set_xlim(0, step[-1])
        left.set_yscale("log")
        left.yaxis.set_major_formatter("{x:g}")
        left.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        left.yaxis.set_minor_formatter("{x:g}")
        left.tick_params(axis="y", which="minor", length=3.5)
        right.set_title("at the end")
        right.set_yticks(range(len(mine)), [contender.name for contender in mine])
        right.set_ylim(len(mine) - 0.5, -0.5)
    axes[-1][0].set_xlabel("step")
    axes[-1][1].set_xlabel("KL, nats")
    figure.suptitle(
        "Tuned against tuned: each seed at the rates that were best on the others",
        fontsize=10,
    )
    figure.supxlabel(
        "left: median over seeds, shaded its 95 % interval (from 6 seeds on);"
        " right: pale each seed, strong the mean and its 95 % interval",
        fontsize=8,
    )
    return figure


def _median_band(curves: np.ndarray) -> figures.Band:
    """Median over seeds of each evaluation, with the sign test's interval (n, E)."""
    points = [stats.median(values) for values in curves.T]
    middle = np.array([np.nan if p.median is None else p.median for p in points])
    ends = [
        [np.nan if end is None else end for end in p.ci95 or (m, m)]
        for p, m in zip(points, middle, strict=True)
    ]
    return figures.Band(middle, *np.array(ends).T)
