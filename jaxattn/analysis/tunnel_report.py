"""Tables of a run in a wind tunnel: summary.json, report.md, the terminal.

What `report` says of every run, and beside it what only exact Bayes and layers allow:
distances in bits, geometry beside its nulls, ablation, longer sequences, and which of
the companion paper's claims held.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxattn.analysis import observations, report, stats
from jaxattn.analysis.runs import Run

# In bits or shares, over scored positions of held-out sequences. KL and total variation
# are 0 for exact Bayes alone, entropy errors and calibration for others too.
DISTANCES = {
    "KL, bits": "heldout_kl_bits",
    "total variation": "heldout_total_variation",
    "entropy error": "heldout_entropy_error_bits",
    "averaged": "heldout_averaged_entropy_error_bits",
    "calibration": "calibration_error",
    "accuracy": "accuracy",
}
# The same for 80 characters.
_SHORT = {
    "KL, bits": "heldout_kl_bits",
    "accuracy": "accuracy",
    "TV": "heldout_total_variation",
}
# Question -> nulls of the finished model, beside its start (random initialisation).
GEOMETRY: dict[str, tuple[str, ...]] = {
    "key_orthogonality": ("random", "shuffled"),
    "relative_entropy": (),
    "query_key_alignment": (),
    "entropy_axis": ("random", "permuted"),
    "entropy_axis_within": ("random", "permuted"),
    "main_axis_share": (),
    "belief_read_out": ("permuted",),
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
_LEAST_DAMAGE = 0.1  # of the KL with all in place, below which parts say nothing


class Answer(NamedTuple):
    """One of the companion paper's claims, asked of an arm."""

    claim: str
    what: str  # is compared
    differences: tuple[np.ndarray, ...]  # (seed,), all below 0 where it holds


def summarise(run: Run, wall_seconds: dict[str, float]) -> dict[str, Any]:
    """What a program reads of a run in a wind tunnel, see `report.summarise`.

    Args:
      run: metrics and config.
      wall_seconds: "compile" and "run".
    """
    summary = report.summarise(run, wall_seconds)
    size, run = run.metrics["parameters"][:, 0], finite_alone(run)
    fields = run.config["config"]["task"]
    positions = report.task_of(run).tunnel.scored(ConfigDict(fields))
    summary["looked_at"]["positions"] = positions
    summary["longer_by"] = report.task_of(run).tunnel.longer
    for row, (arm, entry) in enumerate(summary["arms"].items()):
        for name in DISTANCES.values():
            entry[name] = _entry(run.metrics[name][row, :, -1])
        entry["parameters"] = int(size[row])
        entry["differs_in"] = _differing(run.config["config"], arm)
        entry["positions"] = {
            name: _entries(run.metrics[name][row, :, -1])
            for name in run.metrics
            if name.startswith("position_") and run.metrics[name].ndim == 4
        }
        entry["longer"] = _longer(run, row)
        entry["log_kl_over_baseline"] = _over_baseline(run, summary, row)
        if attends(run, row):
            entry["geometry"] = _geometry(run, row)
            entry["ablation"] = _ablation(run, row)
            entry["time_scales"] = {
                name: observations.scales_entry(
                    observations.time_scales(settling(run), row, share),
                    run.metrics["step"],
                )
                for name, share in observations.SHARES.items()
            }
            entry["answers"] = [_judged(answer) for answer in answers(run, row)]
    return summary


def finite_alone(run: Run) -> Run:
    """The run with NaN for all numbers of seeds that diverged."""
    finite = report.stayed_finite(run)

    def masked(name: str, values: np.ndarray) -> np.ndarray:
        if run.axes["axes"][name][:2] != ["arm", "seed"] or name == "diverged_step":
            return values
        shape = finite.shape + (1,) * (values.ndim - 2)
        return np.where(finite.reshape(shape), values, np.nan)

    return run._replace(metrics={n: masked(n, v) for n, v in run.metrics.items()})


def model_field(run: Run, row: int, name: str) -> Any:
    """What an arm's model has in a field, its own or that of the config."""
    config = run.config["config"]
    arm = config["arms"][config["run_arms"][row]]
    return arm.get(name, config["model"][name])


def attends(run: Run, row: int) -> bool:
    """Whether an arm has attention at all."""
    return model_field(run, row, "kind") == "transformer"


