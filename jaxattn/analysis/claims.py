"""Claims, as data of a run, and their verdicts."""

from typing import Any, NamedTuple

import numpy as np

from jaxattn.analysis import stats
from jaxattn.analysis.entries import difference_entry, moved, stayed_finite
from jaxattn.runs import Run, RunError


class Claim(NamedTuple):
    """A statement about two arms: the first has less, or more, of a metric."""

    text: str
    arm: str
    baseline: str
    metric: str
    direction: str = "less"  # or "more"


VERDICTS = {-1: "held", 1: "reversed", 0: "undecided"}


def judged(run: Run) -> list[dict[str, Any]]:
    """Judges the claims of a run whose arms ran.

    Args:
      run: its claims are among its facts; of metrics of (arm, seed, step).

    Returns:
      Entries of summary.json, see `claim_entry`.

    Raises:
      RunError: a claim is about a metric that was not recorded.
    """
    arms = run.attrs["config"]["run_arms"]
    still = {arm for arm, has in zip(arms, moved(run), strict=True) if not has}
    curves = [name for name, a in run.items() if a.dims == ("arm", "seed", "step")]
    found = []
    for fields in run.attrs["facts"]["claims"]:
        claim = Claim(**fields)
        if claim.arm not in arms or claim.baseline not in arms:
            continue
        if claim.metric not in curves:
            raise RunError(
                f"metric={claim.metric!r} of claim {claim.text!r}: must be one of"
                f" {', '.join(curves)}"
            )
        values = run[claim.metric].values[..., -1]
        values = np.where(stayed_finite(run), values, np.nan)
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
    sign = stats.sign(difference) * {"less": 1, "more": -1}[claim.direction]
    return {
        "claim": claim.text,
        "arm": claim.arm,
        "baseline": claim.baseline,
        "metric": claim.metric,
        "paired_difference": difference_entry(difference),
        "verdict": verdicts[sign],
    }
