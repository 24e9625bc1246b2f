"""Curves of layers and heads of a run of transformers."""

import math
from typing import Any

import numpy as np
import xarray

from jaxattn.analysis import entries
from jaxattn.runs import Run

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


def finite_alone(run: Run) -> Run:
    """The run with NaN for all numbers of seeds that diverged."""
    finite = entries.stayed_finite(run)

    def masked(array: xarray.DataArray) -> xarray.DataArray:
        shape = finite.shape + (1,) * (array.ndim - 2)
        return array.copy(data=np.where(finite.reshape(shape), array.values, np.nan))

    of_seeds = [n for n, a in run.items() if a.dims[:2] == ("arm", "seed")]
    return run.assign({n: masked(run[n]) for n in of_seeds if n != "diverged_step"})


def model_field(run: Run, row: int, name: str) -> Any:
    """Returns a field of the architecture of an arm."""
    arm = run["arm"].values[row]
    return run.attrs["facts"]["architectures"][arm][name]


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
    drift = _mean(run["attention_drift"].values, axes=(3, 4))
    of_bayes = run["bayes_predictive_entropy"].values
    nothing = math.log(entries.num_classes(run)) - of_bayes[..., None]
    kl = np.minimum(run["heldout_kl"].values, nothing)
    dims = run["heldout_kl"].dims
    return run.assign(attention_drift=(dims, drift), heldout_kl=(dims, kl))


def of_layers(run: Run, row: int, name: str) -> np.ndarray:
    """A curve of layers at every evaluation, heads averaged: (seed, eval, layer).

    Args:
      run: its metrics.
      row: of the arm.
      name: of a curve, or of a trait, whose evaluation is then the last alone.

    Returns:
      As many layers as the arm has, or one more of a stream.
    """
    values = run[name].values[row]
    names = run[name].dims
    if "step" not in names:
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
