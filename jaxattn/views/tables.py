"""Cells and tables, as text and as Markdown."""

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from jaxattn.analysis import stats


def csv_table(summary: dict[str, Any]) -> str:
    """One row per arm: mean, std, interval and n of every metric."""
    rows = []
    for arm, entry in summary["arms"].items():
        row = {"arm": arm}
        for name in (name for name, value in entry.items() if _is_estimate(value)):
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


def _is_estimate(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() >= {"mean", "std", "ci95", "n"}


def mean(value: dict[str, Any], sign: str = "") -> str:
    """An estimate as mean ± half its interval."""
    if value["mean"] is None:
        return "none"
    style = ".3f" if abs(value["mean"]) < 1e4 else ".1e"
    text = f"{value['mean']:{sign}{style}}"
    if value["ci95"] is None:
        return text
    return f"{text}±{value['ci95'][1] - value['mean']:{style}}"


def ends(interval: Sequence[float] | None) -> str:
    """An interval as [low, high]."""
    if interval is None:
        return "none"
    return "[{:+.3f}, {:+.3f}]".format(*interval)


def median_cell(value: dict[str, Any], *, interval: bool = False) -> str:
    """A median, if asked for with its interval."""
    if value["median"] is None:
        return "none" if value["n"] == 0 else "?"
    text = f"{value['median']:.3g}" if interval else f"{value['median']:g}"
    text = value.get("beyond", ("", "", ""))[1] + text
    if not interval or value["ci95"] is None:
        return text
    low, high = value["ci95"]  # None: settled by the first evaluation, at any time
    return f"{text} [{low or 0:.3g}, {'∞' if high is None else f'{high:.3g}'}]"


def from_log(value: dict[str, Any]) -> str:
    """An estimate of a log, as a factor."""
    if value["mean"] is None:
        return "none"
    text = f"{math.exp(value['mean']):.3g}"
    if value["ci95"] is None:
        return text
    return f"{text} [{', '.join(f'{math.exp(end):.3g}' for end in value['ci95'])}]"


def bold(difference: dict[str, Any]) -> str:
    """A difference as mean ± half its interval, bold where it differs from 0."""
    text = mean(difference, "+")
    found = stats.Difference(std=None, **difference)
    return f"**{text}**" if stats.sign(found) else text


def steps_cell(steps: dict[str, Any], summary: dict[str, Any]) -> str:
    """A median of steps, and how many seeds got there."""
    beyond = f">{summary['steps']}" if _beyond(steps) else "?"
    middle = beyond if steps["median"] is None else f"{steps['median']:.0f}"
    soon = "≤" if _at_once(steps, summary) else ""
    return f"{soon}{middle} ({steps['reached']}/{steps['n']})"


def speedup_cell(speedup: dict[str, Any]) -> str:
    """A median speed-up with its interval."""
    below, middle, above = speedup["beyond"]
    median = _ratio(speedup["median"], middle)
    times = median if speedup["median"] is None else f"{middle}{median}x"
    if speedup["ci95"] is None:
        return times
    low, high = speedup["ci95"]
    low, high = _ratio(low, below, none="0"), _ratio(high, above, none="∞")
    return f"{times} [{low}, {high}]"


def _ratio(value: float | None, beyond: str, none: str | None = None) -> str:
    """A speed-up; a censored one is of an arm, or a baseline, that never got there."""
    if value is not None:
        return f"{value:.3g}"
    return none or {"<": "<1", ">": ">1", "?": "?"}[beyond]


def _at_once(steps: dict[str, Any], summary: dict[str, Any]) -> bool:
    """Whether the median is the first evaluation: it may have been any time before."""
    return steps["median"] == summary["first_evaluation"]


def _beyond(steps: dict[str, Any]) -> bool:
    """Whether the median lies beyond the run, since less than half arrived.

    Just half: between the last that did and anything.
    """
    return 2 * steps["reached"] < steps["n"]


def of_medians(summary: dict[str, Any]) -> str:
    """What is to be said of the intervals of medians."""
    if summary["seeds"] < 6:
        return " (an interval needs 6 seeds)"
    return " [95 %]"


def of_ratios(summary: dict[str, Any]) -> str:
    """The same of medians of times that were read off evaluations, for report.md."""
    said = " [95 %, over all that the steps between evaluations leave open]"
    return of_medians(summary) if summary["seeds"] < 6 else said


def text_table(rows: list[list[str]]) -> str:
    """Aligns rows of cells in columns, the first row as head.

    By hand: tabulate makes every head two wider, and a terminal has 80 columns.
    """
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
    """Formats the same in Markdown."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return tabulate(
        escaped,
        headers="firstrow",
        tablefmt="pipe",
        colalign=("left", *["right"] * (len(rows[0]) - 1)),
        disable_numparse=True,
    )


def precise(value: dict[str, Any]) -> str:
    """An estimate with three significant digits, as it may be small."""
    if value["mean"] is None:
        return "none"
    text = f"{value['mean']:.3g}"
    if value["ci95"] is None:
        return text
    return f"{text}±{value['ci95'][1] - value['mean']:.2g}"


def times(value: dict[str, Any]) -> str:
    """A ratio from an estimate of its logarithm."""
    if value["mean"] is None:
        return "none"
    text = f"{math.exp(value['mean']):.3g}"
    if value["ci95"] is None:
        return text
    low, high = (math.exp(min(end, 700.0)) for end in value["ci95"])
    return f"{text} [{low:.3g}, {high:.3g}]"
