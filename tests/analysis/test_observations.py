"""Numbers of how attention and values moved, and those behind the pictures."""

import numpy as np
import PIL.Image
import pytest
from fake_runs import write_run

from jaxattn import experiments, runs
from jaxattn.analysis import entries, head, observations
from jaxattn.views import head_figures, head_report, tables
from jaxattn.views import snapshot_figures as snapshots

ARMS = ("sgd", "layer_norm", "random_frame")
SEEDS, STEPS, LENGTH = 8, 10, 6


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Attention of `sgd` settles at 2 and loss at 8; of `layer_norm` the other way."""
    config = experiments.load("configs/toy.py:smoke").config
    config.update({"seeds": SEEDS, "steps": STEPS, "eval_every": 1, "run_arms": ARMS})
    config.update({"snapshots": 6, "snapshot_seeds": (1,), "snapshot_length": LENGTH})
    config.task.length = LENGTH
    step = np.arange(STEPS + 1)
    late = np.where(step < 8, 1.0, 0.0)
    early = np.where(step < 2, 1.0, 0.0)
    wiggle = late + np.where(step == 5, 0.5, 0)  # up and down again
    seed = 1 + 0.01 * np.arange(SEEDS)[:, None]
    curves = {n: np.ones((3, SEEDS, STEPS + 1)) for n in entries.METRICS}
    curves |= {
        "train_loss": np.stack(
            [0.5 + seed * late, 0.5 + seed * early, 2 + 0 * seed * early]
        ),
        "train_bayes_nll": np.full((3, SEEDS, STEPS + 1), 2.0),
    }
    curves["train_loss"][0] = 0.5 + seed * wiggle
    rng = np.random.default_rng(0)
    maps = rng.dirichlet(np.ones(LENGTH), size=(3, 1, 6, LENGTH))
    drift = np.stack([seed * early, seed * late, 0 * seed * late])
    gate, spread = np.linspace(1, 0.5, STEPS + 1), np.linspace(1, 0.125, STEPS + 1)
    ones = np.ones((3, SEEDS, 1))
    curves |= {
        "attention_drift": drift,
        "gate": gate * ones,
        "advantage_spread": spread * ones,
        "score_gradient": gate * spread * ones,
    }
    run = write_run(
        tmp_path_factory.mktemp("run"),
        config,
        curves,
        maps,
        target=rng.integers(0, 3, LENGTH),
    )
    run.attention_allowed.values[:] = True
    wall = {"compile": 1.0, "run": 1.0}
    return run.assign_attrs(summary=head.summarise(run, wall))


def changed(run, arrays):
    """The run with other numbers in place of its own."""
    return run.assign({name: (run[name].dims, a) for name, a in arrays.items()})


def test_time_scales_tell_who_was_first(run):
    found = observations.of_arms(run)
    for share in observations.SHARES:
        sgd, norm, frozen = (found[arm]["time_scales"][share] for arm in ARMS)
        for name in ("precision", "root"):
            assert sgd["frame"]["median"] == norm[name]["median"] == 2
            assert sgd[name]["median"] == norm["frame"]["median"] == 8
            assert sgd[f"{name}_over_frame"]["median"] == 4
            # Between evaluations 7 and 8 the one, 1 and 2 the other.
            assert sgd[f"{name}_over_frame"]["ci95"] == (7 / 2, 8 / 1)
            assert norm[f"{name}_over_frame"]["ci95"] == (1 / 8, 2 / 7)
        assert (sgd["first"], norm["first"]) == ("frame", "precision")
        assert frozen["frame"]["median"] is frozen["precision"]["median"] is None
        assert frozen["first"] == "none"


def test_who_was_first_must_not_depend_on_the_scale(run):
    """A divergence that is the square of the drift is neither first nor last."""
    metrics, step = {}, np.arange(STEPS + 1)
    drift = np.tile(1 - step / STEPS, (3, SEEDS, 1))
    metrics |= {"attention_drift": drift, "train_loss": drift**2}
    found = observations.of_arms(changed(run, metrics))["sgd"]
    half = found["time_scales"]["half"]
    assert half["precision_over_frame"]["ci95"][1] < 1
    assert half["root_over_frame"]["median"] == 1
    assert half["root_over_frame"]["ci95"] == (4 / 5, 5 / 4)
    assert half["first"] == "undecided"


def test_who_was_first_is_decided_only_if_it_is_wherever_the_times_lie(run):
    """Times one evaluation apart may be any two: another rounding makes them one."""
    step, metrics = np.arange(STEPS + 1), {}
    for lead, verdict in ((0, "undecided"), (1, "undecided"), (2, "precision")):
        early, late = (np.where(step < place, 1.0, 0.0) for place in (6 - lead, 6))
        metrics["attention_drift"] = np.tile(late, (3, SEEDS, 1))
        metrics["train_loss"] = np.tile(early, (3, SEEDS, 1))
        found = observations.of_arms(changed(run, metrics))["sgd"]
        half = found["time_scales"]["half"]
        assert half["first"] == verdict
        assert half["root_over_frame"]["median"] == (6 - lead) / 6
        assert half["root_over_frame"]["ci95"] == ((5 - lead) / 6, (6 - lead) / 5)


def test_what_settled_by_the_first_evaluation_is_said_to_be_left_censored(run):
    step, metrics = np.arange(STEPS + 1), {}
    early, late = (np.where(step < place, 1.0, 0.0) for place in (1, 6))
    metrics["attention_drift"] = np.stack(
        [np.tile(curve, (SEEDS, 1)) for curve in (late, early, early)]
    )
    metrics["train_loss"] = np.stack(
        [np.tile(curve, (SEEDS, 1)) for curve in (early, late, early)]
    )
    summary = head.summarise(changed(run, metrics), {"compile": 1, "run": 1})
    found = summary["observations"]
    times = [found[arm]["time_scales"]["half"] for arm in ARMS]
    assert [time["first"] for time in times] == ["precision", "frame", "undecided"]
    cells = [
        [
            tables.median_cell(time["frame"]),
            tables.median_cell(time["root_over_frame"], interval=True),
        ]
        for time in times
    ]
    assert cells == [["6", "≤0.167 [0, 0.2]"], ["≤1", "≥6 [5, ∞]"], ["≤1", "?"]]
    assert "≤0.167 [0, 0.2]" in head_report.markdown(summary, {})
    assert "≥6 [5, ∞]" in head_report.terminal(summary)


@pytest.mark.parametrize("name", ["toy", "sticky-full"])
def test_verdicts_of_committed_runs_survive_another_rounding(name):
    """Every number of the curves up to a millionth off: who was first, and how sure."""
    run = runs.load(f"results/{name}")
    rng, arms = np.random.default_rng(0), run.attrs["config"]["run_arms"]

    def entries_of(run):
        return [
            observations.scales_entry(
                observations.time_scales(run, row, share), run["step"].values
            )
            for row in range(len(arms))
            for share in observations.SHARES.values()
        ]

    def shaken(values):
        return values * (1 + 1e-6 * rng.uniform(-1, 1, values.shape))

    names = ("attention_drift", "train_loss", "heldout_kl")
    firsts = [entry["first"] for entry in entries_of(run)]
    for _ in range(10):
        again = entries_of(changed(run, {n: shaken(run[n].values) for n in names}))
        assert [entry["first"] for entry in again] == firsts


def test_the_three_observations(run):
    sgd, norm, _ = (run.attrs["summary"]["observations"][arm] for arm in ARMS)
    assert sgd["loss_rises"]["mean"] == 1
    assert sgd["loss_roughness"]["mean"] == pytest.approx(2)
    assert norm["loss_rises"]["mean"] == 0
    assert norm["loss_roughness"]["mean"] == pytest.approx(1)
    shares = run["path_share"].values - run["readout_walk_share"].values
    assert sgd["above_readout_walk"]["mean"] == pytest.approx(shares[0].mean())
    assert sgd["relative_entropy_start"]["mean"] == pytest.approx(0.7)
    assert sgd["relative_entropy_end"]["mean"] == pytest.approx(0.2)
    against = norm["against_baseline"]["path_share"]
    difference = run["path_share"].values[1] - run["path_share"].values[0]
    assert against["mean"] == pytest.approx(difference.mean())


def test_gate_and_spread_multiply_to_the_score_gradient(run):
    slowed = run.attrs["summary"]["observations"]["sgd"]["log_ratio"]
    found = {name: 2 ** (entry["mean"] / np.log(2)) for name, entry in slowed.items()}
    assert found["gate"] == pytest.approx(1 / 2)
    assert found["advantage_spread"] == pytest.approx(1 / 8)
    assert found["score_gradient"] == pytest.approx(1 / 16)


def test_the_report_opens_with_who_was_first(run):
    text = head_report.opening(run.attrs["summary"])
    assert "held by sgd (4 [3.5, 8]; 4 [3.5, 8]); reversed by layer_norm (0.25" in text
    found = run.attrs["summary"]["observations"]
    assert found["layer_norm"]["differs_in"] == "value_norm 1"
    assert found["random_frame"]["differs_in"] == "routing_rate 0"
    assert "differs_in" not in found["sgd"]


def test_with_fresh_sequences_the_held_out_loss_counts(run):
    config = run.attrs["config"] | {"fresh": True}
    found = observations.numbers(run.assign_attrs(config=config))
    assert (found["loss_rises"] == 0).all()  # it is 1 everywhere


def test_a_seed_that_diverged_is_left_out(run):
    metrics = {name: array.values.copy() for name, array in run.items()}
    metrics["diverged_step"][0, 2] = 5
    found = observations.numbers(changed(run, metrics))
    assert all(np.isnan(values[0, 2]) for values in found.values())
    times = observations.time_scales(changed(run, metrics), 0, 0.5)
    assert np.isnan(times.frame[2])
    assert np.isfinite(np.delete(times.frame, 2)).all()


def test_numbers_behind_frame_gate_and_arrival(run):
    frame = head_figures.frame_data(run)
    np.testing.assert_allclose(frame["sgd"].left["frame"].middle, np.arange(11) < 2)
    assert frame["sgd"].half == {"frame": 2, "precision": 8, "root": 8}
    assert np.isnan(frame["random_frame"].left["frame"].middle).all()
    gate = head_figures.gate_data(run)["sgd"]
    product = gate["gate"].middle * gate["advantage_spread"].middle
    np.testing.assert_allclose(gate["score_gradient"].middle, product)
    assert gate["gate"].middle[-1] == pytest.approx(0.5)
    arrival = head_figures.arrival_data(run, "train_loss")
    np.testing.assert_array_equal(arrival["sgd"].middle, np.arange(11) >= 8)
    np.testing.assert_array_equal(arrival["layer_norm"].middle, np.arange(11) >= 2)
    assert (arrival["random_frame"].middle == 0).all()
    low, high = arrival["layer_norm"].low, arrival["layer_norm"].high
    assert (low <= arrival["layer_norm"].middle).all()
    assert low[-1] == pytest.approx(1 / (1 + 1.96**2 / SEEDS), abs=1e-3)  # Wilson's
    assert high[-1] == pytest.approx(1)


def test_numbers_behind_the_maps(run):
    """Sorted by label, advantage entry by entry, usage in units of equal shares."""
    seen = snapshots.snapshots(run)
    assert seen.by_label
    assert (np.diff(seen.label) >= 0).all()
    order = np.argsort(run["target"].values[0, 0, 0], kind="stable")
    arm, step, i, j = 1, 4, 2, 3
    query, source = order[i], order[j]
    weight, value, upstream = (
        run[n].values[arm, 0, step].astype(float)
        for n in ("attention", "value", "upstream")
    )
    assert seen.relative[arm, step, i, j] == pytest.approx(
        LENGTH * weight[query, source], rel=1e-6
    )
    served = value @ upstream[query]
    advantage = weight[query] @ served - served[source]
    found = observations.matrices(run)
    for name, expected in (("compatibility", served[source]), ("advantage", advantage)):
        at = getattr(found, name)[arm, 0, step, query, source]
        assert at == pytest.approx(expected, rel=1e-4)
    assert seen.advantage[arm, step, i, j] == pytest.approx(advantage, rel=1e-4)
    usage = snapshots.usage_data(seen)
    assert usage[arm, step, j] == pytest.approx(weight[:, source].sum(), rel=1e-5)
    change = snapshots.change_data(seen)["layer_norm"]
    before, after = seen.relative[arm, 0], seen.relative[arm, -1]
    np.testing.assert_allclose(change, after / before, rtol=1e-5)


def test_values_of_all_arms_have_one_common_basis(run):
    """In which each arm's motion has the same say, however far its values go."""
    seen = snapshots.snapshots(run)
    far = seen._replace(value=seen.value * np.array([1, 100, 1])[:, None, None, None])
    for these in (seen, far):
        found = snapshots.plane(these)
        clouds = (these.value - these.value[:, :1]).reshape(3, -1, 3).astype(float)
        clouds = clouds - clouds.mean(axis=1, keepdims=True)
        each = np.einsum("and,ane->ade", clouds, clouds)
        total = np.trace(each, axis1=1, axis2=2)
        _, axes = np.linalg.eigh((each / total[:, None, None]).sum(axis=0))
        axes = axes[:, ::-1][:, :2]
        axes = axes * np.sign(axes[np.argmax(np.abs(axes), axis=0), [0, 1]])
        np.testing.assert_allclose(found.points, these.value @ axes, rtol=1e-6)
        share = np.einsum("dk,ade,ek->a", axes, each, axes) / total
        np.testing.assert_allclose(found.share, share, rtol=1e-6)


