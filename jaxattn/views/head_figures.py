"""Pictures of a run without a grid, drawn from its directory alone.

Each `..._data` function gives the numbers of a picture.
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxattn.analysis import entries, observations, stats
from jaxattn.runs import Run
from jaxattn.views import figures, head_report, snapshot_figures
from jaxattn.views.figures import Band, Picture


class Progress(NamedTuple):
    """The share of its total change that an arm still has to make, over seeds."""

    # By the names of `observations.progress_curves`.
    left: dict[str, Band]  # 1 at the start, 0 at the end
    half: dict[str, float | None]  # median steps to 50 % of the total change


def draw(run: Run, folder: Path, *, pdf: bool = False) -> dict[str, str]:
    """Draws every picture of a run.

    Args:
      run: with its summary.
      folder: to write to; made if it is not there.
      pdf: also as vector graphics, but the animation.

    Returns:
      Name of each file -> its caption.
    """
    pictures = {
        "curves": Picture(
            _curves,
            "Loss, distance to Bayes, accuracy and predictive entropy while training:"
            " a line is the mean over seeds, its shade the 95 % interval. Exact Bayes"
            " is dashed; only memorising or luck gets a loss below it.",
        ),
        "final": Picture(
            _final,
            "Where each arm ended: pale dots are seeds, strong ones their mean with its"
            " 95 % interval.",
        ),
    }
    if len(run.attrs["config"]["run_arms"]) > 1 and run.attrs["summary"]["comparisons"]:
        pictures["arrival"] = Picture(
            _arrival,
            "The share of seeds that have reached the final value of the baseline on"
            " the same seed: the earlier a line rises, the faster the arm; a line that"
            " stays below 1 has seeds that never did.",
        )
    if "attention_drift" in run:
        pictures["frame"] = Picture(
            frame,
            "The share of their total change that attention (the frame) and what is"
            " learned (precision) still have to make: the lower line is ahead; dots"
            " mark 50 %, median over seeds. The root of precision is, like the drift of"
            " attention, on the scale of a distance.",
        )
        pictures["diagnostics"] = Picture(
            _diagnostics,
            "How attention and values changed: entropy of attention (1: equal shares),"
            " how unequally sources are used, how far queries that use a source agree,"
            " mean |cos| between keys (its start is the null: random projections),"
            " cosine of queries and the keys they attend to, and the number of"
            " directions that values use (participation ratio).",
        )
        pictures["gate"] = Picture(
            _gate,
            "What drives routing: the score gradient is the gate (how much the"
            " attention lets through) times the spread (how differently the sources"
            " would serve), all relative to the start; the value gradient has no gate.",
        )
    if run.attrs["facts"]["measures"]:
        pictures["measures"] = Picture(measures, MEASURES)
    drawn = figures.save(pictures, run, folder, pdf=pdf)
    if "target" in run:
        drawn |= snapshot_figures.draw(run, folder, pdf=pdf)
    return drawn


# --- loss and the like


def _curves(run: Run) -> Figure:
    """Train loss, distance to Bayes, accuracy and entropy against step."""
    on, where = {
        "train": ("train_", "on the training sequence"),
        "heldout": ("", "on a held-out sequence"),
    }[entries.task_of(run)["shown"]]
    classes = entries.num_classes(run)
    bayes = entries.bayes_floors(run)
    chance = math.log(classes)
    which = "step's own" if run.attrs["config"]["fresh"] else "training"
    shown = {
        "train_loss": (f"Loss on the {which} sequence", "nats", chance, "train_loss"),
        f"{on or 'heldout_'}kl": (f"Distance to Bayes {where}", "nats", None, None),
        f"{on}accuracy": (f"Accuracy {where}", "share", 1 / classes, "accuracy"),
        f"{on}predictive_entropy": (
            f"Predictive entropy {where}",
            "nats",
            chance,
            "predictive_entropy",
        ),
    }
    figure, axes = figures.panels(4, 3.9, 2.5, most=2, share=False)
    for axis, (metric, (title, unit, level, floor)) in zip(
        axes, shown.items(), strict=True
    ):
        lines(axis, run, metric)
        figures.floor(axis, level, "chance")
        figures.floor(axis, bayes.get(floor), "exact Bayes")
        axis.set_title(title)
        axis.set_ylabel({"nats": "nats per position", "share": "share right"}[unit])
        axis.set_xlabel("step")
    axes[1].set_ylabel("KL(Bayes ‖ model), nats")
    figures.log_if_wide(axes[1], "y", run[list(shown)[1]].values)
    figures.legend(figure, axes[0], of_seeds(run))
    return figure


def _diagnostics(run: Run) -> Figure:
    """The diagnostics of `trajectory`, against step."""
    shown = {
        "relative_entropy": ("Entropy of attention", "of that of equal shares"),
        "usage_gini": ("Inequality of usage", "Gini coefficient"),
        "specialisation": ("Agreement at a source", "resultant length"),
        "key_orthogonality": ("Keys", "mean |cos| (0: orthogonal)"),
        "query_key_alignment": ("Queries and their keys", "mean cos"),
        "value_dimension": ("Values", "participation ratio"),
    }
    figure, axes = figures.panels(6, 2.75, 2.2, most=3, share=False)
    for axis, (metric, (title, unit)) in zip(axes, shown.items(), strict=True):
        lines(axis, run, metric)
        axis.set_title(title)
        axis.set_ylabel(unit)
        axis.set_xlabel("step")
    figures.legend(figure, axes[0], of_seeds(run))
    return figure


def lines(axis: Axes, run: Run, metric: str) -> None:
    """A curve with its band for each arm."""
    arms, step = run.attrs["config"]["run_arms"], run["step"].values
    for arm, colour, curves in zip(
        arms, figures.colours(arms), run[metric].values, strict=True
    ):
        figures.shade(axis, step, figures.band(curves), color=colour, label=arm)
    axis.set_xlim(0, step[-1])
    axis.margins(y=0.08)


def of_seeds(run: Run) -> str:
    """What the title of a legend says of lines and shades."""
    seeds = run.attrs["config"]["seeds"]
    return f"mean of {seeds} seeds, shaded: 95 % interval" if seeds > 1 else "1 seed"


def _final(run: Run) -> Figure:
    """Final metrics by arm: every seed, the mean and its interval."""
    panels = {
        "heldout": {
            "train_loss": "train loss\n(nats)",
            "heldout_loss": "held-out loss\n(nats)",
            "heldout_kl": "KL to Bayes,\nheld-out (nats)",
            "accuracy": "accuracy,\nheld-out",
            "predictive_entropy": "predictive entropy,\nheld-out (nats)",
        },
        "train": {
            "train_loss": "train loss\n(nats)",
            "train_accuracy": "accuracy",
            "train_predictive_entropy": "predictive entropy\n(nats)",
            "train_attention_entropy": "entropy of attention\n(nats)",
        },
    }[entries.task_of(run)["shown"]]
    floors = entries.bayes_floors(run)
    arms = run.attrs["config"]["run_arms"]
    height = 1.3 + 0.32 * len(arms)
    figure = Figure(figsize=(9.5, height), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, (metric, title) in zip(axes, panels.items(), strict=True):
        for row, (arm, colour) in enumerate(
            zip(arms, figures.colours(arms), strict=True)
        ):
            values = run[metric].values[row, :, -1]
            figures.dots(
                axis, row, colour, values, run.attrs["summary"]["arms"][arm][metric]
            )
        if floors.get(metric) is not None:
            axis.axvline(floors[metric], color="0.35", linestyle="--", linewidth=1.2)
        axis.set_title(title, fontsize=9)
        axis.margins(x=0.12)
        axis.locator_params(axis="x", nbins=3)
        if metric == "heldout_kl":
            figures.log_if_wide(axis, "x", run[metric].values[..., -1])
    axes[0].set_yticks(range(len(arms)), arms)
    axes[0].set_ylim(len(arms) - 0.5, -0.5)
    figure.supxlabel(
        "pale: each seed; strong: mean and 95 % interval; dashed: exact Bayes",
        fontsize=9,
    )
    return figure


# --- the user's measures

MEASURES = (
    "The measures of this run while training: a line is the mean over seeds, its shade"
    " the 95 % interval; dashed is the null of each."
)


def measures(run: Run) -> Figure:
    """Each measure against step, an arm in each colour, its null dashed."""
    named = run.attrs["facts"]["measures"]
    arms, step = run.attrs["config"]["run_arms"], run["step"].values
    figure, axes = figures.panels(len(named), 3.4, 2.5, most=3, share=False)
    for axis, (name, own) in zip(axes, named.items(), strict=True):
        lines(axis, run, name)
        if own["null"]:
            nulls = run[f"{name}_null"].values
            for colour, curves in zip(figures.colours(arms), nulls, strict=True):
                axis.plot(step, figures.band(curves).middle, "--", color=colour)
        axis.set_title(own["about"])
        axis.set_ylabel(own["unit"] or name)
        axis.set_xlabel("step")
    figures.legend(figure, axes[0], f"{of_seeds(run)}; dashed: null")
    return figure


# --- how fast


def arrival_data(run: Run, metric: str) -> dict[str, Band] | None:
    """Share of seeds that have reached the final value of the baseline, by arm.

    Args:
      run: any.
      metric: whose curve must come down to that.

    Returns:
      arm -> Band (E,); None if the baseline ended nowhere lower than it began.
    """
    config = run.attrs["config"]
    base = config["run_arms"].index(config["baseline"])
    found = {}
    for row, arm in enumerate(config["run_arms"]):
        times = entries.times_to_baseline(run, metric, row, base)
        if np.isnan(times).all():
            return None
        found[arm] = Band(*stats.arrived(run["step"].values, times))
    return found


def _arrival(run: Run) -> Figure:
    """Share of seeds that have reached the final value of the baseline."""
    arms, base = (run.attrs["config"][name] for name in ("run_arms", "baseline"))
    named = {"train_loss": "by train loss", "heldout_kl": "by held-out KL to Bayes"}
    data = {title: arrival_data(run, metric) for metric, title in named.items()}
    data = {title: found for title, found in data.items() if found is not None}
    figure, axes = figures.panels(max(len(data), 1), 3.9, 2.6)
    for axis, (title, found) in zip(axes, data.items(), strict=False):
        for arm, colour in zip(arms, figures.colours(arms), strict=True):
            figures.stairs(axis, run["step"].values, found[arm], colour, arm)
        axis.set_title(f"where {base} ended, {title}")
        axis.set_xlabel("step")
    axes[0].set_ylabel("share of seeds")
    seeds = run.attrs["config"]["seeds"]
    figures.legend(figure, axes[0], figures.WILSON.format(seeds))
    return figure


# --- two time scales


def frame_data(run: Run) -> dict[str, Progress]:
    """The share of change left to each arm, and when 50 % was made."""
    found = {}
    for row, arm in enumerate(run.attrs["config"]["run_arms"]):
        left = {}
        for name, curves in observations.progress_curves(run, row).items():
            change = curves[:, :1] - curves[:, -1:]
            fell = np.isfinite(curves).all(axis=1) & (change[:, 0] > 0)
            left[name] = figures.band((curves[fell] - curves[fell, -1:]) / change[fell])
        half = observations.time_scales(run, row, 0.5)._asdict()
        found[arm] = Progress(
            left, {n: stats.median(t).median for n, t in half.items()}
        )
    return found


def frame(run: Run) -> Figure:
    """Frame against precision, an arm in each panel."""
    data, step = frame_data(run), run["step"].values
    figure, axes = figures.panels(len(data), 1.75, 1.8)
    styles = {
        "frame": ("frame: attention", "C0", "-"),
        "precision": (head_report.learned_name(run), "C1", "-"),
        "root": ("its square root", "C1", "--"),
    }
    for axis, (arm, progress) in zip(axes, data.items(), strict=True):
        _panel(axis, arm, step, progress.left, styles)
        for name, (_, colour, _) in styles.items():
            face = "white" if name == "root" else colour
            marker = {"marker": "o", "markersize": 5, "markerfacecolor": face}
            if progress.half[name] is not None:
                axis.plot(progress.half[name], 0.5, color=colour, **marker)
        if np.isnan(progress.left["frame"].middle).all():
            lost = (
                run.attrs["summary"]["arms"][arm]["diverged"]
                == run.attrs["summary"]["seeds"]
            )
            text = "diverged" if lost else "attention does not move"
            axis.text(0.97, 0.93, text, **_corner(axis))
    axes[0].set_ylim(-0.12, 1.12)
    figures.name_axes(axes, "step", "share of change left")
    figures.legend(figure, axes[0], f"{of_seeds(run)}; of those that changed")
    return figure


def _panel(axis: Axes, arm: str, step: np.ndarray, bands: dict, styles: dict) -> None:
    """Some curves of an arm; styles are (label, colour, line) by the curve's name."""
    for name, (label, colour, line) in styles.items():
        figures.shade(
            axis, step, bands[name], color=colour, linestyle=line, label=label
        )
    axis.set_title(arm)
    axis.set_xlim(0, step[-1])


