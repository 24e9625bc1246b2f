"""A run read as labelled arrays, or a line that says why not."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from made_up import ARMS, SEEDS, path_of

from jaxattn import experiments, runs, views
from jaxattn.analysis import entries
from jaxattn.engine import training
from jaxattn.measures import trajectory
from jaxattn.runs import directory, write
from jaxattn.views import publish

WRONG = ({}, [], None, [1], 3, "x", True)


def test_metrics_are_read_back_with_their_axes(run, made):
    for name in entries.METRICS:
        np.testing.assert_array_equal(run[name].values, made.curves[name])
        assert run[name].values.dtype == made.curves[name].dtype
        assert run[name].dims == ("arm", "seed", "step")
    assert {n: c.values.tolist() for n, c in run.coords.items()} == {
        "arm": list(ARMS),
        "seed": list(range(SEEDS)),
        "step": [0, 50, 100],
        "snapshot_seed": [0],
        "snapshot_step": [0, 100],
    }
    assert run.attention.dims[3:] == ("query_position", "source_position")
    assert runs.load(path_of(run)).attrs["summary"] is None


def test_every_variable_has_a_unit(run):
    units = {name: array.attrs["units"] for name, array in run.items()}
    assert units["heldout_kl"] == units["train_loss"] == "nats"
    assert units["accuracy"] == units["relative_entropy"] == "share"
    assert units["diverged_step"] == "steps"
    assert all(units.values())


def test_config_says_what_the_numbers_depend_on(run, config):
    assert run.attrs["config"] == json.loads(json.dumps(config.to_dict()))
    record = run.attrs["record"]
    named = {"jax", "jaxlib", "optax", "jaxattn", "python"}
    assert named <= record["versions"].keys()
    assert record["device"]["count"] >= 1
    assert record["git_commit"]
    assert record["prng_implementation"] == "threefry2x32"


def test_a_metric_is_selected_by_names(run):
    kl = run["heldout_kl"]
    found = kl.sel(step=100, arm="values_fast")
    np.testing.assert_array_equal(found, kl.values[1, :, 2])
    assert run.diverged_step.sel(arm="adam", seed=3) == 100
    assert run.attention.sel(snapshot_step=0).shape == (3, 1, 6, 6)
    with pytest.raises(KeyError, match="step"):
        kl.sel(step=60)


def test_a_frame_has_every_number_once(run):
    names = [*entries.METRICS, *trajectory.CURVES]
    frame = run[names].to_dataframe().reset_index()
    assert len(frame) == run.heldout_kl.size
    row = frame.query("arm == 'values_fast' and seed == 2 and step == 50")
    assert row["accuracy"].item() == run.accuracy.values[1, 2, 1]


def test_reading_loads_no_training(run):
    """Neither what trains nor what draws; and the package itself loads nothing."""
    heavy = "jax", "optax", "flax", "matplotlib", "ml_collections", "orbax"
    code = (
        f"import sys, jaxattn; bare = len([m for m in sys.modules if 'numpy' in m]);"
        f"from jaxattn import runs; runs.load({str(path_of(run))!r});"
        f"print(bare, [m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "0 []\n"


def test_load_refuses_what_is_not_a_run(tmp_path):
    with pytest.raises(runs.RunError, match="not a run directory"):
        runs.load(tmp_path)
    for name in ("config.json", "metrics.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "metrics.npz").write_bytes(b"PK half an archive")
    with pytest.raises(runs.RunError, match="not a run directory"):
        runs.load(tmp_path)


def read_all(path):
    run = runs.load_finished(path)
    views.side_by_side([run, run])
    publish.draw(path, publish.Output(figures=False))


@pytest.mark.parametrize("name", ["config.json", "metrics.json", "summary.json"])
def test_a_damaged_file_of_a_run_is_one_line(run, name):
    """Nothing else is raised, whatever is in it, and at which place."""
    write.write_summary(path_of(run), run.attrs["summary"])
    whole = (path_of(run) / name).read_text()
    content = json.loads(whole)
    said = rf"its {name} is not of a run"
    texts = [*map(json.dumps, WRONG), "", whole[: len(whole) // 2], "[" * 100_000]
    for text in (*texts, "NaN", "\xff"):
        (path_of(run) / name).write_text(text, "latin1")
        with pytest.raises(runs.RunError, match=said) as error:
            read_all(path_of(run))
        assert "\n" not in str(error.value)
    inner = {"config.json": "config", "metrics.json": "axes", "summary.json": "arms"}
    places = [content, content[inner[name]]]
    for place in places:
        for key in list(place)[:12]:
            kept = place.pop(key)
            for wrong in (None, *WRONG):
                if wrong is not None:
                    place[key] = wrong
                (path_of(run) / name).write_text(json.dumps(content))
                with contextlib.suppress(runs.RunError):  # some fields nobody reads
                    runs.load_finished(path_of(run))
                    views.side_by_side([runs.load_finished(path_of(run)), run])
            place[key] = kept


def test_facts_that_no_run_can_have_are_one_line(run):
    write.write_summary(path_of(run), run.attrs["summary"])
    path = path_of(run) / "config.json"
    whole = json.loads(path.read_text())
    for field, value, said in (
        ("view", "none", "view 'none' is unknown; must be one of head, grid"),
        ("task", {"num_classes": 8}, "task has no 'entropy_rate'"),
        ("claims", [{"text": 3}], "its config.json is not of a run"),
    ):
        changed = whole | {"facts": whole["facts"] | {field: value}}
        path.write_text(json.dumps(changed))
        with pytest.raises(runs.RunError, match=said):
            read_all(path_of(run))


def test_files_of_different_runs_are_not_a_run(run):
    metrics = path_of(run) / "metrics.json"
    axes = json.loads(metrics.read_text())
    for change, said in (
        (
            {"arm": ["sgd", "adam", "values_fast"]},
            "config.json and metrics.json differ in run",
        ),
        ({"seed": [0, 1]}, "metrics.npz and metrics.json differ in "),
        ({"eval": [0, 50, 90]}, "metrics.npz and metrics.json differ in step"),
    ):
        changed = axes | {"coordinates": axes["coordinates"] | change}
        metrics.write_text(json.dumps(changed))
        with pytest.raises(runs.RunError, match=f"of different runs .{said}"):
            runs.load(path_of(run))


def test_damaged_metrics_are_one_line(run):
    path = path_of(run) / "metrics.npz"
    content = path.read_bytes()
    size = len(content)
    for length in (0, 1, 4, 21, 22, 100, size // 2, size - 30, size - 1):
        for text in (content[:length], content[:length] + bytes(size - length)):
            path.write_bytes(text)
            if text != content:
                with pytest.raises(runs.RunError, match="not a run directory") as error:
                    runs.load(path_of(run))
                assert "\n" not in str(error.value)
    np.save(path_of(run) / "one.npy", np.zeros(3))
    os.replace(path_of(run) / "one.npy", path)
    with pytest.raises(runs.RunError, match="not a run directory"):
        runs.load(path_of(run))


@pytest.mark.parametrize(
    "name",
    [
        *("sticky", "sticky:full", "sticky:frame", "rates", "toy"),
        *("bijection", "hmm", "hmm:parts"),
    ],
)
def test_the_reference_runs_are_of_the_configs_as_they_are(tmp_path, name):
    """Else the README's commands would be refused in a fresh clone."""
    config = experiments.load(
        f"configs/{name.partition(':')[0]}.py{name_variant(name)}"
    )
    experiment = experiments.resolve(config.config)
    reference = Path("results", experiment.name)
    (tmp_path / "config.json").write_bytes((reference / "config.json").read_bytes())
    record = training.recorded(experiment)
    with directory.claimed(tmp_path, record):
        pass
    found = runs.load_finished(reference)
    assert found.attrs["facts"] == record["facts"]
    summary = found.attrs["summary"]
    assert summary["complete"]
    assert summary["seeds"] == experiment.seeds
    assert experiment.seeds >= {"sticky:full": 32, "hmm:parts": 3}.get(name, 6)
    drawn = {path.name for path in (reference / "figures").iterdir()}
    assert drawn == set(summary["figures"])


def name_variant(name):
    return name[name.find(":") :] if ":" in name else ""


@pytest.mark.parametrize("name", ["bijection", "hmm"])
def test_what_is_promised_of_transformers(name):
    """Of the transformer, and of an MLP of its size."""
    arms = runs.load_finished(Path("results", name)).attrs["summary"]["arms"]
    kl = {arm: entry["heldout_kl_bits"]["mean"] for arm, entry in arms.items()}
    assert kl["transformer"] < {"bijection": 0.005, "hmm": 0.01}[name]
    assert name == "hmm" or kl["mlp"] > 20 * kl["transformer"]