def test_an_arm_that_diverged_or_stands_still_has_no_say(run):
    seen = snapshots.snapshots(run)
    value = seen.value.copy()
    value[1, -1] = np.nan
    value[2] = value[2, :1]
    found = snapshots.plane(seen._replace(value=value))
    assert np.isnan(found.share[1:]).all()
    alone = snapshots.plane(seen._replace(arms=["sgd"], value=value[:1]))
    np.testing.assert_allclose(found.points[0], alone.points[0], rtol=1e-6)
    narrow = snapshots.plane(seen._replace(value=value[:1, ..., :1], arms=["sgd"]))
    assert narrow.points.shape[-1] == 2
    assert narrow.share[0] == pytest.approx(1)


def test_more_labels_than_colours_have_colours_of_their_own(run):
    seen = snapshots.snapshots(run)
    many = seen._replace(label=np.arange(16))
    assert len(set(snapshots.position_colours(many))) == 16


def test_the_animation_has_a_frame_for_each_snapshot(run, tmp_path):
    drawn = snapshots.animate(run, snapshots.snapshots(run), tmp_path)
    assert ": sgd, layer_norm" in drawn["motion.gif"]
    with PIL.Image.open(tmp_path / "motion.gif") as animation:
        assert animation.n_frames == 6
        assert animation.info["loop"] == 0
        last = []
        for frame in (0, 5):
            animation.seek(frame)
            last.append(np.asarray(animation.convert("RGB")))
    assert (last[0] != last[1]).mean() > 0.01
