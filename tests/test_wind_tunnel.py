"""Transformers in a sweep: what is scored, seen and written of them."""

import json
import math

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxattn.analysis import observations, runs, tunnel_report
from jaxattn.cli import launch
from jaxattn.engine import sweep
from jaxattn.experiments import config as config_lib
from jaxattn.experiments import wind_tunnel
from jaxattn.models import transformer
from jaxattn.tasks import catalogue
from jaxattn.theory import attention
from jaxattn.views import tunnel_figures

SEEDS = 3  # of which two train at once


def tiny_config(**changes):
    """Two layers, one layer, none; in another order than the alphabet's."""
    config = config_lib.load("configs/hmm.py:smoke")
    arm = config.arms.transformer.to_dict()
    small = {
        "seeds": SEEDS,
        "steps": 4,
        "eval_every": 2,
        "batch_size": 3,
        "heldout": 6,
        "probe": 2,
        "stretch": 2.0,
        "task.num_states": 2,
        "task.num_symbols": 2,
        "task.num_observations": 3,
        "model.depth": 2,
        "model.width": 8,
        "model.heads": 2,
        "model.kv_heads": 1,
        "model.d_head": 4,
        "model.mlp_width": 8,
        "run_arms": ("transformer", "mlp", "bare"),
    }
    config.arms = ConfigDict(
        {
            "transformer": arm,
            "bare": {
                "schedule": "em",
                "optimizer": "sgd",
                "m_step": "gradient",
                "order": "alternating",
                "inner_steps": 1,
                "routing_rate": 0.1,
                "output_rate": 0.1,
                "value_rate": 0.3,
                "depth": 1,
                "mlp_width": 0,
            },
            "mlp": arm | {"kind": "mlp", "positions": "none"},
        }
    )
    with config.ignore_type():
        config.update_from_flattened_dict(small | changes)
    config_lib.check(config)
    return config


def build(config, workers=2):
    plan = sweep.plan(config, jax.devices()[:1], workers=workers)
    return sweep.build(config, plan, keep_weights=True)


