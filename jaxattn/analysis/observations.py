"""What a run showed of how attention and values moved, in numbers.

The paper's three observations (attention sharpens, values move along few directions,
the loss falls smoothly), each beside what it must be told from, and two time scales.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.analysis import stats
from jaxattn.analysis.entries import task_of
from jaxattn.measures.trajectory import TRAITS
from jaxattn.runs import Run
from jaxattn.theory import laws

# Of the total change, from the first value to the last.
SHARES = {"half": 0.5, "most": 0.9}

# What drives routing: a gradient, its two factors, and the one without a gate.
DRIVES = ("score_gradient", "gate", "advantage_spread", "value_gradient")

# In summary.json at the first and the last evaluation.
FROM_TO = (
    "train_loss",
    "relative_entropy",
    *DRIVES,
    "usage_gini",
    "specialisation",
    "key_orthogonality",
    "key_cosine",
    "query_key_alignment",
    "value_dimension",
)


class TimeScales(NamedTuple):
    """When each seed's routing and precision had made a share of their total change."""

    frame: np.ndarray  # steps (seed,), NaN where it did not move
    precision: np.ndarray  # steps (seed,), NaN where it became no better
    root: np.ndarray  # the same of its square root, a distance as that of the frame is


class Matrices(NamedTuple):
    """What the loss asked of attention at each snapshot, of each query's own loss."""

    compatibility: np.ndarray  # b (arm, snapshot_seed, snapshot_step, query, source)
    advantage: np.ndarray  # A, likewise


def matrices(run: Run) -> Matrices:
    """Compatibility and advantage at the snapshots of a run, see `laws`.

    Args:
      run: with snapshots.

    Returns:
      Matrices, in nats per unit of weight; also of masked sources.

    Raises:
      RunError: the run has no snapshots.
    """
    weight, upstream, value = (
        run[name].values for name in ("attention", "upstream", "value")
    )
    flat = [leaf.reshape(-1, *leaf.shape[3:]) for leaf in (weight, upstream, value)]

    def one(weight, upstream, value):
        compatibility = laws.compatibility(upstream, value)
        return compatibility, laws.advantage(weight, compatibility)

    with jax.default_device(jax.devices("cpu")[0]):
        found = jax.vmap(one)(*map(jnp.asarray, flat))
    return Matrices(*(np.asarray(leaf).reshape(weight.shape) for leaf in found))


def of_arms(run: Run) -> dict[str, dict[str, Any]] | None:
    """What each arm of a run showed; None of a run without diagnostics.

    Args:
      run: its metrics.

    Returns:
      arm -> entry, as it stands in summary.json: estimates over seeds of the numbers of
      `numbers`, what changed between first and last evaluation, time scales, and the
      differences to the baseline on the same seeds.
    """
    if "attention_drift" not in run or run["attention_drift"].ndim != 3:
        return None  # not analysed, or of layers, which `analysis.layers` tells of
    config = run.attrs["config"]
    arms, baseline = config["run_arms"], config["baseline"]
    found = numbers(run)
    entries = {}
    for row, arm in enumerate(arms):
        of_arm = {name: values[row] for name, values in found.items()}
        entry: dict[str, Any] = {
            name: stats.estimate(values)._asdict() for name, values in of_arm.items()
        }
        entry["above_walk"] = _difference(of_arm["path_share"], of_arm["walk_share"])
        entry["above_readout_walk"] = _difference(
            of_arm["path_share"], of_arm["readout_walk_share"]
        )
        entry["log_ratio"] = _log_ratios(of_arm)
        entry["time_scales"] = {
            name: scales_entry(time_scales(run, row, share), run["step"].values)
            for name, share in SHARES.items()
        }
        if arm != baseline:
            base = arms.index(baseline)
            entry["differs_in"] = _differing(config["arms"], arm, baseline)
            entry["against_baseline"] = {
                name: _difference(values[row], values[base])
                for name, values in found.items()
            }
        entries[arm] = entry
    return entries


