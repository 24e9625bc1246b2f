"""Files of a run, written."""

import numpy as np
import pytest
from made_up import path_of

from jaxattn import runs
from jaxattn.runs import write


def coordinates_of(run):
    names = {"arm": "arm", "seed": "seed", "eval": "step"}
    return {axis: run[name].values.tolist() for axis, name in names.items()}


def test_arrays_come_back_with_their_bits(tmp_path, run):
    """Of any type; labels change none of them."""
    rng = np.random.default_rng(0)
    shape = run.heldout_kl.shape
    bits = rng.integers(0, 2**32, shape, dtype=np.uint32)
    arrays = {
        "step": run.step.values,
        "heldout_kl": bits.view(np.float32),  # of NaNs too
        "half": rng.normal(size=shape).astype(np.float16),
        "integers": bits,
        "flags": bits > 2**31,
        "nothing": np.zeros((0,), np.float32),
    }
    axes = {name: ["arm", "seed", "eval"] for name in arrays}
    axes |= {"step": ["eval"], "nothing": ["empty"]}
    found = write.write_metrics(
        tmp_path, run.attrs["record"], arrays, axes, coordinates_of(run)
    )
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].values.tobytes() == array.tobytes()
    assert found.identical(runs.load(tmp_path))


def test_a_measure_and_its_null_have_its_unit(tmp_path, run):
    record = dict(run.attrs["record"])
    measures = {"gate": {"about": "how open", "unit": "doors", "null": True}}
    record["facts"] = record["facts"] | {"measures": measures}
    names = ("gate", "gate_null", "heldout_kl")
    found = write.write_metrics(
        tmp_path,
        record,
        {name: run["gate"].values for name in names} | {"step": run.step.values},
        {n: ["arm", "seed", "eval"] for n in names} | {"step": ["eval"]},
        coordinates_of(run),
    )
    units = {name: found[name].attrs["units"] for name in names}
    assert units == {"gate": "doors", "gate_null": "doors", "heldout_kl": "nats"}


def test_a_summary_has_no_nan(run):
    with pytest.raises(ValueError, match="JSON"):
        write.write_summary(path_of(run), {"mean": float("nan")})
    assert not (path_of(run) / "summary.json").exists()