@pytest.fixture(scope="module", autouse=True)
def _standard_promotion():
    """Optax takes powers of a count in its Adam."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def program():
    return build(tiny_config())


@pytest.fixture(scope="module")
def result(program):
    carry = sweep.start()
    while not sweep.is_done(program.config, carry):
        carry = sweep.advance(program, carry)
    return sweep.finish(program, carry)


@pytest.fixture(scope="module")
def run(result, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    found = runs.write_metrics(folder, tiny_config(), result)
    return summarised(found)


# --- the sweep


def test_a_run_in_the_middle_goes_on_with_the_same_bits(program, result, tmp_path):
    config, carry = program.config, sweep.start()
    while not (carry.done and carry.rounds and carry.rounds[0].step > 0):
        carry = sweep.advance(program, carry)
    runs.save_checkpoint(tmp_path, config, sweep.collect(program, carry), 1.0)
    carry, _ = runs.resumed(program, runs.read_checkpoint(tmp_path))
    while not sweep.is_done(config, carry):
        carry = sweep.advance(program, carry)
    again = sweep.finish(program, carry)
    for part in ("curves", "traits"):
        for name, values in getattr(result.kept, part).items():
            np.testing.assert_array_equal(getattr(again.kept, part)[name], values)
    weights = jax.tree.leaves(result.kept.weights)
    for one, other in zip(weights, jax.tree.leaves(again.kept.weights), strict=True):
        np.testing.assert_array_equal(one, other)
        assert len(one) == SEEDS


def test_weights_are_kept_or_not_as_the_run_was_begun(program, tmp_path):
    carry = sweep.start()
    while not carry.done:
        carry = sweep.advance(program, carry)
    runs.save_checkpoint(tmp_path, program.config, sweep.collect(program, carry), 1.0)
    content = runs.read_checkpoint(tmp_path)
    with pytest.raises(runs.RunError, match="finished with them"):
        runs.resumed(program._replace(keeps_weights=False), content)


def test_every_array_has_its_axes_named_and_nothing_diverged(run):
    coordinates = run.axes["coordinates"]
    assert (run.metrics["diverged_step"] == -1).all()
    for name, values in run.metrics.items():
        names = run.axes["axes"][name]
        assert len(names) == values.ndim, name
        for axis, size in zip(names, values.shape, strict=True):
            if axis in coordinates:
                assert len(coordinates[axis]) == size, (name, axis)
    named = {name for name in wind_tunnel.AXES if name in run.metrics}
    assert named == set(wind_tunnel.AXES)


def test_what_an_arm_has_not_is_not_made_up(run):
    """Arms: two layers of two heads, none at all, one layer without an MLP."""
    entropy = np.isfinite(run.metrics["relative_entropy"][:, 0, -1])
    np.testing.assert_array_equal(
        entropy, [[[1, 1], [1, 1]], [[0, 0], [0, 0]], [[1, 1], [0, 0]]]
    )
    streams = np.isfinite(run.metrics["belief_read_out"][:, 0, -1])
    np.testing.assert_array_equal(streams, [[1, 1, 1], [1, 1, 1], [1, 1, 0]])
    # An MLP without attention has nothing taken out.
    mlps = np.isfinite(run.metrics["mlp_zeroed_kl_bits"][:, 0])
    np.testing.assert_array_equal(mlps, [[1, 1], [0, 0], [0, 0]])
    assert not tunnel_report.attends(run, 1)


def test_arms_of_one_architecture_start_alike_and_others_do_not(run):
    start = run.metrics["heldout_kl_bits"][:, :, 0]
    assert (np.abs(start[0] - start[2]) > 1e-6).all()
    assert (run.metrics["attention_drift"][0, :, -1] == 0).all()
    assert (run.metrics["attention_drift"][0, :, 0] > 0).all()


def trained(program):
    """The trained parameters of the first seed, and its held-out sequences."""
    config, carry = program.config, sweep.start()
    while not carry.rounds or carry.rounds[0].step + config.eval_every < config.steps:
        carry = sweep.advance(program, carry)
    ids = np.arange(program.plan.slots, dtype=np.uint32)
    round_ = carry.rounds[0]
    problems, _ = program.begin(tuple(ids))
    one = jax.tree.map(lambda leaf: leaf[0], problems)
    params = jax.tree.map(lambda leaf: leaf[0], round_.states["transformer"].params)
    index = int(np.searchsorted(sweep.evaluation_steps(config), round_.step))
    kept = round_.kept.curves
    found = {name: curve[0, 0, index] for name, curve in kept.items()}
    return params, one, found


def test_metrics_are_those_worked_out_by_hand(program):
    config = program.config
    params, problem, found = trained(program)
    model = wind_tunnel.reading(config, config_lib.structure(config.arms.transformer))
    batch, log_bayes = problem.heldout, np.asarray(problem.log_bayes_heldout)
    apply = jax.jit(jax.vmap(lambda x: transformer.apply(model, params, x)))
    activations = apply(batch.inputs)
    log_p = np.asarray(jax.nn.log_softmax(activations.logit))
    scored = np.asarray(batch.weights[0]) > 0
    assert scored.sum() == config.task.num_observations
    beta, p = np.exp(log_bayes[:, scored]), np.exp(log_p[:, scored])
    log_beta, log_p = np.log2(beta), np.log2(p)
    np.testing.assert_allclose(
        found["position_kl_bits"],
        (beta * (log_beta - log_p)).sum(axis=2).mean(axis=0),
        rtol=1e-3,
    )
    np.testing.assert_allclose(
        found["position_total_variation"],
        np.abs(beta - p).sum(axis=2).mean(axis=0) / 2,
        rtol=1e-4,
    )
    entropy, exact = -(p * log_p).sum(axis=2), -(beta * log_beta).sum(axis=2)
    np.testing.assert_allclose(
        found["heldout_entropy_error_bits"], np.abs(entropy - exact).mean(), rtol=1e-4
    )
    np.testing.assert_allclose(
        found["heldout_averaged_entropy_error_bits"],
        np.abs((entropy - exact).mean(axis=0)).mean(),
        rtol=1e-3,
    )
    assert found["heldout_kl"] == pytest.approx(
        found["heldout_kl_bits"] * math.log(2), rel=1e-4
    )
    assert found["accuracy"] == pytest.approx(
        np.take_along_axis(beta, p.argmax(axis=2)[:, :, None], 2).mean(), rel=1e-4
    )

    assert wind_tunnel._bayes_accuracy(
        problem.log_bayes_heldout[0], batch.targets[0], batch.weights[0]
    ) == pytest.approx(beta[0].max(axis=1).mean(), rel=1e-5)

    # Attention of the probes, head by head, with the keys that they share.
    mask = attention.causal_mask(batch.inputs.shape[1])
    for layer, heads in enumerate(activations.heads):
        for head in range(model.heads):
            entropies = []
            for n in range(config.probe):
                a = attention.weights(
                    attention.scores(heads.query[n, :, head], heads.key[n, :, 0]), mask
                )
                count = np.arange(2, len(a) + 1)
                h = np.asarray(attention.attention_entropy(a))[1:] / np.log(count)
                entropies.append(h.mean())
            assert found["relative_entropy"][layer, head] == pytest.approx(
                np.mean(entropies), rel=1e-3
            )


@pytest.mark.slow
def test_weights_are_read_back_or_said_what_is_wrong(program, result, run):
    runs.write_weights(run.path, result)
    config = program.config
    params = runs.load_weights(run.path, "transformer", 1)
    model = wind_tunnel.reading(config, config_lib.structure(config.arms.transformer))
    task = catalogue.TASKS["hmm"].build(config.task, jax.random.key(0))
    key = sweep.stream(jax.random.fold_in(jax.random.key(config.seed), 1), "eval")
    batch, log_bayes = wind_tunnel.heldout(config, task, key)
    logit = wind_tunnel._apply(model, params, batch.inputs).logit
    kl = wind_tunnel._scores(logit, batch, log_bayes)["kl"]
    found = run.select("heldout_kl", arm="transformer", seed=1, eval=config.steps)
    assert float(kl) == pytest.approx(float(found), rel=1e-4)

    whole = result.kept.weights["transformer"]
    block = whole["blocks"][1] | {"mlp": {"up": whole["blocks"][0]["mlp"]["up"]}}
    wider = jax.tree.map(lambda leaf: np.repeat(leaf, 2, axis=-1), whole)
    for wrong, said in (
        (whole | {"blocks": {0: whole["blocks"][0]}}, r"blocks\.1\.\S+ is missing"),
        (
            whole | {"blocks": {0: whole["blocks"][0], 1: block}},
            r"blocks\.1\.mlp\.down\.bias is missing; blocks\.1\.mlp\.down\.kernel is",
        ),
        (wider, r"unembed\.kernel is \(8, 4\), not \(8, 2\)"),
    ):
        kept = result.kept._replace(weights={"transformer": wrong})
        runs.write_weights(run.path, result._replace(kept=kept))
        with pytest.raises(runs.RunError, match=said):
            runs.load_weights(run.path, "transformer", 0)
    with pytest.raises(runs.RunError, match="seed='7'"):
        runs.load_weights(run.path, "transformer", 7)
    (run.path / "weights.msgpack").write_bytes(b"half of it")
    with pytest.raises(runs.RunError, match="cannot be read"):
        runs.load_weights(run.path, "transformer", 0)


@pytest.mark.slow
def test_dropout_is_for_training_alone(run):
    del run
    config = tiny_config()
    structure = config_lib.structure(
        ConfigDict(config.arms.transformer.to_dict() | {"dropout_rate": 0.5})
    )
    assert config_lib.architecture(config, structure).dropout_rate == 0.5
    assert wind_tunnel.reading(config, structure).dropout_rate == 0
    batch = sweep.draw_batch(config, np.uint32(0), 0)
    params = wind_tunnel.init(config, structure, jax.random.key(0))
    schedule = wind_tunnel.schedule(
        config, structure, config_lib.rates(config.arms.transformer)
    )
    step = jax.jit(schedule.step)
    found = {
        float(step(schedule.init(params), batch, jax.random.key(n))[1].loss)
        for n in range(3)
    }
    assert len(found) == 3


# --- positions that count


@pytest.mark.parametrize("name", ["bijection", "hmm", "recall"])
def test_scored_positions_are_those_with_a_weight(name):
    config = config_lib.load(f"configs/{name}.py:smoke")
    config_lib.check(config)
    fields = config_lib.stretched(config)
    task = catalogue.TASKS[config.task.name].build(fields, jax.random.key(0))
    batch = jax.jit(lambda key: wind_tunnel._several(task, key, 5))(jax.random.key(1))
    place = np.asarray(wind_tunnel._scored(config, batch, fields))
    for row, weights in zip(place, np.asarray(batch.weights), strict=True):
        np.testing.assert_array_equal(row, np.flatnonzero(weights))


@pytest.mark.parametrize("name", ["bijection", "hmm", "recall"])
def test_baselines_are_of_as_many_parameters(name):
    for variant in ("", ":paper"):
        config = config_lib.load(f"configs/{name}.py{variant}")
        config_lib.check(config)
        sizes = {
            arm: transformer.size(
                config_lib.architecture(config, config_lib.structure(config.arms[arm]))
            )
            for arm in config.arms
        }
        for arm in {"mlp", "history_mlp", "gru"} & sizes.keys():
            assert abs(sizes[arm] / sizes["transformer"] - 1) < 0.1, (variant, arm)


def test_sizes_are_those_of_the_companion_paper():
    """As in arXiv 2512.22471."""
    bijection, hmm = (
        config_lib.load(f"configs/{name}.py:paper") for name in ("bijection", "hmm")
    )
    assert (bijection.task.num_symbols, bijection.model.width) == (20, 192)
    assert (bijection.model.depth, bijection.model.heads) == (6, 6)
    assert (hmm.task.num_states, hmm.task.num_symbols) == (5, 5)
    assert hmm.task.num_observations == 20
    assert (hmm.model.depth, hmm.model.heads, hmm.model.width) == (9, 8, 256)


# --- the report


def test_the_report_says_what_the_arrays_say(run):
    summary = json.loads(json.dumps(run.summary, allow_nan=False))
    entry = summary["arms"]["transformer"]
    kl = run.metrics["heldout_kl_bits"][0, :, -1]
    assert entry["heldout_kl_bits"]["mean"] == pytest.approx(kl.mean())
    over = summary["arms"]["mlp"]["log_kl_over_baseline"]["mean"]
    others = run.metrics["heldout_kl_bits"][1, :, -1]
    assert over == pytest.approx(np.log(others / kl).mean(), rel=1e-4)
    long_kl = run.metrics["long_kl_bits"][0]
    assert long_kl.shape == (SEEDS, 6)
    assert list(entry["longer"]) == ["1", "1.5", "2"]
    assert entry["longer"]["1.5"]["mean"] == pytest.approx(long_kl[:, :4].mean())
    assert len(entry["geometry"]["key_orthogonality"]["end"]) == 2
    assert len(entry["geometry"]["belief_read_out"]["end"]) == 3
    assert len(summary["arms"]["bare"]["geometry"]["entropy_axis"]["end"]) == 1
    assert "geometry" not in summary["arms"]["mlp"]
    assert "mlp_zeroed" not in summary["arms"]["bare"]["ablation"]
    text = tunnel_report.markdown(run.summary, {"figures/curves.png": "Curves."})
    assert f"{entry['parameters']:,}" in text
    assert "cannot be asked" in text  # one layer sharpens nothing
    assert all(
        len(line) <= 80 for line in tunnel_report.terminal(run.summary).split("\n")
    )


def made_up(run, **metrics):
    """The run with numbers put in place of its own."""
    changed = {
        name: np.broadcast_to(values, run.metrics[name].shape).astype(np.float32)
        for name, values in metrics.items()
    }
    return run._replace(metrics=run.metrics | changed)


def verdicts(run):
    found = [tunnel_report._judged(a) for a in tunnel_report.answers(run, 0)]
    return {answer["claim"]: answer["verdict"] for answer in found}


def test_a_claim_holds_only_beside_all_its_nulls(run):
    keys = "keys become orthogonal axes (layer 1)"
    axis = "values are ordered by posterior entropy (last layer)"
    noise = 0.01 * np.random.default_rng(0).normal(size=(3, SEEDS, 3, 2, 2))
    falling = np.array([0.5, 0.3, 0.1])[None, None, :, None, None] + noise
    for null, verdict in ((0.4, "held"), (0.0, "undecided")):
        found = made_up(run, key_orthogonality=falling, key_orthogonality_random=null)
        assert verdicts(found)[keys] == verdict
    rising = made_up(run, key_orthogonality=1 - falling, key_orthogonality_random=0.4)
    assert verdicts(rising)[keys] == "reversed"

    rho = np.array([0.2, 0.5, 0.9])[None, None, :, None] + noise[..., 0]
    nulls = {"entropy_axis_random": 0.3, "entropy_axis_permuted": 0.05}
    assert verdicts(made_up(run, entropy_axis=rho, **nulls))[axis] == "held"
    nulls["entropy_axis_random"] = 0.9
    assert verdicts(made_up(run, entropy_axis=rho, **nulls))[axis] == "undecided"


def test_sharpening_is_of_the_last_layer_beside_the_first(run):
    claim = "attention sharpens with depth"
    noise = 0.01 * np.random.default_rng(0).normal(size=(3, SEEDS, 1, 1, 1))
    by_layer = np.array([0.8, 0.3])[None, None, None, :, None]
    start = np.ones((1, 1, 3, 1, 1))
    start[:, :, 0] = 0  # equal before training
    entropy = 0.5 + (by_layer + noise - 0.5) * start
    assert verdicts(made_up(run, relative_entropy=entropy))[claim] == "held"
    flipped = entropy[:, :, :, ::-1]
    assert verdicts(made_up(run, relative_entropy=flipped))[claim] == "reversed"


@pytest.mark.parametrize(
    ("single", "together", "share", "verdict"),
    [
        ([0.9, 0.1], 0.9, 1.0, "reversed"),  # one head does all
        ([0.3, 0.3], 0.9, 0.25, "held"),  # two do as much, and more together
        ([0.1, 0.05], 0.9, 0.0, "held"),  # any can stand in for the other
        ([0.9, 0.1], 0.105, None, None),  # the layer does nothing
    ],
)
def test_heads_share_the_work_unless_one_does_it(run, single, together, share, verdict):
    """With 0.1 bits when all are in place."""
    damage = np.broadcast_to(single, (3, SEEDS, 2, 2))
    found = made_up(
        run,
        heldout_kl_bits=np.full((3, SEEDS, 3), 0.1),
        head_averaged_kl_bits=damage,
        heads_averaged_kl_bits=np.full((3, SEEDS, 2), together),
    )
    shares = tunnel_report.largest_shares(found, 0)
    expected = np.nan if share is None else share
    np.testing.assert_allclose(shares, expected, atol=1e-6)
    assert verdicts(found).get("heads share the work") == verdict


def test_to_become_unsure_is_no_precision(run):
    """A start that is worse than chance: the way to chance does not count."""
    nothing = math.log(2) - 0.3
    kl = np.array([nothing + 5, nothing - 0.1, 0.0])[None, None]
    found = made_up(
        run, heldout_kl=kl, bayes_predictive_entropy=np.full((3, SEEDS), 0.3)
    )
    curves = tunnel_report.settling(found).metrics["heldout_kl"]
    np.testing.assert_allclose(curves[0, 0], [nothing, nothing - 0.1, 0], rtol=1e-5)
    times = observations.time_scales(tunnel_report.settling(found), 0, 0.5)
    assert (times.precision == 4).all()  # and not 2, where chance is just passed


def part_of(run, arms):
    """The run as if only these arms had run, with a report of its own."""
    config = run.config["config"]
    rows = [config["run_arms"].index(arm) for arm in arms]
    metrics = {
        name: values[rows] if run.axes["axes"][name][0] == "arm" else values
        for name, values in run.metrics.items()
    }
    config = run.config | {"config": config | {"run_arms": list(arms)}}
    found = run._replace(config=config, metrics=metrics)
    return summarised(found)


def summarised(run):
    wall = {"compile": 1.0, "run": 1.0}
    return run._replace(summary=tunnel_report.summarise(run, wall))


def written(run, folder):
    """All that is written of a run; that it can be is what is tested."""
    drawn = tunnel_figures.draw(run, folder)
    json.dumps(run.summary, allow_nan=False)
    tunnel_report.terminal(run.summary)
    return tunnel_report.markdown(run.summary, drawn)


def test_without_attention_there_is_a_report_all_the_same(run, tmp_path):
    text = written(part_of(run, ["mlp"]), tmp_path)
    assert "Geometry" not in text
    assert not (tmp_path / "attention.png").exists()


def test_a_seed_that_diverged_is_left_out_everywhere(run, tmp_path):
    since = np.full((3, SEEDS), -1)
    since[0, 0] = 2
    metrics = run.metrics | {"diverged_step": since}
    one = summarised(run._replace(metrics=metrics))
    entry = one.summary["arms"]["transformer"]
    assert entry["heldout_kl_bits"]["n"] == SEEDS - 1
    assert entry["longer"]["2"]["n"] == SEEDS - 1
    assert entry["geometry"]["key_orthogonality"]["end"][0]["n"] == SEEDS - 1
    assert entry["ablation"]["layer_zeroed"][0][0]["n"] == SEEDS - 1
    assert "transformer, seed 1." in written(one, tmp_path / "one")

    since = np.where(np.arange(3)[:, None] == 0, 2, since)
    every = summarised(run._replace(metrics=metrics | {"diverged_step": since}))
    assert every.summary["arms"]["transformer"]["heldout_kl_bits"]["mean"] is None
    written(every, tmp_path / "every")


def test_pictures_are_drawn_and_named(run, tmp_path):
    drawn = tunnel_figures.draw(run, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == set(drawn)
    assert set(drawn) >= {"manifold.png", "ablation.png", "attention.png", "longer.png"}
    data = tunnel_figures.position_data(run, "position_kl_bits")
    mean = run.metrics["position_kl_bits"][1, :, -1].mean(axis=0)
    np.testing.assert_allclose(data["mlp"].middle, mean, rtol=1e-5)


def test_a_run_is_read_by_what_its_config_is():
    tables, pictures = launch._readers(tiny_config().to_dict())
    assert (tables, pictures) == (tunnel_report, tunnel_figures)


def test_em_and_two_timescale_are_for_attention_alone():
    config = tiny_config()
    config.arms.bare.kind = "gru"
    del config.arms.bare.mlp_width
    config.arms.bare.positions = "none"
    with pytest.raises(config_lib.ConfigError, match=r"arms\.bare\.schedule='em'"):
        config_lib.check(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms.mlp.heads": 2}, r"arms\.mlp\.heads=2: no such field for a mlp"),
        ({"stretch": 1.01}, r"stretch=1.01: makes no longer sequences"),
        ({"arms.mlp.kind": "history_mlp"}, r"arms\.mlp\.kind='history_mlp': allowed"),
        ({"model.kv_heads": 3}, r"model\.kv_heads=3: allowed: a divisor of heads"),
        ({"probe": 7}, r"probe=7: allowed: a whole number from 1 to 6"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes, message):
    config = tiny_config()
    with config.ignore_type(), config.unlocked():
        for name, value in changes.items():
            config.update_from_flattened_dict({name: value})
    with pytest.raises(config_lib.ConfigError, match=message):
        config_lib.check(config)


@pytest.mark.slow
def test_equal_tokens_count_once_among_keys(program):
    """Of a header in which one number stands everywhere there is no pair of keys."""
    config = program.config
    model = wind_tunnel.reading(config, config_lib.structure(config.arms.transformer))
    params = wind_tunnel.init(
        config, config_lib.structure(config.arms.transformer), jax.random.key(0)
    )
    task = catalogue.TASKS["hmm"].build(config.task, jax.random.key(0))
    batch = wind_tunnel._several(task, jax.random.key(1), config.heldout)

    def orthogonality(tokens):
        changed = batch._replace(inputs=tokens)
        activations = wind_tunnel._apply(model, params, tokens)
        found = wind_tunnel._of_keys(config, activations, changed, jax.random.key(2), 2)
        return np.asarray(found["key_orthogonality"][""])

    inputs = np.array(batch.inputs)
    header = inputs.shape[1] - config.task.num_observations
    inputs[:, :header] = 50
    assert np.isnan(orthogonality(inputs)).all()
    inputs[:, 1] = 30  # two kinds: one pair, whatever how often
    twice = orthogonality(inputs)
    inputs[:, 2:header] = 30
    # The first of each kind is all that counts, in the first layer to the last bit.
    np.testing.assert_allclose(orthogonality(inputs)[0], twice[0], rtol=1e-5)