def numbers(run: Run) -> dict[str, np.ndarray]:
    """Numbers of each arm and seed (arm, seed), NaN where there is no answer.

    `X_start` and `X_end` of each of `FROM_TO`; `moved`, the total variation between
    the first attention and the last; `path_share`, `walk_share` and
    `readout_walk_share`, see `trajectory.TRAITS`; of the train loss, or where sequences
    are fresh and it is of another one each time, of the held-out loss, `loss_rises`, at
    how many evaluations it was higher (by more than rounding) than at the one before,
    and `loss_roughness`,
    Σ |change| / (first - last), 1 for a loss that never rose.
    """
    finite = run["diverged_step"].values < 0
    found = {"moved": run["attention_drift"].values[..., 0]}
    for name in FROM_TO:
        found[f"{name}_start"] = run[name].values[..., 0]
        found[f"{name}_end"] = run[name].values[..., -1]
    found |= {name: run[name].values for name in TRAITS}
    same = "heldout_loss" if run.attrs["config"]["fresh"] else "train_loss"
    loss = np.asarray(run[same].values, np.float64)
    change = np.diff(loss, axis=-1)
    fall = loss[..., 0] - loss[..., -1]
    fell = stats.less(loss[..., -1], loss[..., 0])
    rose = stats.less(loss[..., :-1], loss[..., 1:])
    found["loss_rises"] = rose.sum(axis=-1).astype(float)
    found["loss_roughness"] = np.where(
        fell, np.abs(change).sum(axis=-1) / np.where(fell, fall, 1), np.nan
    )
    return {name: np.where(finite, values, np.nan) for name, values in found.items()}


def _log_ratios(of_arm: dict[str, np.ndarray]) -> dict[str, Any]:
    """Logs of gradients and factors at the end over those at the start.

    Of logs the mean is that of a ratio (geometric), and gate and spread add up. A seed
    of which one is 0, as where a gate is shut, is left out of all.
    """
    ends = np.array(
        [[of_arm[f"{n}_{when}"] for n in DRIVES] for when in ("start", "end")]
    )
    known = (ends > 0).all(axis=(0, 1))  # the same seeds of each
    start, end = np.log(np.where(known, ends, np.nan))
    return {
        name: stats.estimate(values)._asdict()
        for name, values in zip(DRIVES, end - start, strict=True)
    }


def time_scales(run: Run, row: int, share: float) -> TimeScales:
    """When an arm had made a share of its total change, on each seed.

    The frame's change is the attention's drift to its end (total variation), that of
    precision the fall of what the task says is learned, such as KL to Bayes. Near its
    end a divergence falls as the square of a distance, so that it makes 50 % of its
    change earlier: its root is on the scale of the drift.

    Args:
      run: its metrics.
      row: of the arm.
      share: such as 0.5.
    """
    finite = run["diverged_step"].values[row] < 0
    times = (
        stats.settled(run["step"].values, curves, share)
        for curves in progress_curves(run, row).values()
    )
    return TimeScales(*(np.where(finite, found, np.nan) for found in times))


def progress_curves(run: Run, row: int) -> dict[str, np.ndarray]:
    """The curves of an arm by whose fall its time scales are told (seed, E)."""
    learned = task_of(run)["learned"]
    precision = np.asarray(run[learned].values[row], np.float64)
    return {
        "frame": np.asarray(run["attention_drift"].values[row], np.float64),
        "precision": precision,
        "root": np.sqrt(np.maximum(precision, 0)),  # below 0 by rounding only
    }


def scales_entry(found: TimeScales, steps: np.ndarray) -> dict[str, Any]:
    """Medians, and how many times later precision came, with its verdict.

    The frame, or precision, was first if the intervals of both ratios lie on one side
    of 1, wherever between two evaluations the times were: see `stats.median_ratio`.

    Args:
      found: of the seeds of an arm.
      steps: of the evaluations (E,).

    Returns:
      As it stands in summary.json.
    """
    entry = {
        name: stats.median(times, steps)._asdict()
        for name, times in found._asdict().items()
    }
    ends = []
    for name in ("precision", "root"):
        ratio = stats.median_ratio(getattr(found, name), found.frame, steps)
        entry[f"{name}_over_frame"] = ratio._asdict()
        ends.append(ratio.ci95 or (None, None))
    if entry["precision_over_frame"]["n"] == 0:
        entry["first"] = "none"
    elif all(low is not None and low > 1 for low, _ in ends):
        entry["first"] = "frame"
    elif all(high is not None and high < 1 for _, high in ends):
        entry["first"] = "precision"
    else:
        entry["first"] = "undecided"
    return entry


def _differing(arms: dict[str, dict], arm: str, baseline: str) -> str:
    """What an arm's fields are where they are not those of the baseline."""
    mine, theirs = arms[arm], arms[baseline]
    parts = []
    if mine["algorithm"] == theirs["algorithm"]:
        parts = [f"no {name}" for name in theirs if name not in mine]
    for name, value in mine.items():
        if theirs.get(name) != value:
            parts.append(value if isinstance(value, str) else f"{name} {value:g}")
    return ", ".join(parts)


def _difference(values: np.ndarray, others: np.ndarray) -> dict[str, Any]:
    entry = stats.paired_difference(values, others)._asdict()
    del entry["std"]
    return entry
