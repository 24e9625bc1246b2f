"""Tables from a run directory: summary.json, summary.csv, report.md, the terminal."""

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

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
# Speed-up -> the curve that must come down to where the baseline's ended.
SPEEDUPS = {"speedup": "train_loss", "heldout_speedup": "heldout_kl"}
_STEPS = {
    "speedup": "steps_to_baseline_final",
    "heldout_speedup": "heldout_steps_to_baseline_final",
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
    bayes = {name: run.metrics[f"bayes_{name}_nll"] for name in ("train", "heldout")}
    finite = np.isfinite(run.metrics["train_loss"]).all(axis=2)

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
            below_bayes=(final["train_loss"][row] < bayes["train"])[kept].sum(),
            above_chance=(final["heldout_loss"][row] > chance)[kept].sum(),
            seeds=len(kept),
        )
        by_arm[arm] = entry

    bayes_heldout = stats.estimate(bayes["heldout"])._asdict()
    del bayes_heldout["std"]
    return {
        "config": config["name"],
        "steps": config["steps"],
        "seeds": config["seeds"],
        "complete": True,
        "wall_seconds": wall_seconds,
        "floors": {
            "entropy_rate": _entropy_rate(config),
            "bayes_heldout_nll": bayes_heldout,
            "chance": chance,
        },
        "arms": by_arm,
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
        differences = {}
        for name, values in final.items():
            difference = stats.paired_difference(
                np.where(kept, values[row], np.nan), values[base]
            )._asdict()
            del difference["std"]
            differences[name] = difference
        entry = {"arm": arm, "baseline": baseline, "paired_difference": differences}
        for speedup, metric in SPEEDUPS.items():
            threshold = np.where(finite[base], final[metric][base], np.nan)
            curves = run.metrics[metric][row]
            times = stats.first_reached(run.metrics["step"], curves, threshold)
            entry[_STEPS[speedup]] = {
                "median": stats.median(times).median,
                "reached": int(np.isfinite(times).sum()),
                "n": int((~np.isnan(times)).sum()),
            }
            # A seed that never got there: speed-up 0, below any that did.
            ratio = stats.median(config["steps"] / times)
            entry[speedup] = {"median": ratio.median, "ci95": ratio.ci95}
        comparisons.append(entry)
    return comparisons


def num_classes(run: Run) -> int:
    """Number of classes of the run's task."""
    fields = run.config["config"]["task"]
    return catalogue.TASKS[fields["name"]].num_classes(_Fields(fields))


def _entropy_rate(config: dict) -> float:
    fields = config["task"]
    return catalogue.TASKS[fields["name"]].entropy_rate(_Fields(fields))


class _Fields(dict):
    """Reads the fields of a config that came back from JSON by attribute."""

    __getattr__ = dict.__getitem__


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
        _text_table(_main_table(summary)),
        _floors(summary),
    ]
    if summary["comparisons"]:
        baseline = summary["comparisons"][0]["baseline"]
        blocks += [
            f"Steps to where {baseline} ended (seeds that got there), speed-up; median"
            " [95 %]",
            _text_table(_speed_table(summary)),
        ]
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
        _markdown_table(_main_table(summary)),
        _floors(summary),
    ]
    flags = _flag_lines(summary)
    if flags:
        parts += ["## Flags", "\n".join(f"* {line}" for line in flags)]
    if summary["comparisons"]:
        baseline = summary["comparisons"][0]["baseline"]
        parts += [
            f"## Against {baseline}",
            f"Steps until an arm was where {baseline} ended on the same seed, by train"
            " loss and by held-out KL to Bayes. Medians over seeds with the sign test's"
            " 95 % interval; a seed that never got there counts as slower than any that"
            " did, and is never dropped.",
            _markdown_table(_speed_table(summary)),
            f"Paired difference to {baseline} at the end, mean over seeds ± half a 95 %"
            " interval.",
            _markdown_table(_difference_table(summary)),
        ]
    parts += [f"![{name}]({name})" for name in figures]
    return "\n\n".join(parts) + "\n"


def _main_table(summary: dict[str, Any]) -> list[list[str]]:
    rows = [["arm", *_COLUMNS]]
    for arm, entry in summary["arms"].items():
        rows.append([arm, *(_mean(entry[name]) for name in _COLUMNS.values())])
    return rows


def _difference_table(summary: dict[str, Any]) -> list[list[str]]:
    rows = [["arm", *_COLUMNS]]
    for entry in summary["comparisons"]:
        differences = entry["paired_difference"]
        rows.append(
            [entry["arm"], *(_mean(differences[m], "+") for m in _COLUMNS.values())]
        )
    return rows


def _speed_table(summary: dict[str, Any]) -> list[list[str]]:
    rows = [["arm", "train loss", "speed-up", "held-out KL", "speed-up"]]
    for entry in summary["comparisons"]:
        row = [entry["arm"]]
        for speedup in SPEEDUPS:
            steps = entry[_STEPS[speedup]]
            median = steps["median"]
            text = f">{summary['steps']}" if median is None else f"{median:.0f}"
            row += [
                f"{text} ({steps['reached']}/{steps['n']})",
                _speedup(entry[speedup]),
            ]
        rows.append(row)
    return rows


def _floors(summary: dict[str, Any]) -> str:
    floors = summary["floors"]
    return (
        f"Floors: chance {floors['chance']:.3f}; exact Bayes on the held-out sequences"
        f" {_mean(floors['bayes_heldout_nll'])};\n"
        f"entropy rate of the chain {floors['entropy_rate']:.3f} (nats)."
    )


def _flag_lines(summary: dict[str, Any]) -> list[str]:
    return [
        f"{arm}: {flag}"
        for arm, entry in summary["arms"].items()
        for flag in entry["flags"]
    ]


def _mean(value: dict[str, Any], sign: str = "") -> str:
    if value["mean"] is None:
        return "none"
    text = f"{value['mean']:{sign}.3f}"
    if value["ci95"] is None:
        return text
    return f"{text}±{value['ci95'][1] - value['mean']:.3f}"


def _speedup(value: dict[str, Any]) -> str:
    text = "<1" if value["median"] is None else f"{value['median']:.3g}x"
    if value["ci95"] is None:
        return text
    low, high = ("<1" if end is None else f"{end:.3g}" for end in value["ci95"])
    return f"{text} [{low}, {high}]"


def _text_table(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *rest = (
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _markdown_table(rows: list[list[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    rule = ["---"] + ["---:"] * (len(rows[0]) - 1)
    return "\n".join([line(rows[0]), line(rule), *map(line, rows[1:])])
