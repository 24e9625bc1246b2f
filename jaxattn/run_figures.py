"""Pictures of a run without a grid, drawn from its directory alone.

Each `..._data` function gives the numbers behind a picture.
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxattn import figures, observations, report, snapshot_figures, stats
from jaxattn.figures import Band, Picture
from jaxattn.runs import Run


class Way(NamedTuple):
    """How much of its way an arm still has before it, over seeds that came along."""

    frame: Band  # attention's drift to where it ends, of that at the start
    precision: Band
    frame_half: float | None  # median steps to half of the way
    precision_half: float | None


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
            " a line is the mean over seeds, its shade the 95 % interval; no model can"
            " pass the dashed line but by remembering or by luck.",
        ),
        "final": Picture(
            _final,
            "Where each arm ended: pale dots are seeds, strong ones their mean with its"
            " 95 % interval.",
        ),
    }
    if len(run.config["config"]["run_arms"]) > 1 and run.summary["comparisons"]:
        pictures["arrival"] = Picture(
            _arrival,
            "How many seeds have come to where the baseline ended on the same seed:"
            " the earlier a line rises, the faster the arm; one that stays below 1 left"
            " seeds behind.",
        )
    if "attention_drift" in run.metrics:
        pictures["frame"] = Picture(
            _frame,
            "How much of its way attention (the frame) and the distance to Bayes"
            " (precision) still have before them: the lower line is ahead; dots mark"
            " half of the way, median over seeds.",
        )
        pictures["diagnostics"] = Picture(
            _diagnostics,
            "How attention and values changed: entropy of attention (1: equal shares),"
            " how unequally sources are used, how far queries that use a source agree,"
            " mean |cos| between keys (its start is the null: random projections), how"
            " far queries point to the keys they look at, and over how many directions"
            " values spread.",
        )
        pictures["gate"] = Picture(
            _gate,
            "What drives routing: the score gradient is the gate (how much the"
            " attention lets through) times the spread (how differently the sources"
            " would serve), all relative to the start; the value gradient has no gate.",
        )
    drawn = figures.save(pictures, run, folder, pdf=pdf)
    if "attention" in run.metrics:
        drawn |= figures.save(snapshot_figures.PICTURES, run, folder, pdf=pdf)
        drawn |= snapshot_figures.animate(run, folder)
    return drawn


# --- loss and the like


def _curves(run: Run) -> Figure:
    """Train loss, distance to Bayes, accuracy and entropy against step."""
    on, where = {
        "train": ("train_", "on the training sequence"),
        "heldout": ("", "on a held-out sequence"),
    }[report.task_of(run).shown]
    classes = report.num_classes(run)
    bayes = report.bayes_floors(run)
    chance = math.log(classes)
    which = "step's own" if run.config["config"]["fresh"] else "training"
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
        _lines(axis, run, metric)
        figures.floor(axis, level, "chance")
        figures.floor(axis, bayes.get(floor), "exact Bayes")
        axis.set_title(title)
        axis.set_ylabel({"nats": "nats per position", "share": "share right"}[unit])
        axis.set_xlabel("step")
    axes[1].set_ylabel("KL(Bayes ‖ model), nats")
    figures.spread(axes[1], "y", run.metrics[next(iter(list(shown)[1:]))])
    figures.legend(figure, axes[0], _of_seeds(run))
    return figure


def _diagnostics(run: Run) -> Figure:
    """What `trajectory` saw, against step."""
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
        _lines(axis, run, metric)
        axis.set_title(title)
        axis.set_ylabel(unit)
        axis.set_xlabel("step")
    figures.legend(figure, axes[0], _of_seeds(run))
    return figure


def _lines(axis: Axes, run: Run, metric: str) -> None:
    """A curve with its band for each arm."""
    arms, step = run.config["config"]["run_arms"], run.metrics["step"]
    for arm, colour, curves in zip(
        arms, figures.colours(arms), run.metrics[metric], strict=True
    ):
        figures.shade(axis, step, figures.band(curves), color=colour, label=arm)
    axis.set_xlim(0, step[-1])
    axis.margins(y=0.08)


def _of_seeds(run: Run) -> str:
    """What the title of a legend says of lines and shades."""
    seeds = run.config["config"]["seeds"]
    return f"mean of {seeds} seeds, shaded: 95 % interval" if seeds > 1 else "1 seed"


def _final(run: Run) -> Figure:
    """Final metrics by arm: every seed, the mean and its interval."""
    panels = {
        "train_loss": "train loss\n(nats)",
        "heldout_loss": "held-out loss\n(nats)",
        "heldout_kl": "KL to Bayes,\nheld-out (nats)",
        "accuracy": "accuracy,\nheld-out",
        "predictive_entropy": "predictive entropy,\nheld-out (nats)",
    }
    floors = report.bayes_floors(run)
    arms = run.config["config"]["run_arms"]
    height = 1.3 + 0.32 * len(arms)
    figure = Figure(figsize=(9.5, height), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, (metric, title) in zip(axes, panels.items(), strict=True):
        for row, (arm, colour) in enumerate(
            zip(arms, figures.colours(arms), strict=True)
        ):
            values = run.metrics[metric][row, :, -1]
            figures.dots(axis, row, colour, values, run.summary["arms"][arm][metric])
        if floors.get(metric) is not None:
            axis.axvline(floors[metric], color="0.35", linestyle="--", linewidth=1.2)
        axis.set_title(title, fontsize=9)
        axis.margins(x=0.12)
        axis.locator_params(axis="x", nbins=3)
        if metric == "heldout_kl":
            figures.spread(axis, "x", run.metrics[metric][..., -1])
    axes[0].set_yticks(range(len(arms)), arms)
    axes[0].set_ylim(len(arms) - 0.5, -0.5)
    figure.supxlabel(
        "pale: each seed; strong: mean and 95 % interval; dashed: exact Bayes",
        fontsize=9,
    )
    return figure


# --- how fast


def arrival_data(run: Run, metric: str) -> dict[str, Band] | None:
    """Share of seeds that have come to where the baseline ended, by arm.

    Args:
      run: any.
      metric: whose curve must come down to that.

    Returns:
      arm -> Band (E,); None if the baseline ended nowhere lower than it began.
    """
    config = run.config["config"]
    base = config["run_arms"].index(config["baseline"])
    found = {}
    for row, arm in enumerate(config["run_arms"]):
        times = report.times_to_baseline(run, metric, row, base)
        if np.isnan(times).all():
            return None
        found[arm] = Band(*stats.arrived(run.metrics["step"], times))
    return found


def _arrival(run: Run) -> Figure:
    """Share of seeds that are where the baseline ended, against step."""
    arms, base = (run.config["config"][name] for name in ("run_arms", "baseline"))
    named = {"train_loss": "by train loss", "heldout_kl": "by held-out KL to Bayes"}
    data = {title: arrival_data(run, metric) for metric, title in named.items()}
    data = {title: found for title, found in data.items() if found is not None}
    figure, axes = figures.panels(max(len(data), 1), 3.9, 2.6)
    for axis, (title, found) in zip(axes, data.items(), strict=False):
        for arm, colour in zip(arms, figures.colours(arms), strict=True):
            figures.stairs(axis, run.metrics["step"], found[arm], colour, arm)
        axis.set_title(f"where {base} ended, {title}")
        axis.set_xlabel("step")
    axes[0].set_ylabel("share of seeds")
    seeds = run.config["config"]["seeds"]
    figures.legend(figure, axes[0], figures.WILSON.format(seeds))
    return figure


# --- two time scales


def frame_data(run: Run) -> dict[str, Way]:
    """What each arm has still before it, and when it had half of it behind it."""
    found = {}
    for row, arm in enumerate(run.config["config"]["run_arms"]):
        bands = []
        for name in ("attention_drift", report.task_of(run).learned):
            curves = np.asarray(run.metrics[name][row], np.float64)
            way = curves[:, :1] - curves[:, -1:]
            came = np.isfinite(curves).all(axis=1) & (way[:, 0] > 0)
            left = (curves[came] - curves[came, -1:]) / way[came]
            bands.append(figures.band(left))
        half = observations.time_scales(run, row, 0.5)
        found[arm] = Way(*bands, *(stats.median(times).median for times in half))
    return found


def _frame(run: Run) -> Figure:
    """Frame against precision, an arm in each panel."""
    data, step = frame_data(run), run.metrics["step"]
    figure, axes = figures.panels(len(data), 1.75, 1.8)
    names = {"frame": "frame: attention", "precision": report.learned_name(run)}
    for axis, (arm, way) in zip(axes, data.items(), strict=True):
        for number, (name, label) in enumerate(names.items()):
            band, half = getattr(way, name), getattr(way, f"{name}_half")
            figures.shade(axis, step, band, color=f"C{number}", label=label)
            if half is not None:
                style = {"markersize": 6, "markeredgecolor": "white"}
                axis.plot(half, 0.5, "o", color=f"C{number}", **style)
        if np.isnan(way.frame.middle).all():
            axis.text(0.97, 0.93, "attention does not move", **_corner(axis))
        axis.set_title(arm)
        axis.set_xlim(0, step[-1])
    axes[0].set_ylim(-0.12, 1.12)
    figures.name_axes(axes, "step", "share of the way left")
    figures.legend(figure, axes[0], _of_seeds(run))
    return figure


def gate_data(run: Run) -> dict[str, dict[str, Band]]:
    """Score gradient, its two factors and value gradient, relative to the start."""
    names = ("score_gradient", "gate", "advantage_spread", "value_gradient")
    found = {}
    for row, arm in enumerate(run.config["config"]["run_arms"]):
        found[arm] = {}
        for name in names:
            curves = np.asarray(run.metrics[name][row], np.float64)
            starts = curves[:, :1] > 0
            relative = np.divide(
                curves,
                curves[:, :1],
                out=np.full_like(curves, np.nan),
                where=starts,
            )
            with np.errstate(divide="ignore", invalid="ignore"):
                band = figures.band(np.log(relative))  # ratios: a geometric mean
            found[arm][name] = Band(*map(np.exp, band))
    return found


def _gate(run: Run) -> Figure:
    """What the score gradient is made of, an arm in each panel."""
    data, step = gate_data(run), run.metrics["step"]
    figure, axes = figures.panels(len(data), 1.75, 1.8)
    styles = {
        "score_gradient": ("score gradient = gate x spread", "C6", "-"),
        "gate": ("gate", "C0", "-"),
        "advantage_spread": ("spread of the advantage", "C4", "-"),
        "value_gradient": ("value gradient", "C1", "--"),
    }
    for axis, (arm, bands) in zip(axes, data.items(), strict=True):
        for name, (label, colour, line) in styles.items():
            figures.shade(
                axis, step, bands[name], color=colour, linestyle=line, label=label
            )
        axis.set_title(arm)
        axis.set_xlim(0, step[-1])
    middles = np.concatenate(
        [band.middle for bands in data.values() for band in bands.values()]
    )
    figures.spread(axes[0], "y", middles)
    figures.name_axes(axes, "step", "of that at the start")
    figures.legend(figure, axes[0], _of_seeds(run))
    return figure


def _corner(axis: Axes) -> dict:
    return {"transform": axis.transAxes, "ha": "right", "va": "top", "fontsize": 8}
