"""Pictures from a run directory; nothing is drawn that does not lie in it."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxattn import report, stats
from jaxattn.runs import Run

# Okabe and Ito's colours, told apart by colour-blind readers and in print, and three
# of Tol's for runs of many arms.
_COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"),
    *("#882255", "#999933", "#777777"),
)
_STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "savefig.dpi": 160,
    "pdf.fonttype": 42,
}


class Band(NamedTuple):
    """A middle over seeds and its pointwise 95 % interval; what is behind a curve."""

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


def draw(run: Run, folder: Path, *, pdf: bool = False) -> list[str]:
    """Draws every picture of a run.

    Args:
      run: with its summary.
      folder: to write to; made if it is not there.
      pdf: also as vector graphics.

    Returns:
      Names of the PNG files.
    """
    functions = {"curves": _curves, "final": _final}
    if "attention" in run.metrics:
        functions["attention"] = _attention
    return save(functions, run, folder, pdf=pdf)


def save(
    functions: Mapping[str, Callable[[Run], Figure]],
    run: Run,
    folder: Path,
    *,
    pdf: bool,
) -> list[str]:
    """Draws pictures of a run in the style of the house.

    Args:
      functions: name -> what draws it.
      run: with its summary.
      folder: to write to; made if it is not there.
      pdf: also as vector graphics.

    Returns:
      Names of the PNG files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_STYLE):
        for name, function in functions.items():
            figure = function(run)
            figure.savefig(folder / f"{name}.png")
            if pdf:
                figure.savefig(folder / f"{name}.pdf")
    return [f"{name}.png" for name in functions]


def relative_attention(weight: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Attention relative to equal shares among the sources in sight.

    Args:
      weight: a (n, n).
      allowed: boolean mask (n, n).

    Returns:
      a_ij times the number of j that i may look at (n, n); NaN where it may not.
    """
    in_sight = allowed.sum(axis=1, keepdims=True)
    return np.where(allowed, weight * in_sight, np.nan)


def _curves(run: Run) -> Figure:
    """Train loss, and distance to Bayes, against step."""
    arms = run.config["config"]["run_arms"]
    seeds = run.config["config"]["seeds"]
    step = run.metrics["step"]
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axis, metric in ((left, "train_loss"), (right, "heldout_kl")):
        for arm, colour, curves in zip(
            arms, colours(arms), run.metrics[metric], strict=True
        ):
            mean, low, high = band(curves)
            axis.plot(step, mean, color=colour, label=arm)
            axis.fill_between(step, low, high, color=colour, alpha=0.2, linewidth=0)
        axis.set_xlabel("step")
        axis.set_xlim(0, step[-1])
        axis.margins(y=0.08)
    _floor(left, math.log(report.num_classes(run)), "chance")
    bayes = run.summary["floors"]["bayes_train_nll"]["mean"]
    _floor(left, bayes, "exact Bayes")
    left.set_title("Loss on the training sequence")
    left.set_ylabel("nats per position")
    right.set_title("Distance to Bayes on a held-out sequence")
    right.set_ylabel("KL(Bayes ‖ model), nats per position")
    spread(right, "y", run.metrics["heldout_kl"])
    handles, labels = left.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(len(labels), 6),
        title="mean over seeds, shaded: 95 % interval" if seeds > 1 else "1 seed",
    )
    return figure


def spread(axes: Axes, which: str, values: np.ndarray) -> None:
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


def _floor(axis, height: float, name: str) -> None:
    style = {"chance": ":", "exact Bayes": "--"}[name]
    axis.axhline(height, color="0.35", linestyle=style, linewidth=1.2, label=name)


def _final(run: Run) -> Figure:
    """Final metrics by arm: every seed, the mean and its interval."""
    panels = {
        "train_loss": "train loss\n(nats)",
        "heldout_loss": "held-out loss\n(nats)",
        "heldout_kl": "KL to Bayes,\nheld-out (nats)",
        "accuracy": "accuracy,\nheld-out",
        "predictive_entropy": "predictive entropy,\nheld-out (nats)",
    }
    floors = {
        "train_loss": run.summary["floors"]["bayes_train_nll"]["mean"],
        "heldout_loss": run.summary["floors"]["bayes_heldout_nll"]["mean"],
    }
    arms = run.config["config"]["run_arms"]
    height = 1.3 + 0.32 * len(arms)
    figure = Figure(figsize=(9.5, height), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, (metric, title) in zip(axes, panels.items(), strict=True):
        for row, (arm, colour) in enumerate(zip(arms, colours(arms), strict=True)):
            values = run.metrics[metric][row, :, -1]
            dots(axis, row, colour, values, run.summary["arms"][arm][metric])
        if metric in floors:
            axis.axvline(floors[metric], color="0.35", linestyle="--", linewidth=1.2)
        axis.set_title(title, fontsize=9)
        axis.margins(x=0.12)
        axis.locator_params(axis="x", nbins=3)
        if metric == "heldout_kl":
            spread(axis, "x", run.metrics[metric][..., -1])
    axes[0].set_yticks(range(len(arms)), arms)
    axes[0].set_ylim(len(arms) - 0.5, -0.5)
    figure.supxlabel(
        "pale: each seed; strong: mean and 95 % interval; dashed: exact Bayes",
        fontsize=9,
    )
    return figure


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


def _attention(run: Run) -> Figure:
    """Attention of a seed on its held-out sequence, at the first and last snapshot."""
    named, kept = run.axes["coordinates"], run.metrics["attention"][:, 0]
    steps, last = named["snapshot_step"], run.metrics["step"][-1]
    maps = {}
    for step, weights in ((steps[0], kept[:, 0]), (steps[-1], kept[:, -1])):
        for arm, weight in zip(named["arm"], weights, strict=True):
            title = f"after {arm}" if step == last else f"{arm}, step {step}"
            # All arms begin with the same.
            maps["before training" if step == 0 else title] = weight
    columns = min(len(maps), 5)
    rows = -(-len(maps) // columns)
    figure = Figure(
        figsize=(2.1 * columns + 0.8, 2.3 * rows + 0.5), layout="constrained"
    )
    axes = figure.subplots(rows, columns, squeeze=False)
    image = None
    for axis, (title, weight) in zip(axes.flat, maps.items(), strict=False):
        relative = relative_attention(weight, run.metrics["attention_allowed"])
        image = axis.imshow(
            relative,
            norm=matplotlib.colors.LogNorm(1 / 16, 16, clip=True),
            cmap="RdBu_r",
            interpolation="nearest",
        )
        axis.set_title(title)
        axis.grid(False)
        axis.set_xlabel("source position j")
    for axis in axes.flat[len(maps) :]:
        axis.set_axis_off()
    for axis in axes[:, 0]:
        axis.set_ylabel("query position i")
    bar = figure.colorbar(image, ax=axes, shrink=0.8)
    bar.set_label("weight / equal share")
    bar.set_ticks([1 / 16, 1 / 4, 1, 4, 16], labels=["1/16", "1/4", "1", "4", "16"])
    bar.ax.minorticks_off()
    shown = len(run.metrics["attention_allowed"])
    figure.suptitle(
        f"Attention on the first {shown} held-out positions,"
        f" seed {named['snapshot_seed'][0]}",
        fontsize=10,
    )
    return figure


def colours(arms: Sequence[str]) -> list[str]:
    """A colour for each arm."""
    return [_COLOURS[index % len(_COLOURS)] for index in range(len(arms))]
