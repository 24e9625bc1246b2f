"""How attention and values moved, for report.md."""

from typing import Any

from jaxattn.analysis import observations
from jaxattn.views.tables import (
    bold,
    from_log,
    markdown_table,
    mean,
    median_cell,
    of_medians,
)


def observation_sections(summary: dict[str, Any]) -> list[str]:
    """How attention and values moved, for report.md."""
    found = summary["observations"]
    if found is None:
        return []
    where = "{positions} {sequence} positions".format(**summary["looked_at"])
    sections = [
        "## The paper's three observations",
        f"From here on attention, values and gradients are those of the first {where}.",
        "*Attention sharpens*: its entropy as a share of what it could be (1: equal"
        " shares). *Values move along few directions*: PC1 + PC2, the share of their"
        " motion along two axes, beside random walks with the same step lengths, in any"
        " direction or only in the span of the read-out (which LayerNorm on values and"
        " Adam leave a little). *The loss falls"
        " smoothly*: how often it rose from one evaluation to the next, and the sum of"
        " its changes over its fall (1: it never rose); on the training sequence, or"
        " where sequences are fresh on the held-out one. Means over seeds ± half a 95 %"
        " interval.",
        markdown_table(_three_table(found)),
        "## Frame and precision",
        "Steps until attention, by total variation (the frame), and what is learned"
        " (precision) had made a share of their total change, and how many times as"
        " long precision took on the same seed; medians over seeds"
        f"{of_medians(summary)}. Total variation is a distance, while near its end a"
        " divergence falls as the square of one and so reaches 50 % earlier: its root"
        " is on the same scale. An event is known only to the interval between two"
        " evaluations; the intervals include that (≤, ≥: by the first evaluation, at"
        " any time). One was first if the 95 % intervals of both ratios are on the same"
        " side of 1. Both changes end where the run ends. An arm whose values or whose"
        " attention is frozen is the control: what it shows needs no interplay of the"
        " two.",
        "50 %:",
        markdown_table(_time_table(found, "half")),
        "90 %:",
        markdown_table(_time_table(found, "most")),
        "## What drives routing",
        "The score gradient Σ_j |∂ℓ_i/∂s_ij| = gate x spread, at the end over that at"
        " the start (geometric mean over seeds, 95 % interval), below 1 if it slowed"
        " down: gate, how much of the difference between sources the attention lets"
        " through (1 for equal shares, 0 for one-hot); spread, how differently the"
        " unmasked sources would serve a query. The value gradient has no gate.",
        markdown_table(_gate_table(found)),
        "## Geometry",
        "From the first to the last evaluation. Before training keys are random"
        " projections, so that their first column is the null: mean |cos| between keys"
        " (0: orthogonal), weighted cos of queries and the keys they attend to,"
        " agreement of the queries that use a source (0 to 1), how unequally sources"
        " are used, in units of what equal shares would give them (Gini), participation"
        " ratio of the values.",
        markdown_table(_geometry_table(found)),
    ]
    against = _against_table(found)
    if len(against) > 1:
        sections += [
            f"## What each arm did, beside {summary['baseline']}",
            "Paired difference on the same seeds, mean ± half a 95 % interval; bold"
            " where that and the bootstrap's exclude 0; each is judged by itself, so"
            " that one of 20 may be wrong.",
            markdown_table(against),
        ]
    return sections


def _three_table(found: dict[str, Any]) -> list[list[str]]:
    rows = [
        [
            "arm",
            "entropy, start",
            "end",
            "PC1 + PC2",
            "any walk",
            "walk in the read-out",
            "above that",
            "rises",
            "roughness",
        ]
    ]
    names = (
        *("relative_entropy_start", "relative_entropy_end", "path_share", "walk_share"),
        *("readout_walk_share", "above_readout_walk", "loss_rises", "loss_roughness"),
    )
    for arm, entry in found.items():
        signs = {"above_readout_walk": "+"}
        rows.append([arm, *(mean(entry[n], signs.get(n, "")) for n in names)])
    return rows


def short_table(found: dict[str, Any]) -> list[list[str]]:
    """The observations of each arm, for a terminal."""
    rows = [["arm", "entropy", "PC1 + PC2", "rises", "precision / attention"]]
    for arm, entry in found.items():
        start, end = (entry[f"relative_entropy_{w}"]["mean"] for w in ("start", "end"))
        shares = (entry[n]["mean"] for n in ("path_share", "readout_walk_share"))
        share, walk = ("none" if s is None else f"{s:.2f}" for s in shares)
        rises = entry["loss_rises"]["mean"]
        rows.append(
            [
                arm,
                "none" if start is None else f"{start:.2f} to {end:.2f}",
                f"{share} ({walk})",
                "none" if rises is None else f"{rises:.1f}",
                median_cell(
                    entry["time_scales"]["half"]["root_over_frame"], interval=True
                ),
            ]
        )
    return rows


def _time_table(found: dict[str, Any], share: str) -> list[list[str]]:
    rows = [["arm", "frame", "precision", "its root"]]
    rows[0] += ["precision / frame", "root / frame", "first"]
    for arm, entry in found.items():
        times = entry["time_scales"][share]
        ratios = (times[f"{name}_over_frame"] for name in ("precision", "root"))
        rows.append(
            [
                arm,
                *(median_cell(times[name]) for name in ("frame", "precision", "root")),
                *(median_cell(ratio, interval=True) for ratio in ratios),
                times["first"],
            ]
        )
    return rows


def _gate_table(found: dict[str, Any]) -> list[list[str]]:
    rows = [["arm", "score gradient", "gate", "spread", "value gradient"]]
    for arm, entry in found.items():
        ratios = (entry["log_ratio"][name] for name in observations.DRIVES)
        rows.append([arm, *map(from_log, ratios)])
    return rows


_GEOMETRY = {
    "keys": "key_orthogonality",
    "query and key": "query_key_alignment",
    "agreement": "specialisation",
    "Gini": "usage_gini",
    "value dimension": "value_dimension",
}


def _geometry_table(found: dict[str, Any]) -> list[list[str]]:
    rows = [["arm", *(c for n in _GEOMETRY for c in (f"{n}, start", "end"))]]
    for arm, entry in found.items():
        names = (f"{n}_{when}" for n in _GEOMETRY.values() for when in ("start", "end"))
        rows.append([arm, *(mean(entry[name]) for name in names)])
    return rows


_AGAINST = {
    "train loss": "train_loss_end",
    "attention entropy": "relative_entropy_end",
    "PC1 + PC2": "path_share",
    "roughness": "loss_roughness",
    "agreement": "specialisation_end",
    "value dimension": "value_dimension_end",
    "attention moved": "moved",
}


def _against_table(found: dict[str, Any]) -> list[list[str]]:
    rows = [["arm", "differs in", *_AGAINST]]
    for arm, entry in found.items():
        if "against_baseline" in entry:
            against, differs = entry["against_baseline"], entry["differs_in"]
            differences = (bold(against[name]) for name in _AGAINST.values())
            rows.append([arm, differs, *differences])
    return rows
