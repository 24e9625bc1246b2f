"""Tables from a run directory: summary.json, summary.csv, report.md, the terminal."""

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jaxattn import stats
from jaxattn.runs import Run
from jaxattn.sweep import METRICS
from jaxattn.tasks import catalogue

# Column of the main table -> metric.
_COLUMNS = {
    "train loss": "train_loss",
    "held-out loss": "heldout_loss",
    "KL to Bayes": "heldout_kl",
    "accuracy": "accuracy",
    "entropy": "predictive_entropy",
}
# The curve that must come down to where the baseline's ended -> names in summary.json.
_SPEEDUPS = {
    "train_loss": ("steps_to_baseline_final", "speedup"),
    "heldout_kl": ("heldout_steps_to_baseline_final", "heldout_speedup"),
}


def summarise(run: Run, wall_seconds: dict[str, float]) -> dict[str, Any]:
    """What a program reads of a run: final metrics by arm, floors, comparisons.

    Args:
      run: metrics and config.
      wall_seconds: "compile" and "run".

    Returns:
      The content of summary.json. Losses, entropies and distances in nats.
    """
    config = run.config["config"]
    arms = config["run_arms"]
    final = {name: run.metrics[name][..., -1] for name in METRICS}
    chance = math.log(num_classes(run))
    finite = np.isfinite(run.metrics["train_loss"]).all(axis=2)

    below_bayes = final["train_loss"] < final["train_bayes_nll"]
    by_arm = {}
    for row, arm in enumerate(arms):
        kept = finite[row]
        entry: dict[str, Any] = {
            name: stats.estimate(np.where(kept, values[row], np.nan))._asdict()
            for name, values in final.items()
        }
        entry["diverged"] = int((~kept).sum())
        entry["flags"] = _flags(
            diverged=(~kept).sum(),
            below_bayes=below_bayes[row][kept].sum(),
            above_chance=(final["heldout_loss"][row] > chance)[kept].sum(),
            seeds=len(kept),
        )
        by_arm[arm] = entry

    return {
        "config": config["name"],
        "steps": config["steps"],
        "seeds": config["seeds"],
        "complete": True,
        "wall_seconds": wall_seconds,
        "floors": {
            "entropy_rate": _entropy_rate(config),
            # The sequences are the same for every arm.
            "bayes_heldout_nll": _interval(
                stats.estimate(final["heldout_bayes_nll"][0])
            ),
            "bayes_train_nll": _interval(stats.estimate(final["train_bayes_nll"][0])),
            "chance": chance,
        },
        "arms": by_arm,
        "baseline": config["baseline"],
        "comparisons": _comparisons(run, final, finite),
    }


def _flags(*, diverged: int, below_bayes: int, above_chance: int, seeds: int) -> list:
    """Warnings about one arm, each with the number of seeds it holds for."""
    found = {
        "diverged": diverged,
        "train loss below the Bayes floor": below_bayes,
        "held-out loss above chance": above_chance,
    }
    return [f"{text} in {k} of {seeds} seeds" for text, k in found.items() if k > 0]


def _comparisons(run: Run, final: dict, finite: np.ndarray) -> list[dict[str, Any]]:
    config = run.config["config"]
    arms, baseline = config["run_arms"], config["baseline"]
    if baseline not in arms:
        return []
    base = arms.index(baseline)
    comparisons = []
    for row, arm in enumerate(arms):
        if row == base:
            continue
        kept = finite[row] & finite[base]
        entry = {
            "arm": arm,
            "baseline": baseline,
            "paired_difference": {
                name: _interval(
                    stats.paired_difference(
                        np.where(kept, values[row], np.nan),
                        np.where(kept, values[base], np.nan),
                    )
                )
                for name, values in final.items()
            },
        }
        for metric, names in _SPEEDUPS.items():
            entry |= zip(names, _speedup(run, finite, metric, row, base), strict=True)
        comparisons.append(entry)
    return comparisons