def settling(run: Run) -> Run:
    """The run with what `observations.time_scales` is to ask of it.

    The drift of attention is a mean over layers and heads. KL counts from where it is
    that of knowing nothing, log C - H(Bayes): a random start is above, and to become
    unsure first is no precision.

    Args:
      run: in which some arm has attention.
    """
    drift = _mean(run.metrics["attention_drift"], axes=(3, 4))
    of_bayes = run.metrics["bayes_predictive_entropy"]
    nothing = math.log(report.num_classes(run)) - of_bayes[..., None]
    kl = np.minimum(run.metrics["heldout_kl"], nothing)
    changed = {"attention_drift": drift, "heldout_kl": kl}
    return run._replace(metrics=run.metrics | changed)


def of_layers(run: Run, row: int, name: str) -> np.ndarray:
    """A curve of layers at every evaluation, heads averaged: (seed, eval, layer).

    Args:
      run: its metrics.
      row: of the arm.
      name: of a curve, or of a trait, whose evaluation is then the last alone.

    Returns:
      As many layers as the arm has, or one more of a stream.
    """
    values = run.metrics[name][row]
    names = run.axes["axes"][name]
    if "eval" not in names:
        values = values[:, None]
    if "head" in names:
        values = _mean(values, axes=(values.ndim - 1,))
    return values[..., : model_field(run, row, "depth") + ("stream" in names)]


