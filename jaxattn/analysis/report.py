"""Tables from a run directory: summary.json, summary.csv, report.md, the terminal."""

import csv
import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxattn.analysis import observations, stats
from jaxattn.analysis.runs import Run, differing
from jaxattn.experiments import one_head
from jaxattn.experiments.one_head import METRICS
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


class Claim(NamedTuple):
    """What the paper says of two arms: the first has less of something."""

    text: str
    arm: str
    baseline: str
    metric: str


# By the names that configs give their arms; those of which an arm did not run are left
# out. Less loss, less distance, and less entropy where attention is sharper.
CLAIMS = (
    Claim("EM over SGD, same base rate", "em", "sgd", "train_loss"),
    Claim("EM over SGD, same base rate, held out", "em", "sgd", "heldout_kl"),
    Claim("EM over SGD, matched rates", "em", "sgd_matched", "train_loss"),
    Claim("EM over SGD, matched rates, held out", "em", "sgd_matched", "heldout_kl"),
    Claim("closed-form EM over SGD, held out", "em_majorised", "sgd", "heldout_kl"),
    Claim(
        "closed-form EM over sgd_matched, held out",
        "em_majorised",
        "sgd_matched",
        "heldout_kl",
    ),
    Claim("sharper attention, same base rate", "em", "sgd", "attention_entropy"),
    Claim("sharper attention, matched rates", "em", "sgd_matched", "attention_entropy"),
)
# The same of a task that shows what it learns on the training sequence.
_OWN_COLUMNS = {
    "train loss": "train_loss",
    "accuracy": "train_accuracy",
    "entropy": "train_predictive_entropy",
    "attention entropy": "train_attention_entropy",
}
_METRIC_NAMES = {
    "train_attention_entropy": "attention entropy",
    "train_loss": "train loss",
    "heldout_kl": "KL",
    "attention_entropy": "attention entropy",
}
VERDICTS = {-1: "held", 1: "reversed", 0: "undecided"}
_VERDICT_ORDER = ("held", "better", "reversed", "worse", "undecided")
# The share of the way from chance to Bayes below which nothing was learned to speak of.
_LEFT_CHANCE = 0.1


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
    final = final_metrics(run)
    chance = math.log(num_classes(run))
    finite = stayed_finite(run)

    gap = run.metrics["train_loss"] - run.metrics["train_bayes_nll"]
    below_bayes = beats_bayes(gap, fresh=config["fresh"])
    way = way_to_bayes(final, chance)
    by_arm = {}
    for row, arm in enumerate(arms):
        kept = finite[row]
        entry: dict[str, Any] = {
            name: stats.estimate(values[row])._asdict()
            for name, values in final.items()
        }
        since = run.metrics["diverged_step"][row][~kept]
        entry |= divergence_entry(since)
        # Where all that can be learned is memory, memory is no warning.
        judged = kept & (task_of(run).shown == "heldout")
        entry["flags"] = flags(
            diverged=since,
            below_bayes=int(below_bayes[row][judged].sum()),
            way=way[row][judged],
            seeds=len(kept),
        )
        by_arm[arm] = entry

    return {
        "config": config["name"],
        "steps": config["steps"],
        "seeds": config["seeds"],
        "first_evaluation": int(run.metrics["step"][1]),
        "complete": True,
        "wall_seconds": wall_seconds,
        "trained_with": trained_with(run),
        # The sequences are the same for every arm.
        "floors": floors(run, {n: v[0, :, -1] for n, v in metrics_of(run).items()}),
        "arms": by_arm,
        "baseline": config["baseline"],
        "comparisons": _comparisons(run, final),
        "claims": _claims(run, final),
        "looked_at": looked_at(run),
        "observations": observations.of_arms(run),
        "task_note": task_of(run).note,
    }


def trained_with(run: Run) -> str:
    """Versions and device, on which the last bits of a run depend."""
    versions = run.config.get("versions", {})
    named = {"jaxattn": "jaxattn", "jax": "jax", "python": "Python"}
    parts = [f"{text} {versions[n]}" for n, text in named.items() if n in versions]
    return ", ".join([*parts, f"on {run.config.get('device', {}).get('kind', '?')}"])


def stayed_finite(run: Run) -> np.ndarray:
    """Whether weights and metrics were always finite: (arm, seed), or as in a grid."""
    return run.metrics["diverged_step"] < 0


