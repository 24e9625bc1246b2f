"""What a user's measures found, beside their nulls."""

from typing import Any

import numpy as np

from jaxattn.analysis import stats
from jaxattn.analysis.entries import difference_entry, stayed_finite
from jaxattn.runs import Run


def of_arm(run: Run, row: int) -> dict[str, dict[str, Any]]:
    """Estimates each measure of an arm over seeds.

    Args:
      run: the names of its measures are among its facts.
      row: of the arm.

    Returns:
      name -> estimates at the "start" and the "end"; where there is a null, its
      estimate at the end, the paired difference to it, and whether it "differs".
    """
    finite = stayed_finite(run)[row]

    def values(name: str, place: int) -> np.ndarray:
        return np.where(finite, run[name].values[row, :, place], np.nan)

    found = {}
    for name, fields in run.attrs["facts"]["measures"].items():
        end = values(name, -1)
        found[name] = {
            "about": fields["about"],
            "unit": fields["unit"],
            "start": stats.estimate(values(name, 0))._asdict(),
            "end": stats.estimate(end)._asdict(),
        }
        if fields["null"]:
            null = values(f"{name}_null", -1)
            difference = stats.paired_difference(end, null)
            found[name] |= {
                "null": stats.estimate(null)._asdict(),
                "difference": difference_entry(difference),
                "differs": {-1: "below", 0: "undecided", 1: "above"}[
                    stats.sign(difference)
                ],
            }
    return found
