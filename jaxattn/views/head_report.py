"""The report of a run of one head, for a terminal and as report.md."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxattn.analysis.entries import task_of
from jaxattn.analysis.head import SPEEDUPS
from jaxattn.runs import Run
from jaxattn.runs.json_files import differing
from jaxattn.views.observation_sections import observation_sections, short_table
from jaxattn.views.sections import (
    claim_block,
    claim_section,
    flag_block,
    flag_section,
    floor_line,
    measure_block,
    measure_section,
    picture_section,
    trained_block,
    trained_section,
    verdict_sentences,
)
from jaxattn.views.tables import (
    markdown_table,
    mean,
    median_cell,
    of_medians,
    of_ratios,
    speedup_cell,
    steps_cell,
    text_table,
)

# Column of the main table -> metric.
_COLUMNS = {
    "train loss": "train_loss",
    "held-out loss": "heldout_loss",
    "KL to Bayes": "heldout_kl",
    "accuracy": "accuracy",
    "entropy": "predictive_entropy",
}


# The same of a task that shows what it learns on the training sequence.
_OWN_COLUMNS = {
    "train loss": "train_loss",
    "accuracy": "train_accuracy",
    "entropy": "train_predictive_entropy",
    "attention entropy": "train_attention_entropy",
}


def terminal(summary: dict[str, Any]) -> str:
    """The report for a terminal of 80 columns."""
    blocks = [
        f"{summary['config']}: {summary['seeds']} seeds, {summary['steps']} steps,"
        " last evaluation, mean ± half a 95 % interval",
        text_table(_main_table(summary)),
        floor_line(summary),
    ]
    if summary["comparisons"]:
        baseline = summary["baseline"]
        blocks += [
            f"Steps to where {baseline} ended (seeds that got there), and speed-up;\n"
            f"medians{of_medians(summary)}",
            text_table(_speed_table(summary)),
        ]
    blocks.append(
        claim_block(
            summary, "The paper's claims, paired differences at the end in nats"
        )
    )
    if summary["observations"] is not None:
        blocks += [
            "Entropy of attention (1: equal shares); share of the values' motion along"
            "\nPC1 + PC2 (of random walks in the read-out's span); how often the loss"
            " rose;\nsteps of the root of precision to 50 % of its change, over those"
            " of attention\n(medians)",
            text_table(short_table(summary["observations"])),
        ]
    blocks.append(measure_block(summary))
    blocks += [flag_block(summary), trained_block(summary)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def markdown(summary: dict[str, Any], figures: Mapping[str, str]) -> str:
    """The content of report.md.

    Args:
      summary: from `summarise`.
      figures: paths of the pictures, relative to the report -> their captions.
    """
    wall = summary["wall_seconds"]
    parts = [
        f"# {summary['config']}",
        f"{summary['seeds']} seeds, {summary['steps']} steps;"
        f" {wall['compile']:.0f} s compiling, {wall['run']:.0f} s running.",
        *trained_section(summary),
        *([summary["task_note"]] if summary["task_note"] else []),
        opening(summary),
        "## Last evaluation",
        "Mean over seeds ± half a 95 % interval (Student). Losses, KL and entropy in"
        " nats. "
        + (
            "Held-out: a sequence never trained on; KL, accuracy and entropy are of it."
            if summary["looked_at"]["sequence"] == "held-out"
            else "All are of the training sequence."
        ),
        markdown_table(_main_table(summary)),
        floor_line(summary),
    ]
    parts += flag_section(summary)
    if summary["comparisons"]:
        baseline = summary["baseline"]
        parts += [
            f"## Against {baseline}",
            f"Steps to the first evaluation at which an arm was where {baseline} ended"
            " on the same seed, by train loss and by held-out KL to Bayes, and how many"
            f" times fewer they are than {baseline}'s own. Medians over seeds"
            f"{of_ratios(summary)}; a seed that never got there counts as slower than"
            " any that did.",
            markdown_table(_speed_table(summary)),
            f"Paired difference to {baseline} at the end, mean over seeds ± half a 95 %"
            " interval (Student; summary.json has the bootstrap's too).",
            markdown_table(_difference_table(summary)),
        ]
    parts += claim_section(summary) + measure_section(summary)
    parts += observation_sections(summary)
    parts += picture_section(figures)
    return "\n\n".join(parts) + "\n"


def opening(summary: dict[str, Any]) -> str:
    """Which claims of the paper held in a run, as a paragraph."""
    said = verdict_sentences(summary) + _frame_sentence(summary)
    if not said:
        return "None of the paper's claims can be read from these arms."
    return (
        f"What {summary['seeds']} seeds say of the paper's claims. {said.strip()} **Not"
        " asked here**: tuned against tuned (see configs/rates.py)."
    )


def _frame_sentence(summary: dict[str, Any]) -> str:
    """Whether attention settled first, by arm."""
    named: dict[str, list[str]] = {"held": [], "reversed": [], "undecided": []}
    verdicts = {"frame": "held", "precision": "reversed", "undecided": "undecided"}
    for arm, entry in (summary["observations"] or {}).items():
        times = entry["time_scales"]["half"]
        if times["first"] in verdicts:
            both = (times[f"{name}_over_frame"] for name in ("precision", "root"))
            said = "; ".join(median_cell(ratio, interval=True) for ratio in both)
            named[verdicts[times["first"]]].append(f"{arm} ({said})")
    parts = [
        f"{verdict} by {', '.join(arms)}" for verdict, arms in named.items() if arms
    ]
    if not parts:
        return ""
    return (
        " Attention settles first (how many times as long precision took to 50 % of its"
        f" change, and its square root): {'; '.join(parts)}."
    )


def side_by_side(runs_: Sequence[Run]) -> str:
    """Finished runs in one table, and in what their configs differ from the first's.

    Args:
      runs_: with their summaries.

    Returns:
      Text for a terminal: a row for each run and arm, last evaluation.
    """
    columns = {n: m for n, m in _COLUMNS.items() if m != "predictive_entropy"}
    rows, lines = [["run, arm", *columns]], []  # room for 80 characters
    for number, run in enumerate(runs_, 1):
        fields = (
            ", ".join(differing(runs_[0].attrs["config"], run.attrs["config"]))
            or "the same config"
        )
        other = f"; differs from 1 in: {fields}" if number > 1 else ""
        lines.append(f"{number}: {run.attrs['path']}{other}")
        for arm, entry in run.attrs["summary"]["arms"].items():
            cells = (mean(entry[name]) for name in columns.values())
            rows.append([f"{number} {arm}", *cells])
    title = "Last evaluation, mean over seeds ± half a 95 % interval"
    return "\n\n".join(["\n".join(lines), title, text_table(rows)]) + "\n"


def _main_table(summary: dict[str, Any]) -> list[list[str]]:
    columns = columns_of(summary)
    rows = [["arm", *columns]]
    for arm, entry in summary["arms"].items():
        rows.append([arm, *(mean(entry[name]) for name in columns.values())])
    return rows


def columns_of(summary: dict[str, Any]) -> dict[str, str]:
    """Column of the main table -> metric."""
    own = summary["looked_at"]["sequence"] == "training"
    return _OWN_COLUMNS if own else _COLUMNS


def _difference_table(summary: dict[str, Any]) -> list[list[str]]:
    columns = columns_of(summary)
    rows = [["arm", *columns]]
    for entry in summary["comparisons"]:
        differences = entry["paired_difference"]
        rows.append(
            [entry["arm"], *(mean(differences[m], "+") for m in columns.values())]
        )
    return rows


def _speed_table(summary: dict[str, Any]) -> list[list[str]]:
    names = {"train loss": "train_loss", "held-out KL": "heldout_kl"}
    names = {
        title: SPEEDUPS[metric]
        for title, metric in names.items()
        # Where the baseline got nowhere there is no place to come to.
        if any(e[SPEEDUPS[metric][0]]["n"] > 0 for e in summary["comparisons"])
    }
    rows = [["arm", *(c for title in names for c in (title, "speed-up"))]]
    for entry in summary["comparisons"]:
        row = [entry["arm"]]
        for steps_name, speedup_name in names.values():
            steps, speedup = entry[steps_name], entry[speedup_name]
            row += [steps_cell(steps, summary), speedup_cell(speedup)]
        rows.append(row)
    return rows


def learned_name(run: Run) -> str:
    """What a run without a grid calls precision."""
    learned = task_of(run)["learned"]
    return {
        "heldout_kl": "precision: KL to Bayes",
        "train_loss": "precision: train loss",
    }[learned]
