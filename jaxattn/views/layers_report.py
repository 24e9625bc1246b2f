"""The report of a run of transformers."""

from collections.abc import Mapping
from typing import Any

from jaxattn.analysis.layers import DISTANCES
from jaxattn.views import sections, tables
from jaxattn.views.tables import precise, times

# The same for 80 characters.
_SHORT = {
    "KL, bits": "heldout_kl_bits",
    "accuracy": "accuracy",
    "TV": "heldout_total_variation",
}


_QUESTIONS = {
    "key_orthogonality": "keys, mean abs. cosine",
    "relative_entropy": "entropy of attention",
    "query_key_alignment": "queries and their keys, cosine",
    "entropy_axis": "PC1 and posterior entropy, abs. rank correlation",
    "entropy_axis_within": "the same within positions",
    "main_axis_share": "share of variance on PC1",
    "belief_read_out": "beliefs read from the stream, R²",
}


_NULLS = {"random": "random", "shuffled": "shuffled", "permuted": "permuted"}


def terminal(summary: dict[str, Any]) -> str:
    """The report for a terminal of 80 columns."""
    blocks = [
        f"{summary['config']}: {summary['seeds']} seeds, {summary['steps']} steps,"
        " last evaluation,\nmean ± half a 95 % interval; distances to exact Bayes",
        tables.text_table(_distance_table(summary, _SHORT)),
        sections.floor_line(summary),
    ]
    rows = _longer_table(summary)
    if rows:
        title = f"KL to Bayes in bits, with so many times the {summary['longer_by']}"
        blocks += [title, tables.text_table(rows)]
    lines = [
        f"{answer['verdict']:<9}  {answer['claim']}"
        for answer in _answers_of(summary, summary["baseline"])
    ]
    if lines:
        title = f"The companion paper's claims, of {summary['baseline']}"
        blocks.append("\n".join([title, *lines]))
    blocks.append(sections.measure_block(summary))
    blocks += [sections.flag_block(summary), sections.trained_block(summary)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def markdown(summary: dict[str, Any], figures: Mapping[str, str]) -> str:
    """The content of report.md.

    Args:
      summary: from `summarise`.
      figures: paths of the pictures, relative to the report -> their captions.
    """
    wall = summary["wall_seconds"]
    baseline = summary["baseline"]
    parts = [
        f"# {summary['config']}",
        f"{summary['seeds']} seeds, {summary['steps']} steps;"
        f" {wall['compile']:.0f} s compiling, {wall['run']:.0f} s running.",
        *sections.trained_section(summary),
        *([summary["task_note"]] if summary["task_note"] else []),
        _opening(summary),
        "## How close to exact Bayes",
        "Held-out sequences, never trained on; mean over seeds ± half a 95 % interval"
        " (Student). KL(Bayes ‖ model) and entropies in bits per scored position. The"
        " entropy error is the mean of |H(model) - H(Bayes)| over sequences and"
        " positions; *averaged* is the companion paper's, in which errors of opposite"
        " sign cancel. Neither tells a posterior from a permutation of it: only KL and"
        " total variation do. Calibration: expected |p - what Bayes says where the"
        " model says p|.",
        tables.markdown_table(_distance_table(summary, DISTANCES)),
        "Rates are the config's, and tuned for no arm.",
        sections.floor_line(summary),
    ]
    parts += sections.flag_section(summary)
    against = _against_table(summary)
    if len(against) > 1:
        parts += [
            f"## Against {baseline}",
            f"How many times {baseline}'s KL an arm has, on the same seeds (geometric"
            " mean and 95 % interval), and what is different about it.",
            tables.markdown_table(against),
        ]
    rows = _longer_table(summary)
    if rows:
        parts += [
            "## Longer than trained",
            f"KL to Bayes in bits on sequences with so many times the"
            f" `{summary['longer_by']}` trained on.",
            tables.markdown_table(rows),
        ]
    answered = [arm for arm in summary["arms"] if _answers_of(summary, arm)]
    if answered:
        parts += [
            "## The companion paper's claims",
            "A claim holds if all its differences are below 0: the 95 % intervals of"
            " Student and of the bootstrap, on these seeds; reversed if all are above."
            " Of time scales there are two ratios, of KL and its root to attention:"
            " attention was first if both are above 1; they need 6 seeds. Each claim"
            " is judged by itself, so that one of 20 may be wrong.",
            tables.markdown_table(_answer_table(summary, answered)),
        ]
    for arm in answered:
        if arm == baseline or baseline not in answered:
            parts += _of_arm(summary, arm)
    parts += sections.claim_section(summary) + sections.measure_section(summary)
    parts += sections.picture_section(figures)
    return "\n\n".join(parts) + "\n"


def _of_arm(summary: dict[str, Any], arm: str) -> list[str]:
    entry = summary["arms"][arm]
    scales = [["share of change", "attention", "KL", "√KL", "KL / attention", "√KL"]]
    for name, found in entry["time_scales"].items():
        cells = [
            tables.median_cell(found[part]) for part in ("frame", "precision", "root")
        ]
        cells += [
            tables.median_cell(found[f"{part}_over_frame"], interval=True)
            for part in ("precision", "root")
        ]
        scales.append([{"half": "half", "most": "90 %"}[name], *cells])
    return [
        f"## Geometry of {arm}",
        "By layer: before training (the null of random initialisation), at the end,"
        " and the nulls of what was found at the end: random keys, or the mean over"
        " random directions; keys with each coordinate shuffled over them; entropies of"
        " another sequence at the same position, so that what goes with position alone"
        " is in the null, and permuted beliefs. Keys are those of different tokens. The"
        " stream has one row more than there are layers: what is embedded. Correlations"
        " are of the contexts that a layer's values deliver at scored positions; within"
        " positions, of what is left of both when each position's mean is taken away.",
        tables.markdown_table(_geometry_table(entry["geometry"])),
        f"## What {arm} loses without a part",
        "KL to Bayes in bits with one head, one MLP or a whole layer replaced by zero"
        " or by its mean over sequences and positions; with all in place"
        f" {precise(entry['heldout_kl_bits'])}.",
        tables.markdown_table(_ablation_table(entry["ablation"])),
        "## Frame and precision",
        "Steps until attention (total variation to where it ends, mean over heads) and"
        " KL had made a share of their total change for good, and how many times as"
        " long KL and its root took; medians over seeds"
        f"{tables.of_ratios(summary)}; ≤: by the first one. KL counts from"
        " that of knowing nothing: a random start is above it, and to become unsure is"
        " no precision. Its root is, like the drift of attention, on the scale of a"
        " distance.",
        tables.markdown_table(scales),
    ]


def _opening(summary: dict[str, Any]) -> str:
    baseline = summary["baseline"]
    named: dict[str, list[str]] = {}
    for answer in _answers_of(summary, baseline):
        named.setdefault(answer["verdict"], []).append(answer["claim"])
    said = [
        f"**{verdict.capitalize()}**: {'; '.join(named[verdict])}."
        for verdict in ("held", "reversed", "undecided")
        if verdict in named
    ]
    if not said:
        return "None of the companion paper's claims can be read from these arms."
    return (
        f"What {summary['seeds']} seeds of {baseline} say of the companion paper's"
        f" claims. {' '.join(said)}"
    )


def _answers_of(summary: dict[str, Any], arm: str) -> list[dict[str, Any]]:
    """What an arm answered, and what settled first, if there are seeds enough."""
    entry = summary["arms"].get(arm, {})
    found = list(entry.get("answers", ()))
    times = entry.get("time_scales", {}).get("half")
    if times is not None and times["root_over_frame"]["ci95"] is not None:
        verdicts = {"frame": "held", "precision": "reversed"}
        found.append(
            {
                "claim": "attention settles before precision",
                "what": "steps to 50 % of the change, KL and its root over attention",
                "differences": [],
                "times": times,
                "verdict": verdicts.get(times["first"], "undecided"),
            }
        )
    return found


def _distance_table(
    summary: dict[str, Any], columns: dict[str, str]
) -> list[list[str]]:
    rows = [["arm", "parameters", *columns]]
    for arm, entry in summary["arms"].items():
        cells = [precise(entry[name]) for name in columns.values()]
        rows.append([arm, f"{entry['parameters']:,}", *cells])
    return rows


def _against_table(summary: dict[str, Any]) -> list[list[str]]:
    rows = [["arm", "times the KL", "parameters", "differs in"]]
    for arm, entry in summary["arms"].items():
        if arm != summary["baseline"] and entry["log_kl_over_baseline"]["n"]:
            ratio = times(entry["log_kl_over_baseline"])
            cells = ratio, f"{entry['parameters']:,}"
            rows.append([arm, *cells, entry["differs_in"]])
    return rows


def _longer_table(summary: dict[str, Any]) -> list[list[str]]:
    lengths = list(
        dict.fromkeys(n for e in summary["arms"].values() for n in e["longer"])
    )
    if not lengths:
        return []
    rows = [["arm", *(f"{length} x" for length in lengths)]]
    for arm, entry in summary["arms"].items():
        rows.append([arm, *(precise(entry["longer"][n]) for n in lengths)])
    return rows


def _answer_table(summary: dict[str, Any], arms: list[str]) -> list[list[str]]:
    rows = [["claim", "differences, 95 %", *arms]]
    claims = dict.fromkeys(
        (a["claim"], a["what"]) for arm in arms for a in _answers_of(summary, arm)
    )
    for claim, what in claims:
        cells = []
        for arm in arms:
            answer = [a for a in _answers_of(summary, arm) if a["claim"] == claim]
            cells.append(_answer_cell(answer[0]) if answer else "cannot be asked")
        rows.append([claim, what, *cells])
    return rows


def _answer_cell(answer: dict[str, Any]) -> str:
    if "times" in answer:
        ratios = (answer["times"][f"{n}_over_frame"] for n in ("precision", "root"))
        said = "; ".join(tables.median_cell(r, interval=True) for r in ratios)
    else:
        said = "; ".join(
            "none"
            if d["ci95"] is None
            else f"{d['mean']:+.2f} {tables.ends(d['ci95'])}"
            for d in answer["differences"]
        )
    return f"{answer['verdict']} ({said})"


def _geometry_table(found: dict[str, Any]) -> list[list[str]]:
    nulls = list(_NULLS)
    rows = [["question", "layer", "before training", "end", *_NULLS.values()]]
    for name, entry in found.items():
        for layer in range(len(entry["end"])):
            cells = [
                tables.mean(entry["start"][layer]),
                tables.mean(entry["end"][layer]),
            ]
            cells += [
                tables.mean(entry[null][layer]) if null in entry else ""
                for null in nulls
            ]
            place = layer if name == "belief_read_out" else layer + 1
            rows.append([_QUESTIONS[name], str(place), *cells])
    return [row for row in rows if row[3] != "none"]


def _ablation_table(found: dict[str, Any]) -> list[list[str]]:
    rows = [["part", "replaced by zero", "by its mean"]]
    depth = len(found.get("layer_zeroed", ()))
    for layer in range(depth):
        for part in ("head", "heads", "mlp", "layer"):
            if f"{part}_zeroed" not in found:
                continue
            both = (found[f"{part}_{how}"][layer] for how in ("zeroed", "averaged"))
            for number, entries in enumerate(zip(*both, strict=True), 1):
                if entries[0]["mean"] is None:
                    continue
                name = {
                    "head": f"layer {layer + 1}, head {number}",
                    "heads": f"layer {layer + 1}, all heads",
                    "mlp": f"layer {layer + 1}, MLP",
                    "layer": f"layer {layer + 1}, all of it",
                }[part]
                rows.append([name, *map(precise, entries)])
    return rows