def divergence_entry(since: np.ndarray) -> dict[str, int | None]:
    """How many seeds diverged, and when the first did.

    Args:
      since: the steps at which they did.
    """
    first = int(since.min()) if len(since) else None
    return {"diverged": len(since), "first_diverged_step": first}


def final_metrics(run: Run) -> dict[str, np.ndarray]:
    """Every metric at the end, NaN for a seed that diverged on the way."""
    finite = stayed_finite(run)
    return {
        name: np.where(finite, values[..., -1], np.nan)
        for name, values in metrics_of(run).items()
    }


def metrics_of(run: Run) -> dict[str, np.ndarray]:
    """The curves that all kinds of runs have; of layers there is one less."""
    return {name: run.metrics[name] for name in METRICS if name in run.metrics}


def floors(run: Run, final: dict[str, np.ndarray]) -> dict[str, Any]:
    """What no model can beat, and what it takes no learning to reach, in nats.

    Args:
      run: its config says which task.
      final: metric -> one value for each seed.
    """
    fields = ConfigDict(run.config["config"]["task"])
    return {
        "entropy_rate": catalogue.TASKS[fields.name].entropy_rate(fields),
        "bayes_heldout_nll": _interval(stats.estimate(final["heldout_bayes_nll"])),
        "bayes_train_nll": _interval(stats.estimate(final["train_bayes_nll"])),
        "chance": math.log(num_classes(run)),
    }


def way_to_bayes(final: dict[str, np.ndarray], chance: float) -> np.ndarray:
    """Share of the way from chance to exact Bayes that the held-out loss has come.

    Args:
      final: metric -> one value for each seed, of any leading shape.
      chance: loss of equal shares, nats.

    Returns:
      Below 0 if the loss is above chance. On a sequence so odd that Bayes itself is no
      better than chance, 1 for a loss that is not above chance.
    """
    come, whole = chance - final["heldout_loss"], chance - final["heldout_bayes_nll"]
    return np.where(
        whole > 0, come / np.where(whole > 0, whole, 1), np.sign(come) + (come == 0)
    )


def beats_bayes(gap: np.ndarray, *, fresh: bool) -> np.ndarray:
    """Whether each seed's train loss passes below the Bayes floor.

    Args:
      gap: train loss less that of exact Bayes on the same sequence (..., evaluation).
      fresh: if so the average over the evaluations counts, since on a sequence of its
        own a good model may be the luckier one; if not, any evaluation does.

    Returns:
      (...) boolean; by more than rounding.
    """
    least = -stats.ROUNDING  # of losses of about a nat
    return gap[..., 1:].mean(axis=-1) < least if fresh else (gap < least).any(axis=-1)


def flags(
    *, diverged: np.ndarray, below_bayes: int, way: np.ndarray, seeds: int
) -> list[str]:
    """Warnings about one arm, each with the number of seeds it holds for.

    Args:
      diverged: steps at which seeds did.
      below_bayes: seeds for which `beats_bayes`.
      way: `way_to_bayes` of the others.
      seeds: all of them.
    """
    found = {
        "diverged": len(diverged),
        "train loss below the Bayes floor": below_bayes,
        "held-out loss above chance": int((way < 0).sum()),
        "not left chance": int(((way >= 0) & (way < _LEFT_CHANCE)).sum()),
    }
    lines = {t: f"{t} in {k} of {seeds} seeds" for t, k in found.items() if k > 0}
    if "diverged" in lines:
        lines["diverged"] += f", the first at step {diverged.min()}"
    return list(lines.values())


def looked_at(run: Run) -> dict[str, Any]:
    """On what diagnostics are: which sequence, and how many of its positions."""
    config = ConfigDict(run.config["config"])
    positions = one_head.shown_length(config, config.get("diagnostics_length", 0))
    sequence = {"heldout": "held-out", "train": "training"}[task_of(run).shown]
    return {"sequence": sequence, "positions": positions}


def moved(run: Run) -> np.ndarray:
    """Whether the parameters of each arm changed on any seed: (arm,) boolean.

    As its loss on sequences that are the same at every evaluation tells.
    """
    loss = run.metrics["heldout_loss"]
    return (loss != loss[..., :1]).any(axis=(1, 2))


