"""Parts of a report that all kinds of runs share."""

import textwrap
from collections.abc import Mapping
from typing import Any

from jaxattn.analysis.entries import LEFT_CHANCE
from jaxattn.views.tables import ends, markdown_table, mean, text_table

METRIC_NAMES = {
    "train_attention_entropy": "attention entropy",
    "train_loss": "train loss",
    "heldout_kl": "KL",
    "attention_entropy": "attention entropy",
}


_VERDICT_ORDER = ("held", "better", "reversed", "worse", "undecided")


def verdict_sentences(summary: dict[str, Any]) -> str:
    """The claims of a run, those of one verdict together."""
    sentences = []
    for verdict in _VERDICT_ORDER:
        said = [_said(c) for c in summary["claims"] if c["verdict"] == verdict]
        if said:
            sentences.append(f"**{verdict.capitalize()}**: {'; '.join(said)}.")
    return " ".join(sentences)


def claim_block(summary: dict[str, Any], title: str) -> str:
    """The claims of a run for a terminal."""
    lines = [
        textwrap.fill(f"{c['verdict']:<9}  {_said(c)}", 80, subsequent_indent=" " * 11)
        for c in summary["claims"]
    ]
    return "\n".join([title, *lines]) if lines else ""


def flag_block(summary: dict[str, Any]) -> str:
    """The flags of a run for a terminal, a line each."""
    lines = [textwrap.fill(line, 80) for line in flag_lines(summary)]
    return "\n".join(["Flags", *lines]) if lines else ""


def trained_block(summary: dict[str, Any]) -> str:
    """What a run was trained with, for a terminal, if its summary says so."""
    found = summary.get("trained_with")
    return f"Trained with {found}" if found else ""


def trained_section(summary: dict[str, Any]) -> list[str]:
    """The same for report.md."""
    block = trained_block(summary)
    return [f"{block}: other versions round otherwise."] if block else []


def flag_section(summary: dict[str, Any]) -> list[str]:
    """The flags of a run, for report.md."""
    lines = flag_lines(summary)
    if not lines:
        return []
    return [
        "## Flags",
        "Below the Bayes floor: the training sequence is memorised."
        " Not left chance: the held-out loss has made less than"
        f" {LEFT_CHANCE:.0%} of the distance from chance to exact Bayes.",
        "\n".join(f"* {line}" for line in lines),
    ]


def claim_section(summary: dict[str, Any]) -> list[str]:
    """The claims of a run, for report.md."""
    if not summary["claims"]:
        return []
    return [
        "## Claims",
        "Paired difference of arm less baseline, in nats, with 95 % intervals. A"
        " verdict needs all that are given on one side of 0, by more than the rounding"
        " of float32; each is judged by itself, so that one of 20 may be wrong.",
        markdown_table(claim_table(summary)),
    ]


def picture_section(figures: Mapping[str, str]) -> list[str]:
    """The pictures of a run, for report.md, each with how to read it."""
    if not figures:
        return []
    shown = [
        f"![{path.rpartition('/')[2]}]({path})\n\n{caption}"
        for path, caption in figures.items()
    ]
    return ["## Pictures", *shown]


def _said(claim: dict[str, Any]) -> str:
    if _reasons(claim):
        return f"{claim['claim']} ({', '.join(_reasons(claim))})"
    difference = claim["paired_difference"]
    if difference["mean"] is None:
        return claim["claim"]
    metric = METRIC_NAMES[claim["metric"]]
    return f"{claim['claim']} ({metric} {mean(difference, '+')})"


def _reasons(claim: dict[str, Any]) -> list[str]:
    """Why there is no verdict, if so."""
    return [f"{arm} never moved" for arm in claim.get("never_moved", ())]


def claim_table(summary: dict[str, Any]) -> list[list[str]]:
    """Every claim with its difference, both intervals and the verdict."""
    rows = [["claim", "arms", "of", "difference", "Student", "BCa", "verdict"]]
    for claim in summary["claims"]:
        difference = claim["paired_difference"]
        rows.append(
            [
                claim["claim"],
                f"{claim['arm']} - {claim['baseline']}",
                METRIC_NAMES[claim["metric"]],
                "none" if difference["mean"] is None else f"{difference['mean']:+.3f}",
                ends(difference["ci95"]),
                ends(difference["bootstrap95"]),
                ", ".join([claim["verdict"], *_reasons(claim)]),
            ]
        )
    return rows


def floor_line(summary: dict[str, Any]) -> str:
    """What to read losses against, in two lines."""
    floors, rate = summary["floors"], ""
    if floors["entropy_rate"] is not None:
        rate = f"; entropy rate of the task {floors['entropy_rate']:.3f}"
    return (
        f"Floors, nats: chance {floors['chance']:.3f}{rate};\n"
        f"exact Bayes {mean(floors['bayes_train_nll'])} on the training sequences,"
        f" {mean(floors['bayes_heldout_nll'])} held out."
    )


def flag_lines(summary: dict[str, Any]) -> list[str]:
    """Every flag, with the arms that it is of in front."""
    arms: dict[str, list[str]] = {}
    for arm, entry in summary["arms"].items():
        for flag in entry["flags"]:
            arms.setdefault(flag, []).append(arm)
    return [f"{', '.join(names)}: {flag}" for flag, names in arms.items()]


def measure_section(summary: dict[str, Any]) -> list[str]:
    """What the user's measures found, for report.md."""
    rows = measure_table(summary)
    if len(rows) < 2:
        return []
    return [
        "## Measures",
        "Mean over seeds ± half a 95 % interval, at the first and the last evaluation,"
        " beside the null of the last; the difference is paired.",
        markdown_table(rows),
    ]


def measure_block(summary: dict[str, Any]) -> str:
    """The same for a terminal; empty without measures."""
    rows = [[row[0], *row[2:]] for row in measure_table(summary)]
    return "\n".join(["Measures, beside their nulls", text_table(rows)]) * (
        len(rows) > 1
    )


def measure_table(summary: dict[str, Any]) -> list[list[str]]:
    """A row for each measure of each arm, first the head."""
    rows = [["measure, arm", "what", "start", "end", "null", "end - null", "is"]]
    for arm, entry in summary["arms"].items():
        for name, own in entry.get("measures", {}).items():
            unit = f", {own['unit']}" if own["unit"] else ""
            cells = [mean(own["start"]), mean(own["end"])]
            cells += [mean(own["null"]), mean(own["difference"], "+")] * ("null" in own)
            cells += [own["differs"]] if "null" in own else ["", "", ""]
            rows.append([f"{name}, {arm}", f"{own['about']}{unit}", *cells])
    return rows
