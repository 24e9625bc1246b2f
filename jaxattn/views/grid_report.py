"""The report of a run over a grid of rates."""

from collections.abc import Mapping
from typing import Any

from jaxattn.views import sections, tables

_NO_SGD = "No comparison: SGD, two_timescale at ratio 1, is not on the grid."


def terminal(summary: dict[str, Any]) -> str:
    """The report for a terminal of 80 columns."""
    blocks = [
        f"{summary['config']}: {summary['seeds']} seeds, {summary['steps']} steps; each"
        " algorithm at the rates that\nwere best on the other seeds; mean ± half a 95 %"
        " interval",
        tables.text_table(_main_table(summary)),
        sections.floor_line(summary),
        f"Steps to a held-out KL of {summary['grid']['threshold']:g} (seeds that got"
        " there) at the rates that\nwere fastest on the other seeds, and speed-up over"
        f" sgd; medians{tables.of_medians(summary)}",
        tables.text_table(_speed_table(summary)),
        sections.claim_block(
            summary, "Tuned against tuned, paired differences held out"
        )
        or _NO_SGD,
        sections.flag_block(summary),
        sections.trained_block(summary),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def opening(summary: dict[str, Any]) -> str:
    """What tuning says of the paper's claim, as a paragraph."""
    return (
        f"{summary['seeds']} seeds, each algorithm on each seed at the rates that were"
        " best on the others, by distance to Bayes held out. "
        + (sections.verdict_sentences(summary) or _NO_SGD)
    )


def markdown(summary: dict[str, Any], figures: Mapping[str, str]) -> str:
    """The content of report.md.

    Args:
      summary: from `summarise`.
      figures: paths of the pictures, relative to the report -> their captions.
    """
    wall = summary["wall_seconds"]
    grid_of = summary["grid"]
    parts = [
        f"# {summary['config']}",
        f"{len(grid_of['ratio'])} ratios x {len(grid_of['scale'])} scales,"
        f" {summary['seeds']} seeds, {summary['steps']} steps;"
        f" {wall['compile']:.0f} s compiling, {wall['run']:.0f} s running.",
        *sections.trained_section(summary),
        opening(summary),
        "## Tuned against tuned",
        "Mean over seeds ± half a 95 % interval (Student's, widened as scores that were"
        " tuned on each other's seeds are correlated), in nats, at the end, each seed"
        " at the point that was best (mean held-out KL) over the other seeds."
        " `best` is the point, scale x ratio, that is best over all. scale: rate of"
        " W_Q, W_K and W_O; ratio: how many times faster W_V moves, and for M-steps in"
        " closed form what their ridge is divided by. One gradient with two rates is"
        " `sgd` at ratio 1, `values_fast` (EM-like) above and `routing_fast` below;"
        " div.: share of all the map's runs that diverged.",
        tables.markdown_table(_main_table(summary)),
        sections.floor_line(summary),
        "## How fast",
        f"Steps to the first evaluation with a held-out KL to Bayes of"
        f" {grid_of['threshold']:g} nats, at the point that was fastest over the other"
        " seeds; speed-up over sgd, tuned likewise. Medians over seeds"
        f"{tables.of_ratios(summary)}; a seed that never got there counts as slower"
        " than any that did.",
        tables.markdown_table(_speed_table(summary)),
    ]
    parts += sections.claim_section(summary) + sections.flag_section(summary)
    parts += sections.picture_section(figures)
    return "\n\n".join(parts) + "\n"


def _main_table(summary: dict[str, Any]) -> list[list[str]]:
    rows = [["algorithm", "KL to Bayes", "train loss", "held-out loss", "best", "div."]]
    for title, entry in summary["arms"].items():
        rows.append(
            [
                title,
                *(
                    tables.mean(entry[name])
                    for name in ("heldout_kl", "train_loss", "heldout_loss")
                ),
                _point_cell(entry["best"]),
                f"{entry['grid_diverged'] / entry['grid_runs']:.0%}",
            ]
        )
    return rows


def _point_cell(point: dict[str, Any] | None) -> str:
    return "none" if point is None else f"{point['scale']:g} x {point['ratio']:g}"


def _speed_table(summary: dict[str, Any]) -> list[list[str]]:
    speedups = {entry["arm"]: entry["speedup"] for entry in summary["comparisons"]}
    rows = [["algorithm", "fastest", "steps", "speed-up"]]
    for title, entry in summary["arms"].items():
        rows.append(
            [
                title,
                _point_cell(entry["fastest"]),
                tables.steps_cell(entry["steps_to_threshold"], summary),
                tables.speedup_cell(speedups[title]) if title in speedups else "",
            ]
        )
    return rows