def _claims(run: Run, final: dict) -> list[dict]:
    arms, shown = run.config["config"]["run_arms"], task_of(run).shown
    still = {arm for arm, has in zip(arms, moved(run), strict=True) if not has}
    found = []
    for claim in CLAIMS:
        if claim.arm not in arms or claim.baseline not in arms:
            continue
        if shown == "train" and claim.metric == "heldout_kl":
            continue
        if shown == "train" and claim.metric == "attention_entropy":
            claim = claim._replace(metric="train_attention_entropy")
        values = final[claim.metric]
        row, base = arms.index(claim.arm), arms.index(claim.baseline)
        difference = stats.paired_difference(values[row], values[base])
        found.append(claim_entry(claim, difference))
        never = [arm for arm in (claim.arm, claim.baseline) if arm in still]
        if never:  # whoever moves at all would win or lose
            found[-1] |= {"verdict": "none", "never_moved": never}
    return found


def claim_entry(
    claim: Claim, difference: stats.Difference, verdicts: dict[int, str] = VERDICTS
) -> dict[str, Any]:
    """A claim as it stands in summary.json, with its verdict."""
    return {
        "claim": claim.text,
        "arm": claim.arm,
        "baseline": claim.baseline,
        "metric": claim.metric,
        "paired_difference": difference_entry(difference),
        "verdict": verdicts[stats.sign(difference)],
    }


def _comparisons(run: Run, final: dict) -> list[dict[str, Any]]:
    config = run.config["config"]
    arms, baseline = config["run_arms"], config["baseline"]
    if baseline not in arms:
        return []
    base = arms.index(baseline)
    comparisons = []
    for row, arm in enumerate(arms):
        if row == base:
            continue
        entry = {
            "arm": arm,
            "baseline": baseline,
            "paired_difference": {
                name: difference_entry(
                    stats.paired_difference(values[row], values[base])
                )
                for name, values in final.items()
            },
        }
        for metric, names in _SPEEDUPS.items():
            entry |= zip(names, _speedup(run, metric, row, base), strict=True)
        comparisons.append(entry)
    return comparisons


def _speedup(
    run: Run, metric: str, row: int, base: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Steps of an arm to where the baseline ended, and how many times fewer they are.

    Both are counted alike, see `times_to_baseline`, so that an arm is as fast as its
    copy.
    """
    times, base_times = (times_to_baseline(run, metric, r, base) for r in (row, base))
    speedup = stats.median_ratio(base_times, times, run.metrics["step"])
    return times_entry(times), speedup_entry(speedup)


def times_entry(times: np.ndarray) -> dict[str, Any]:
    """Steps of each seed, inf if it never got there, as they stand in summary.json."""
    median = stats.median(times)
    reached = int(np.isfinite(times).sum())
    return {"median": median.median, "reached": reached, "n": median.n}


def speedup_entry(speedup: stats.Median) -> dict[str, Any]:
    """A speed-up as it stands in summary.json.

    `beyond` tells what None stands for at the low end, the median and the high end:
    of a median "<" below 1, since the arm came later than the run, ">" above 1, since
    the baseline did, "?" not known, "≥" at least so much; of an end "<" 0, ">" no
    bound. See `stats.Median`.
    """
    return {
        "median": speedup.median,
        "ci95": speedup.ci95,
        "beyond": speedup.beyond,
        "n": speedup.n,
    }


def _interval(estimate: stats.Estimate) -> dict[str, Any]:
    return {"mean": estimate.mean, "ci95": estimate.ci95, "n": estimate.n}


def difference_entry(difference: stats.Difference) -> dict[str, Any]:
    """A paired difference as it stands in summary.json."""
    entry = difference._asdict()
    del entry["std"]
    return entry


def task_of(run: Run) -> catalogue.Entry:
    """What there is to know of the run's task."""
    return catalogue.TASKS[run.config["config"]["task"]["name"]]


def num_classes(run: Run) -> int:
    """Number of classes of the run's task."""
    return task_of(run).num_classes(ConfigDict(run.config["config"]["task"]))


def learned_name(run: Run) -> str:
    """What a run without a grid calls precision."""
    learned = task_of(run).learned
    return {
        "heldout_kl": "precision: KL to Bayes",
        "train_loss": "precision: train loss",
    }[learned]


def bayes_floors(run: Run) -> dict[str, float | None]:
    """What exact Bayes has of each metric, mean over seeds; None if it is not known."""
    found = {
        "train_loss": run.summary["floors"]["bayes_train_nll"]["mean"],
        "heldout_loss": run.summary["floors"]["bayes_heldout_nll"]["mean"],
    }
    for name in ("accuracy", "predictive_entropy"):
        of_seeds = run.metrics.get(f"bayes_{name}")
        found[name] = None if of_seeds is None else stats.estimate(of_seeds[0]).mean
    return found


def times_to_baseline(run: Run, metric: str, row: int, base: int) -> np.ndarray:
    """Steps of an arm to where the baseline ended, on each seed.

    To the first evaluation at or below the baseline's last value on that seed. A seed
    on which the baseline diverged, or ended no lower than it began, has no such place.

    Args:
      run: its metrics.
      metric: whose curve must come down.
      row: of the arm.
      base: row of the baseline.

    Returns:
      (seed,), inf if it never got there or diverged, NaN without a place.
    """
    finite, curves = stayed_finite(run), run.metrics[metric]
    learned = finite[base] & stats.less(curves[base, :, -1], curves[base, :, 0])
    threshold = np.where(learned, curves[base, :, -1], np.nan)
    times = stats.first_reached(run.metrics["step"], curves[row], threshold)
    return np.where(finite[row] | np.isnan(times), times, np.inf)


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
    elif summary["baseline"] not in summary["arms"]:
        blocks.append(
            f"No comparison: {summary['baseline']}, the baseline, did not run"
        )
    blocks.append(
        claim_block(
            summary, "The paper's claims, paired differences at the end in nats"
        )
    )
    if summary["observations"] is not None:
        blocks += [
            "Entropy of attention (1: equal shares); share of the values' motion along"
            "\nPC1 + PC2 (of random walks in the read-out's span); how often the loss"
            " rose;\nhow many times as long as attention the root of precision took to"
            " half of\nits way, medians",
            text_table(_short_table(summary["observations"])),
        ]
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
    parts += claim_section(summary) + _observation_sections(summary)
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
        " Attention settles first (how many times as long precision took to half of its"
        f" way, and its square root): {'; '.join(parts)}."
    )