def gate_data(run: Run) -> dict[str, dict[str, Band]]:
    """Score gradient, its two factors and value gradient, relative to the start.

    Geometric means over seeds of which none of them was ever 0.
    """
    names = observations.DRIVES
    found = {}
    for row, arm in enumerate(run.attrs["config"]["run_arms"]):
        curves = np.array([run[name].values[row] for name in names], np.float64)
        known = (curves > 0).all(axis=(0, 2))  # the same seeds of each
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(curves[:, known]) - np.log(curves[:, known, :1])
        bands = (figures.band(of_one) for of_one in logs)
        found[arm] = {
            n: Band(*map(np.exp, b)) for n, b in zip(names, bands, strict=True)
        }
    return found


def _gate(run: Run) -> Figure:
    """What the score gradient is made of, an arm in each panel."""
    data, step = gate_data(run), run["step"].values
    figure, axes = figures.panels(len(data), 1.75, 1.8)
    styles = {
        "score_gradient": ("score gradient = gate x spread", "C6", "-"),
        "gate": ("gate", "C0", "-"),
        "advantage_spread": ("spread of the advantage", "C4", "-"),
        "value_gradient": ("value gradient", "C1", "--"),
    }
    for axis, (arm, bands) in zip(axes, data.items(), strict=True):
        _panel(axis, arm, step, bands, styles)
    middles = np.concatenate(
        [band.middle for bands in data.values() for band in bands.values()]
    )
    figures.log_if_wide(axes[0], "y", middles)
    figures.name_axes(axes, "step", "of that at the start")
    figures.legend(figure, axes[0], f"geometric {of_seeds(run)}")
    return figure


def _corner(axis: Axes) -> dict:
    return {"transform": axis.transAxes, "ha": "right", "va": "top", "fontsize": 8}