def _mean(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Mean of what is finite; NaN where nothing is."""
    known = np.isfinite(values)
    total = np.where(known, values, 0).sum(axis=axes)
    count = known.sum(axis=axes)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def answers(run: Run, row: int) -> list[Answer]:
    """What an arm says of the companion paper's claims; those it cannot are left out.

    A claim needs more than its number: keys more orthogonal than they were before
    training, and than random ones; values ordered by entropy more than by position.

    Args:
      run: from `finite_alone`.
      row: of an arm with attention.
    """
    last = {
        name: of_layers(run, row, name)[:, -1]
        for question, nulls in GEOMETRY.items()
        for name in (question, *(f"{question}_{null}" for null in nulls))
    }
    first = {name: of_layers(run, row, name)[:, 0] for name in GEOMETRY}
    keys, entropy = last["key_orthogonality"], last["relative_entropy"]
    found = [
        Answer(
            "keys become orthogonal axes (layer 1)",
            "mean abs. cosine at the end, less before training, less random keys",
            (
                keys[:, 0] - first["key_orthogonality"][:, 0],
                keys[:, 0] - last["key_orthogonality_random"][:, 0],
            ),
        ),
        Answer(
            "values are ordered by posterior entropy (last layer)",
            "rank correlation before training, along a random direction, with another"
            " sequence's entropies; each less what was found",
            tuple(
                null[:, -1] - last["entropy_axis"][:, -1]
                for null in (
                    first["entropy_axis"],
                    last["entropy_axis_random"],
                    last["entropy_axis_permuted"],
                )
            ),
        ),
        Answer(
            "values are ordered by entropy within a position (last layer)",
            "the same, of what is left when each position's mean is taken away",
            tuple(
                null[:, -1] - last["entropy_axis_within"][:, -1]
                for null in (
                    first["entropy_axis_within"],
                    last["entropy_axis_within_random"],
                    last["entropy_axis_within_permuted"],
                )
            ),
        ),
        Answer(
            "the stream holds the belief (behind the last layer)",
            "R² before training, of permuted beliefs; less what was found",
            (
                first["belief_read_out"][:, -1] - last["belief_read_out"][:, -1],
                last["belief_read_out_permuted"][:, -1]
                - last["belief_read_out"][:, -1],
            ),
        ),
    ]
    if entropy.shape[1] > 1:
        steeper = entropy[:, -1] - entropy[:, 0]
        before = first["relative_entropy"][:, -1] - first["relative_entropy"][:, 0]
        sharpening = Answer(
            "attention sharpens with depth",
            "relative entropy of the last layer less the first; that less before",
            (steeper, steeper - before),
        )
        found.insert(1, sharpening)
    shares = largest_shares(run, row)
    if shares is not None:
        found.append(
            Answer(
                "heads share the work",
                "the most that one head's absence costs, as a share of what that of all"
                " heads of its layer does; less a half",
                (shares - 0.5,),
            )
        )
    return [a for a in found if all(np.isfinite(d).any() for d in a.differences)]


def largest_shares(run: Run, row: int) -> np.ndarray | None:
    """The largest share of its layer's work that one head does, over layers, (seed,).

    What its absence costs over what that of all heads of the layer costs, each replaced
    by its mean. A layer whose heads cost next to nothing says nothing.

    Args:
      run: from `finite_alone`.
      row: of an arm with attention.

    Returns:
      About 1 where one head does all, 1/H where H do as much each, about 0 where any
      can stand in for another; NaN of seeds that say nothing; None of single heads.
    """
    heads = model_field(run, row, "heads")
    if heads < 2:
        return None
    depth = model_field(run, row, "depth")
    base = run.metrics["heldout_kl_bits"][row, :, -1]
    single = run.metrics["head_averaged_kl_bits"][row, :, :depth, :heads]
    together = run.metrics["heads_averaged_kl_bits"][row, :, :depth] - base[:, None]
    single = np.maximum(single - base[:, None, None], 0).max(axis=2)
    says = together > _LEAST_DAMAGE * base[:, None]
    share = np.where(says, single / np.where(says, together, 1), -np.inf).max(axis=1)
    return np.where(np.isfinite(share), share, np.nan)


# Nothing in it is of wind tunnels alone.
csv_table = report.csv_table


def terminal(summary: dict[str, Any]) -> str:
    """The report for a terminal of 80 columns."""
    blocks = [
        f"{summary['config']}: {summary['seeds']} seeds, {summary['steps']} steps,"
        " last evaluation,\nmean ± half a 95 % interval; distances to exact Bayes",
        report.text_table(_distance_table(summary, _SHORT)),
        report.floor_line(summary),
    ]
    rows = _longer_table(summary)
    if rows:
        title = f"KL to Bayes in bits, with so many times the {summary['longer_by']}"
        blocks += [title, report.text_table(rows)]
    lines = [
        f"{answer['verdict']:<9}  {answer['claim']}"
        for answer in _answers_of(summary, summary["baseline"])
    ]
    if lines:
        title = f"The companion paper's claims, of {summary['baseline']}"
        blocks.append("\n".join([title, *lines]))
    blocks += [report.flag_block(summary), report.trained_block(summary)]
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
        *report.trained_section(summary),
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
        report.markdown_table(_distance_table(summary, DISTANCES)),
        "Rates are the config's, and tuned for no arm.",
        report.floor_line(summary),
    ]
    parts += report.flag_section(summary)
    against = _against_table(summary)
    if len(against) > 1:
        parts += [
            f"## Against {baseline}",
            f"How many times {baseline}'s KL an arm has, on the same seeds (geometric"
            " mean and 95 % interval), and what is different about it.",
            report.markdown_table(against),
        ]
    rows = _longer_table(summary)
    if rows:
        parts += [
            "## Longer than trained",
            f"KL to Bayes in bits on sequences with so many times the"
            f" `{summary['longer_by']}` trained on.",
            report.markdown_table(rows),
        ]
    answered = [arm for arm in summary["arms"] if _answers_of(summary, arm)]
    if answered:
        parts += [
            "## The companion paper's claims",
            "A claim holds if all its differences are below 0: the 95 % intervals of"
            " Student and of the bootstrap, on these seeds; reversed if all are above."
            " Of time scales there are two ratios, of KL and its root to attention:"
            " attention was first if both are above 1; they need 6 seeds. Each claim"
            " stands alone, so that of 20 one may be wrong.",
            report.markdown_table(_answer_table(summary, answered)),
        ]
    for arm in answered:
        if arm == baseline or baseline not in answered:
            parts += _of_arm(summary, arm)
    parts += report.claim_section(summary)
    parts += report.picture_section(figures)
    return "\n\n".join(parts) + "\n"


def _of_arm(summary: dict[str, Any], arm: str) -> list[str]:
    entry = summary["arms"][arm]
    scales = [["share of the way", "attention", "KL", "√KL", "KL / attention", "√KL"]]
    for name, found in entry["time_scales"].items():
        cells = [
            report.median_cell(found[part]) for part in ("frame", "precision", "root")
        ]
        cells += [
            report.median_cell(found[f"{part}_over_frame"], interval=True)
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
        report.markdown_table(_geometry_table(entry["geometry"])),
        f"## What {arm} loses without a part",
        "KL to Bayes in bits with one head, one MLP or a whole layer replaced by zero"
        " or by its mean over sequences and positions; with all in place"
        f" {precise(entry['heldout_kl_bits'])}.",
        report.markdown_table(_ablation_table(entry["ablation"])),
        "## Frame and precision",
        "Steps until attention (total variation to where it ends, mean over heads) and"
        " KL had a share of their way behind them for good, and how many times as long"
        " KL and its root took; medians over seeds"
        f"{report.of_ratios(summary)}; ≤: by the first one. KL counts from"
        " that of knowing nothing: a random start is above it, and to become unsure is"
        " no precision. Its root is, like the drift of attention, on the scale of a"
        " distance.",
        report.markdown_table(scales),
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


# --- entries


def _entry(values: np.ndarray) -> dict[str, Any]:
    return stats.estimate(values)._asdict()


def _entries(values: np.ndarray) -> list[dict[str, Any]]:
    """Of (seed, places), an estimate for each place."""
    return [_entry(column) for column in values.T]


def _longer(run: Run, row: int) -> dict[str, dict[str, Any]]:
    """KL in bits on sequences longer than trained, up to each of some lengths."""
    if "long_kl_bits" not in run.metrics:
        return {}
    kl = run.metrics["long_kl_bits"][row]
    config = ConfigDict(run.config["config"])
    trained, longest = report.task_of(run).tunnel.scored(config.task), kl.shape[1]
    if longest == trained:  # longer by what is not asked for
        return {f"{config.stretch:g}": _entry(kl.mean(axis=1))}
    lengths = sorted({1.0, 1.5, 2.5, config.stretch})
    return {
        f"{factor:g}": _entry(kl[:, : round(factor * trained)].mean(axis=1))
        for factor in lengths
        if factor <= config.stretch
    }


def _over_baseline(run: Run, summary: dict, row: int) -> dict[str, Any]:
    """How many times the baseline's KL, as mean and interval of logarithms."""
    arms, baseline = list(summary["arms"]), summary["baseline"]
    if baseline not in arms:
        return _entry(np.array([]))
    kl = run.metrics["heldout_kl_bits"][..., -1].astype(np.float64)
    kl = np.where(kl > 0, kl, np.nan)
    return _entry(np.log(kl[row]) - np.log(kl[arms.index(baseline)]))


def _differing(config: dict[str, Any], arm: str) -> str:
    """The fields of an arm that are not those of the baseline, or not of its model."""
    mine, theirs = config["arms"][arm], config["arms"][config["baseline"]]
    theirs = config["model"] | {"value_norm": False, "dropout_rate": 0.0} | theirs
    said = {True: "on", False: "off"}
    return ", ".join(
        f"{name} {said[value] if isinstance(value, bool) else value}"
        for name, value in mine.items()
        if theirs.get(name) != value
    )


def _geometry(run: Run, row: int) -> dict[str, Any]:
    found = {}
    for name, nulls in GEOMETRY.items():
        values = of_layers(run, row, name)
        found[name] = {
            "start": _entries(values[:, 0]),
            "end": _entries(values[:, -1]),
        }
        for null in nulls:
            found[name][null] = _entries(of_layers(run, row, f"{name}_{null}")[:, -1])
    return found


def _ablation(run: Run, row: int) -> dict[str, Any]:
    found = {}
    for part in ("head", "heads", "mlp", "layer"):
        for how in ("zeroed", "averaged"):
            name = f"{part}_{how}_kl_bits"
            if name not in run.metrics:
                continue
            values = run.metrics[name][row][:, : model_field(run, row, "depth")]
            if np.isfinite(values).any():
                by_layer = np.moveaxis(values.reshape(*values.shape[:2], -1), 1, 0)
                found[f"{part}_{how}"] = [_entries(layer) for layer in by_layer]
    return found


def _judged(answer: Answer) -> dict[str, Any]:
    zeros = np.zeros_like(answer.differences[0])
    # All are between shares or cosines, numbers of about 1.
    found = [
        stats.paired_difference(d, zeros)._replace(rounding=stats.ROUNDING)
        for d in answer.differences
    ]
    signs = {stats.sign(difference) for difference in found}
    verdict = signs.pop() if len(signs) == 1 else 0
    return {
        "claim": answer.claim,
        "what": answer.what,
        "differences": [report.difference_entry(d) for d in found],
        "verdict": report.VERDICTS[verdict],
    }


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
                "what": "steps to half of the way, KL and its root over attention",
                "differences": [],
                "times": times,
                "verdict": verdicts.get(times["first"], "undecided"),
            }
        )
    return found


# --- tables


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
        said = "; ".join(report.median_cell(r, interval=True) for r in ratios)
    else:
        said = "; ".join(
            "none"
            if d["ci95"] is None
            else f"{d['mean']:+.2f} {report.ends(d['ci95'])}"
            for d in answer["differences"]
        )
    return f"{answer['verdict']} ({said})"


def _geometry_table(found: dict[str, Any]) -> list[list[str]]:
    nulls = list(_NULLS)
    rows = [["question", "layer", "before training", "end", *_NULLS.values()]]
    for name, entry in found.items():
        for layer in range(len(entry["end"])):
            cells = [
                report.mean(entry["start"][layer]),
                report.mean(entry["end"][layer]),
            ]
            cells += [
                report.mean(entry[null][layer]) if null in entry else ""
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