def verdict_sentences(summary: dict[str, Any]) -> str:
    """The claims of a run, those of one verdict together."""
    sentences = []
    for verdict in _VERDICT_ORDER:
        said = [_said(c) for c in summary["claims"] if c["verdict"] == verdict]
        if said:
            sentences.append(f"**{verdict.capitalize()}**: {'; '.join(said)}.")
    return " ".join(sentences)


def claim_block(summary: dict[str, Any], title: str) -> str:
    """The claims of a run for a terminal, a line each."""
    lines = [f"{c['verdict']:<9}  {_said(c)}" for c in summary["claims"]]
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
        "Below the Bayes floor: the training sequence is remembered, not understood."
        " Not left chance: the held-out loss has come less than"
        f" {_LEFT_CHANCE:.0%} of the way from chance to exact Bayes.",
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
        " of float32; each stands alone, so that of 20 one may be wrong.",
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


def _observation_sections(summary: dict[str, Any]) -> list[str]:
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
        " motion along two axes, beside random walks of as long steps, in any direction"
        " or only in those in which the read-out lets the loss pull (which LayerNorm on"
        " values and Adam leave a little). *The loss falls"
        " smoothly*: how often it rose from one evaluation to the next, and the sum of"
        " its changes over its fall (1: it never rose); on the training sequence, or"
        " where sequences are fresh on the held-out one. Means over seeds ± half a 95 %"
        " interval.",
        markdown_table(_three_table(found)),
        "## Frame and precision",
        "Steps until attention, by total variation (the frame), and what is learned"
        " (precision) had a share of their way to where they ended behind them, and how"
        " many times as long precision took on the same seed; medians over seeds"
        f"{of_medians(summary)}. Total variation is a distance, while near its end a"
        " divergence falls as the square of one and so has half of it behind it"
        " earlier: its root is on the same scale. Either was there some time after the"
        " evaluation before the one that found it, and the intervals hold all that this"
        " leaves open (≤, ≥: by the first evaluation, at any time). One was first if"
        " the 95 % intervals of both ratios are on the same side of 1. Both ways end"
        " where the run ends."
        " An arm whose values or whose attention do not move is the control: what it"
        " shows needs no interplay of the two.",
        "Half of the way:",
        markdown_table(_time_table(found, "half")),
        "90 %:",
        markdown_table(_time_table(found, "most")),
        "## What drives routing",
        "The score gradient Σ_j |∂ℓ_i/∂s_ij| = gate x spread, at the end over that at"
        " the start (geometric mean over seeds, 95 % interval), below 1 if it slowed"
        " down: gate, how much of the difference between sources the attention lets"
        " through (1 for equal shares, 0 for one-hot); spread, how differently the"
        " sources in sight would serve a query. The value gradient has no gate.",
        markdown_table(_gate_table(found)),
        "## Geometry",
        "From the first to the last evaluation. Before training keys are random"
        " projections, so that their first column is the null: mean |cos| between keys"
        " (0: orthogonal), weighted cos of queries and the keys they look at,"
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
            " where that and the bootstrap's exclude 0; each stands alone, so that of"
            " 20 one may be wrong.",
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


