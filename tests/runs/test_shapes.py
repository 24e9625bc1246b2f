"""Files that no run can have are refused when they are read, with one line."""

import json
from pathlib import Path

import pytest

from jaxattn import runs

REFERENCE = {"head": "sticky", "grid": "rates", "transformer": "hmm"}
GONE = object()


@pytest.fixture
def change(tmp_path):
    """Puts a value into a file of a copy of a reference run of some view."""

    def changed(view, place, value):
        source = Path("results", REFERENCE[view]).resolve()
        for name in ("metrics.npz", "metrics.json", "config.json", "summary.json"):
            (tmp_path / name).symlink_to(source / name)
        file, *path = place.split("/")
        content = json.loads((source / f"{file}.json").read_text())
        *outer, last = (int(p) if p.isdigit() else p for p in path)
        inner = content
        for part in outer:
            inner = inner[part]
        if value is GONE:
            del inner[last]
        else:
            inner[last] = value
        (tmp_path / f"{file}.json").unlink()
        (tmp_path / f"{file}.json").write_text(json.dumps(content))
        return tmp_path

    return changed


@pytest.mark.parametrize(
    ("view", "place", "value", "said"),
    [
        ("head", "config/config/baseline", GONE, "config has no 'baseline'"),
        ("head", "config/config/baseline", "none", "its baseline 'none' did not run"),
        ("head", "config/config/arms/sgd", GONE, "arms has no 'sgd', which ran"),
        ("head", "config/config/fresh", 1, "fresh is a int"),
        ("head", "config/facts/diagnosed_positions", "x", "diagnosed_positions is a"),
        ("head", "config/facts/task/shown", "x", "shown is 'x'"),
        ("head", "config/facts/task/shown", {}, "shown is {}"),
        ("head", "config/facts/task/num_classes", 0, "num_classes is 0"),
        ("head", "config/facts/task/num_classes", True, "num_classes is True"),
        ("head", "config/facts/claims", [{}], "claims[0] has no 'text'"),
        ("head", "config/facts/claims/0/direction", "up", "direction is 'up'"),
        ("head", "config/facts/claims/0/more", 1, "more is 1"),
        ("head", "metrics/coordinates/snapshot_step/0", [], "snapshot_step"),
        ("head", "summary/arms/sgd/accuracy/ci95", GONE, "accuracy has no 'ci95'"),
        ("head", "summary/arms/sgd/accuracy/ci95", [1], "ci95 has 1 entries"),
        ("head", "summary/arms/sgd/accuracy/ci95/1", None, "ci95[1] is a NoneType"),
        ("grid", "config/config/grid", GONE, "config has no 'grid'"),
        ("grid", "config/config/grid/threshold", None, "threshold is a NoneType"),
        ("grid", "config/config/grid/scale", True, "scale is a bool"),
        ("grid", "config/facts/splits_by_ratio", GONE, "facts has no 'splits_by"),
        ("grid", "metrics/coordinates/point/5/fresh", GONE, "point[5] has no 'fresh'"),
        ("grid", "metrics/coordinates/point/0/more", 1, "more is 1"),
        ("grid", "metrics/coordinates/point/0/scale", [], "scale is a list"),
        ("grid", "metrics/coordinates/point/0", 3, "point[0] is a int"),
        ("transformer", "config/config/model", True, "model is a bool"),
        ("transformer", "config/config/eval_length_factor", "x", "eval_length_factor"),
        ("transformer", "config/facts/task/scored", GONE, "task has no 'scored'"),
        ("transformer", "config/facts/architectures", [], "architectures is a list"),
        (
            *("transformer", "config/facts/architectures/gru", GONE),
            "architectures has no 'gru', which ran",
        ),
        (
            *("transformer", "config/facts/architectures/gru/depth", {}),
            "depth is a dict",
        ),
    ],
)
def test_a_file_that_no_run_can_have(change, view, place, value, said):
    path = change(view, place, value)
    with pytest.raises(runs.RunError) as error:
        runs.load(path)
    name = f"{place.partition('/')[0]}.json"
    assert f"run={str(path)!r}: its {name} is not of a run (" in str(error.value)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("view", "place", "value", "said"),
    [
        ("head", "config/facts/task/learned", "x", "metrics.npz has no x"),
        (
            *("head", "config/facts/measures"),
            {"gate": {"about": "", "unit": "", "null": True}},
            "metrics.npz has no gate_null",
        ),
        ("head", "metrics/coordinates/eval/0", 1, "metrics.json differ in step"),
        ("head", "metrics/coordinates/seed/0", GONE, "metrics.json differ in "),
        ("head", "metrics/axes/gate/0", "seed", "metrics.json differ in gate"),
        ("head", "config/config/steps", 3, "metrics.json differ in steps"),
        ("transformer", "metrics/axes/belief_read_out/3", "layer", "ValueError"),
    ],
)
def test_files_that_do_not_fit_together(change, view, place, value, said):
    path = change(view, place, value)
    with pytest.raises(runs.RunError) as error:
        runs.load(path)
    assert f"run={str(path)!r}: its files are of different runs (" in str(error.value)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("view", REFERENCE)
def test_the_reference_runs_have_these_shapes(view):
    run = runs.load_finished(Path("results", REFERENCE[view]))
    assert run.attrs["facts"]["view"] == view