def _speedup(
    run: Run, finite: np.ndarray, metric: str, row: int, base: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Steps of an arm to where the baseline ended, and how many times fewer they are.

    Both are counted alike, to the first evaluation at or below the baseline's last
    value on that seed, so that an arm is as fast as its copy. A seed on which the
    baseline diverged, or ended no lower than it began, has no such place: n says so.
    """
    step, curves = run.metrics["step"], run.metrics[metric]
    learned = finite[base] & (curves[base, :, -1] < curves[base, :, 0])
    threshold = np.where(learned, curves[base, :, -1], np.nan)
    times = stats.first_reached(step, curves[row], threshold)
    times = np.where(finite[row] | np.isnan(times), times, np.inf)
    ratio = stats.first_reached(step, curves[base], threshold) / times
    speedup = stats.median(ratio)  # 0 for a seed that never got there: slower than any
    steps = {
        "median": stats.median(times).median,
        "reached": int(np.isfinite(times).sum()),
        "n": speedup.n,
    }
    return steps, {"median": speedup.median, "ci95": speedup.ci95}


def _interval(estimate: stats.Estimate) -> dict[str, Any]:
    return {"mean": estimate.mean, "ci95": estimate.ci95, "n": estimate.n}


def num_classes(run: Run) -> int:
    """Number of classes of the run's task."""
    fields = ConfigDict(run.config["config"]["task"])
    return catalogue.TASKS[fields.name].num_classes(fields)


def _entropy_rate(config: dict[str, Any]) -> float:
    fields = ConfigDict(config["task"])
    return catalogue.TASKS[fields.name].entropy_rate(fields)


def csv_table(summary: dict[str, Any]) -> str:
    """One row per arm: mean, std, interval and n of every metric."""
    rows = []
    for arm, entry in summary["arms"].items():
        row = {"arm": arm}
        for name in METRICS:
            value = entry[name]
            low, high = value["ci95"] or (None, None)
            row |= {
                f"{name}_mean": value["mean"],
                f"{name}_std": value["std"],
                f"{name}_ci95_low": low,
                f"{name}_ci95_high": high,
                f"{name}_n": value["n"],
            }
        rows.append(row | {"diverged": entry["diverged"]})
    out = io.StringIO()
    writer = csv.DictWriter(out, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def terminal(summary: dict[str, Any]) -> str:
    """The report for a terminal of 80 columns."""
    blocks = [
        f"{summary['config']}: {summary['seeds']} seeds, {summary['steps']} steps,"
        " last evaluation, mean ± half a 95 % interval",
        text_table(_main_table(summary)),
        _floors(summary),
    ]
    if summary["comparisons"]:
        baseline = summary["baseline"]
        blocks += [
            f"Steps to where {baseline} ended (seeds that got there), and speed-up;\n"
            f"medians{_of_medians(summary)}",
            text_table(_speed_table(summary)),
        ]
    elif summary["baseline"] not in summary["arms"]:
        blocks.append(
            f"No comparison: {summary['baseline']}, the baseline, did not run"
        )
    flags = _flag_lines(summary)
    if flags:
        blocks.append("\n".join(["Flags", *flags]))
    return "\n\n".join(blocks) + "\n"


def markdown(summary: dict[str, Any], figures: Sequence[str]) -> str:
    """The content of report.md.

    Args:
      summary: from `summarise`.
      figures: paths of the pictures, relative to the report.
    """
    wall = summary["wall_seconds"]
    parts = [
        f"# {summary['config']}",
        f"{summary['seeds']} seeds, {summary['steps']} steps;"
        f" {wall['compile']:.0f} s compiling, {wall['run']:.0f} s running.",
        "## Last evaluation",
        "Mean over seeds ± half a 95 % interval (Student). Losses, KL and entropy in"
        " nats. Held-out: a sequence never trained on; KL, accuracy and entropy are"
        " measured there.",
        markdown_table(_main_table(summary)),
        _floors(summary),
    ]
    flags = _flag_lines(summary)
    if flags:
        parts += ["## Flags", "\n".join(f"* {line}" for line in flags)]
    if summary["comparisons"]:
        baseline = summary["baseline"]
        parts += [
            f"## Against {baseline}",
            f"Steps to the first evaluation at which an arm was where {baseline} ended"
            " on the same seed, by train loss and by held-out KL to Bayes, and how many"
            f" times fewer they are than {baseline}'s own. Medians over seeds"
            f"{_of_medians(summary)}; a seed that never got there counts as slower than"
            " any that did.",
            markdown_table(_speed_table(summary)),
            f"Paired difference to {baseline} at the end, mean over seeds ± half a 95 %"
            " interval.",
            markdown_table(_difference_table(summary)),
        ]
    parts += [f"![{name}]({name})" for name in figures]
    return "\n\n".join(parts) + "\n"


def _main_table(summary: dict[str, Any]) -> list[list[str]]:
    rows = [["arm", *_COLUMNS]]
    for arm, entry in summary["arms"].items():
        rows.append([arm, *(mean(entry[name]) for name in _COLUMNS.values())])
    return rows


def _difference_table(summary: dict[str, Any]) -> list[list[str]]:
    rows = [["arm", *_COLUMNS]]
    for entry in summary["comparisons"]:
        differences = entry["paired_difference"]
        rows.append(
            [entry["arm"], *(mean(differences[m], "+") for m in _COLUMNS.values())]
        )
    return rows


def _speed_table(summary: dict[str, Any]) -> list[list[str]]:
    rows = [["arm", "train loss", "speed-up", "held-out KL", "speed-up"]]
    for entry in summary["comparisons"]:
        row = [entry["arm"]]
        for steps_name, speedup_name in _SPEEDUPS.values():
            steps, speedup = entry[steps_name], entry[speedup_name]
            # Less than half arrived: the median lies beyond the run. Just half: between
            # the last that did and anything.
            beyond = 2 * steps["reached"] < steps["n"]
            late, slow = (f">{summary['steps']}", "<1") if beyond else ("?", "?")
            middle = late if steps["median"] is None else f"{steps['median']:.0f}"
            times = slow if speedup["median"] is None else f"{speedup['median']:.3g}x"
            if speedup["ci95"] is not None:
                low, high = (
                    "<1" if end is None else f"{end:.3g}" for end in speedup["ci95"]
                )
                times += f" [{low}, {high}]"
            row += [f"{middle} ({steps['reached']}/{steps['n']})", times]
        rows.append(row)
    return rows


def _floors(summary: dict[str, Any]) -> str:
    floors = summary["floors"]
    return (
        f"Floors, nats: chance {floors['chance']:.3f}; entropy rate of the chain"
        f" {floors['entropy_rate']:.3f};\n"
        f"exact Bayes {mean(floors['bayes_train_nll'])} on the training sequences,"
        f" {mean(floors['bayes_heldout_nll'])} held out."
    )


def _flag_lines(summary: dict[str, Any]) -> list[str]:
    return [
        f"{arm}: {flag}"
        for arm, entry in summary["arms"].items()
        for flag in entry["flags"]
    ]


def mean(value: dict[str, Any], sign: str = "") -> str:
    """An estimate as mean ± half its interval."""
    if value["mean"] is None:
        return "none"
    style = ".3f" if abs(value["mean"]) < 1e4 else ".1e"
    text = f"{value['mean']:{sign}{style}}"
    if value["ci95"] is None:
        return text
    return f"{text}±{value['ci95'][1] - value['mean']:{style}}"


def _of_medians(summary: dict[str, Any]) -> str:
    if summary["seeds"] < 6:
        return " (an interval needs 6 seeds)"
    return " [95 %]"


def text_table(rows: list[list[str]]) -> str:
    """Rows of cells as aligned columns, the first row as head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *rest = (
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def markdown_table(rows: list[list[str]]) -> str:
    """The same in Markdown."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    rule = ["---"] + ["---:"] * (len(rows[0]) - 1)
    return "\n".join([line(rows[0]), line(rule), *map(line, rows[1:])])