def _short_table(found: dict[str, Any]) -> list[list[str]]:
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


def _gate_table(found: dict[str, Any]) -> list[list[str]]:
    rows = [["arm", "score gradient", "gate", "spread", "value gradient"]]
    for arm, entry in found.items():
        ratios = (entry["log_ratio"][name] for name in observations.DRIVES)
        rows.append([arm, *map(_from_log, ratios)])
    return rows


def _from_log(value: dict[str, Any]) -> str:
    """An estimate of a log, as a factor."""
    if value["mean"] is None:
        return "none"
    text = f"{math.exp(value['mean']):.3g}"
    if value["ci95"] is None:
        return text
    return f"{text} [{', '.join(f'{math.exp(end):.3g}' for end in value['ci95'])}]"


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
            differences = (_bold(against[name]) for name in _AGAINST.values())
            rows.append([arm, differs, *differences])
    return rows


def _bold(difference: dict[str, Any]) -> str:
    text = mean(difference, "+")
    found = stats.Difference(std=None, **difference)
    return f"**{text}**" if stats.sign(found) else text


def _said(claim: dict[str, Any]) -> str:
    if _reasons(claim):
        return f"{claim['claim']} ({', '.join(_reasons(claim))})"
    difference = claim["paired_difference"]
    if difference["mean"] is None:
        return claim["claim"]
    metric = _METRIC_NAMES[claim["metric"]]
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
                _METRIC_NAMES[claim["metric"]],
                "none" if difference["mean"] is None else f"{difference['mean']:+.3f}",
                ends(difference["ci95"]),
                ends(difference["bootstrap95"]),
                ", ".join([claim["verdict"], *_reasons(claim)]),
            ]
        )
    return rows


def ends(interval: Sequence[float] | None) -> str:
    """An interval as [low, high]."""
    if interval is None:
        return "none"
    return "[{:+.3f}, {:+.3f}]".format(*interval)


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
        fields = ", ".join(differing(runs_[0], run)) or "the same config"
        other = f"; differs from 1 in: {fields}" if number > 1 else ""
        lines.append(f"{number}: {run.path}{other}")
        for arm, entry in run.summary["arms"].items():
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
        title: _SPEEDUPS[metric]
        for title, metric in names.items()
        # Where the baseline got nowhere there is no place to come to.
        if any(e[_SPEEDUPS[metric][0]]["n"] > 0 for e in summary["comparisons"])
    }
    rows = [["arm", *(c for title in names for c in (title, "speed-up"))]]
    for entry in summary["comparisons"]:
        row = [entry["arm"]]
        for steps_name, speedup_name in names.values():
            steps, speedup = entry[steps_name], entry[speedup_name]
            row += [steps_cell(steps, summary), speedup_cell(speedup)]
        rows.append(row)
    return rows


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


def mean(value: dict[str, Any], sign: str = "") -> str:
    """An estimate as mean ± half its interval."""
    if value["mean"] is None:
        return "none"
    style = ".3f" if abs(value["mean"]) < 1e4 else ".1e"
    text = f"{value['mean']:{sign}{style}}"
    if value["ci95"] is None:
        return text
    return f"{text}±{value['ci95'][1] - value['mean']:{style}}"


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
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = ["---"] + ["---:"] * (len(rows[0]) - 1)
    return "\n".join([line(rows[0]), line(rule), *map(line, rows[1:])])
