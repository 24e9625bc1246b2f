"""Transformers in a sweep: what is scored, seen and written of them."""

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from engines import advance_all, build
from fake_runs import write_records
from ml_collections import ConfigDict

from jaxattn import experiments, runs, tasks
from jaxattn.analysis import findings, layer_curves, layers, observations
from jaxattn.engine import rounds, training
from jaxattn.experiments import layered
from jaxattn.experiments import transformer as kind
from jaxattn.experiments.experiment import draw_several
from jaxattn.fields import ConfigError
from jaxattn.measures import layers as measured_layers
from jaxattn.measures import scores
from jaxattn.models import transformer
from jaxattn.runs import checkpoints, weights
from jaxattn.theory import attention
from jaxattn.views import layers_figures, layers_report

SEEDS = 3  # of which two train at once


def tiny_config(**changes):
    """Two layers, one layer, none; in another order than the alphabet's."""
    config = experiments.load("configs/hmm.py:smoke").config
    arm = config.arms.transformer.to_dict()
    small = {
        "seeds": SEEDS,
        "steps": 4,
        "eval_every": 2,
        "batch_size": 3,
        "heldout": 6,
        "analysed_sequences": 2,
        "eval_length_factor": 2.0,
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
                "algorithm": "em",
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
    if config.get("claims"):
        del config.claims
    return config


@pytest.fixture(scope="module", autouse=True)
def _standard_promotion():
    """Optax takes powers of a count in its Adam."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def program():
    experiment = experiments.resolve(tiny_config())
    return build(experiment, workers=2, keep_weights=True)


@pytest.fixture(scope="module")
def result(program):
    return advance_all(program, rounds.start())


@pytest.fixture(scope="module")
def run(program, result, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return summarised(write_records(folder, program.experiment, result))


# --- the sweep


def test_a_run_in_the_middle_goes_on_with_the_same_bits(program, result, tmp_path):
    carry = rounds.start()
    while not (carry.done and carry.rounds and carry.rounds[0].step > 0):
        carry = rounds.advance(program, carry)
    record = training.recorded(program.experiment)
    training.keep(program, record, tmp_path, carry, 1.0)
    content = checkpoints.read(tmp_path)
    carry, _ = training.resumed(program, content)
    again = advance_all(program, carry)
    jax.tree.map(np.testing.assert_array_equal, again, result)
    assert {len(leaf) for leaf in jax.tree.leaves(again.weights)} == {SEEDS}
    with pytest.raises(runs.RunError, match="finished with them"):
        training.resumed(program._replace(keeps_weights=False), content)


def test_every_array_has_its_axes_named_and_nothing_diverged(run):
    assert (run["diverged_step"] == -1).all()
    named = {name for name in layered.AXES if name in run}
    assert named == set(layered.AXES)
    assert run.attention_map.dims == (
        *("arm", "seed", "layer", "head", "query_position", "source_position"),
    )


def test_what_an_arm_has_not_is_not_made_up(run):
    """Arms: two layers of two heads, none at all, one layer without an MLP."""
    entropy = np.isfinite(run["relative_entropy"].values[:, 0, -1])
    np.testing.assert_array_equal(
        entropy, [[[1, 1], [1, 1]], [[0, 0], [0, 0]], [[1, 1], [0, 0]]]
    )
    streams = np.isfinite(run["belief_read_out"].values[:, 0, -1])
    np.testing.assert_array_equal(streams, [[1, 1, 1], [1, 1, 1], [1, 1, 0]])
    # An MLP without attention has nothing taken out.
    mlps = np.isfinite(run["mlp_zeroed_kl_bits"].values[:, 0])
    np.testing.assert_array_equal(mlps, [[1, 1], [0, 0], [0, 0]])
    assert not layer_curves.attends(run, 1)


def test_arms_of_one_architecture_start_alike_and_others_do_not(run):
    start = run["heldout_kl_bits"].values[:, :, 0]
    assert (np.abs(start[0] - start[2]) > 1e-6).all()
    assert (run["attention_drift"].values[0, :, -1] == 0).all()
    assert (run["attention_drift"].values[0, :, 0] > 0).all()


def trained(program):
    """The trained parameters of the first seed, and its held-out sequences."""
    experiment, carry = program.experiment, rounds.start()
    last = experiment.steps - experiment.eval_every
    while not carry.rounds or carry.rounds[0].step < last:
        carry = rounds.advance(program, carry)
    round_ = carry.rounds[0]
    problem, params = jax.tree.map(
        lambda leaf: leaf[0],
        (round_.problems[0], round_.states["transformer"][0].params),
    )
    index = int(np.searchsorted(experiment.evaluation_steps(), round_.step))
    curves = round_.records.curves
    found = {name: curve[0, 0, index] for name, curve in curves.items()}
    return params, problem, found


def architecture(program, arm="transformer"):
    (own,) = (a.reading for a in program.experiment.arms if a.name == arm)
    return own


def test_metrics_are_those_worked_out_by_hand(program):
    config = program.experiment.config
    params, problem, found = trained(program)
    model = architecture(program)
    batch, log_bayes = problem.heldout, np.asarray(problem.log_bayes_heldout)
    apply = jax.jit(jax.vmap(lambda x: transformer.apply(model, params, x)))
    activations = apply(batch.inputs)
    log_p = np.asarray(jax.nn.log_softmax(activations.logit))
    scored = np.asarray(batch.weights[0]) > 0
    assert scored.sum() == config["task"]["num_observations"]
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

    # Attention of the probes, head by head, with the keys that they share.
    mask = attention.causal_mask(batch.inputs.shape[1])
    for layer, heads in enumerate(activations.heads):
        for head in range(model.heads):
            entropies = []
            for n in range(config["analysed_sequences"]):
                a = attention.weights(
                    attention.scores(heads.query[n, :, head], heads.key[n, :, 0]), mask
                )
                count = np.arange(2, len(a) + 1)
                h = np.asarray(attention.attention_entropy(a))[1:] / np.log(count)
                entropies.append(h.mean())
            assert found["relative_entropy"][layer, head] == pytest.approx(
                np.mean(entropies), rel=1e-3
            )


def test_the_accuracy_of_bayes_is_that_of_its_likeliest_state(program, run):
    _, problem, _ = trained(program)
    scored = np.asarray(problem.heldout.weights) > 0
    likeliest = np.exp(np.asarray(problem.log_bayes_heldout)).max(axis=2)
    expected = likeliest[scored].mean()
    assert run.bayes_accuracy.values[0, 0] == pytest.approx(expected, rel=1e-5)


def test_weights_are_read_back_or_said_what_is_wrong(program, result, run):
    path, experiment = Path(run.attrs["path"]), program.experiment
    weights.write_weights(path, result.weights)
    params = runs.load_weights(path, "transformer", 1)
    problem = jax.jit(lambda n: experiment.draw(experiment.seed_key(n)))(1)
    model = architecture(program)

    @jax.jit
    def kl_of(params):
        apply = jax.vmap(lambda x: transformer.apply(model, params, x).logit)
        batch, log_bayes = problem.heldout, problem.log_bayes_heldout
        found = jax.vmap(scores.scores)(apply(batch.inputs), batch, log_bayes)
        return found["kl"].mean()

    found = run.heldout_kl.sel(arm="transformer", seed=1, step=experiment.steps)
    assert float(kl_of(params)) == pytest.approx(float(found), rel=1e-4)

    whole = result.weights["transformer"]
    block = whole["blocks"][1] | {"mlp": {"up": whole["blocks"][0]["mlp"]["up"]}}
    wider = jax.tree.map(lambda leaf: np.repeat(leaf, 2, axis=-1), whole)
    for wrong, said in (
        (whole | {"blocks": {0: whole["blocks"][0]}}, r"blocks\.1\.\S+ is missing"),
        (
            whole | {"blocks": {0: whole["blocks"][0], 1: block}},
            r"blocks\.1\.mlp\.down\.bias is missing; blocks\.1\.mlp\.down\.kernel is",
        ),
        (wider, r"attention\.key\.kernel is \(8, 8\), must be \(8, 4\)"),
    ):
        weights.write_weights(path, {"transformer": wrong})
        with pytest.raises(runs.RunError, match=said):
            runs.load_weights(path, "transformer", 0)
    with pytest.raises(runs.RunError, match=r"seed=7: not in run .* one of 0, 1, 2"):
        runs.load_weights(path, "transformer", 7)
    (path / "weights.msgpack").write_bytes(b"half of it")
    with pytest.raises(runs.RunError, match="cannot be read"):
        runs.load_weights(path, "transformer", 0)


def test_dropout_is_for_training_alone():
    config = tiny_config(run_arms=("transformer",))
    config.unlock().arms.transformer.dropout_rate = 0.5
    experiment = experiments.resolve(config)
    (arm,) = experiment.arms
    assert arm.reading.dropout_rate == 0
    assert ("dropout_rate", 0.5) in arm.program
    key = experiment.seed_key(0)
    problem = jax.jit(experiment.draw)(key)
    algorithm = arm.algorithm(arm.rates)
    state = jax.jit(lambda: algorithm.init(arm.start(key)))()
    step = jax.jit(algorithm.step)
    found = {
        float(step(state, problem.train, jax.random.key(n))[1].loss) for n in range(3)
    }
    assert len(found) == 3


# --- positions that count


@pytest.mark.parametrize("name", ["bijection", "hmm", "recall"])
def test_scored_positions_are_those_with_a_weight(name):
    config = experiments.load(f"configs/{name}.py:smoke").config
    spec = tasks.SPECS[name]
    fields = kind.longest(spec, config.task.to_dict(), config.eval_length_factor)
    task = spec.build(fields, jax.random.key(0))
    draw = jax.jit(lambda key: draw_several(task.sample, key, 5))
    found = np.asarray(draw(jax.random.key(1)).weights)
    assert (found > 0).sum(axis=1).tolist() == [spec.transformer.scored(fields)] * 5


@pytest.mark.parametrize("name", ["bijection", "hmm", "recall"])
def test_baselines_are_of_as_many_parameters(name):
    for variant in ("", ":paper"):
        config = experiments.load(f"configs/{name}.py{variant}").config
        config.run_arms = tuple(config.arms)
        arms = experiments.resolve(config).arms
        sizes = {arm.name: transformer.size(arm.reading) for arm in arms}
        for arm in {"mlp", "history_mlp", "gru"} & sizes.keys():
            assert abs(sizes[arm] / sizes["transformer"] - 1) < 0.1, (variant, arm)


def test_sizes_are_those_of_the_companion_paper():
    """As in arXiv 2512.22471."""
    bijection, hmm = (
        experiments.load(f"configs/{name}.py:paper").config
        for name in ("bijection", "hmm")
    )
    assert (bijection.task.num_symbols, bijection.model.width) == (20, 192)
    assert (bijection.model.depth, bijection.model.heads) == (6, 6)
    assert (hmm.task.num_states, hmm.task.num_symbols) == (5, 5)
    assert hmm.task.num_observations == 20
    assert (hmm.model.depth, hmm.model.heads, hmm.model.width) == (9, 8, 256)


# --- the report


def test_the_report_says_what_the_arrays_say(run):
    summary = json.loads(json.dumps(run.attrs["summary"], allow_nan=False))
    entry = summary["arms"]["transformer"]
    kl = run["heldout_kl_bits"].values[0, :, -1]
    assert entry["heldout_kl_bits"]["mean"] == pytest.approx(kl.mean())
    over = summary["arms"]["mlp"]["log_kl_over_baseline"]["mean"]
    others = run["heldout_kl_bits"].values[1, :, -1]
    assert over == pytest.approx(np.log(others / kl).mean(), rel=1e-4)
    long_kl = run["long_kl_bits"].values[0]
    assert long_kl.shape == (SEEDS, 6)
    assert list(entry["longer"]) == ["1", "1.5", "2"]
    assert entry["longer"]["1.5"]["mean"] == pytest.approx(long_kl[:, :4].mean())
    assert len(entry["geometry"]["key_orthogonality"]["end"]) == 2
    assert len(entry["geometry"]["belief_read_out"]["end"]) == 3
    assert len(summary["arms"]["bare"]["geometry"]["entropy_axis"]["end"]) == 1
    assert "geometry" not in summary["arms"]["mlp"]
    assert "mlp_zeroed" not in summary["arms"]["bare"]["ablation"]
    text = layers_report.markdown(
        run.attrs["summary"], {"figures/curves.png": "Curves."}
    )
    assert f"{entry['parameters']:,}" in text
    assert "cannot be asked" in text  # one layer sharpens nothing
    assert all(
        len(line) <= 80
        for line in layers_report.terminal(run.attrs["summary"]).split("\n")
    )


def made_up(run, **metrics):
    """The run with numbers put in place of its own."""
    changed = {
        name: np.broadcast_to(values, run[name].shape).astype(np.float32)
        for name, values in metrics.items()
    }
    return run.assign({name: (run[name].dims, a) for name, a in changed.items()})


def verdicts(run):
    found = [findings.judged_entry(f) for f in findings.findings_of(run, 0)]
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
    shares = findings.largest_shares(found, 0)
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
    curves = layer_curves.settling(found)["heldout_kl"].values
    np.testing.assert_allclose(curves[0, 0], [nothing, nothing - 0.1, 0], rtol=1e-5)
    times = observations.time_scales(layer_curves.settling(found), 0, 0.5)
    assert (times.precision == 4).all()  # and not 2, where chance is just passed


def part_of(run, arms):
    """The run as if only these arms had run, with a report of its own."""
    config = run.attrs["config"] | {"run_arms": list(arms), "baseline": arms[0]}
    return summarised(run.sel(arm=list(arms)).assign_attrs(config=config))


def summarised(run):
    wall = {"compile": 1.0, "run": 1.0}
    return run.assign_attrs(summary=layers.summarise(run, wall))


def written(run, folder):
    """All that is written of a run; that it can be is what is tested."""
    drawn = layers_figures.draw(run, folder)
    json.dumps(run.attrs["summary"], allow_nan=False)
    layers_report.terminal(run.attrs["summary"])
    return layers_report.markdown(run.attrs["summary"], drawn)


def test_without_attention_there_is_a_report_all_the_same(run, tmp_path):
    text = written(part_of(run, ["mlp"]), tmp_path)
    assert "Geometry" not in text
    assert not (tmp_path / "attention.png").exists()


def test_a_seed_that_diverged_is_left_out_everywhere(run, tmp_path):
    since = np.full((3, SEEDS), -1)
    since[0, 0] = 2
    one = summarised(run.assign(diverged_step=(("arm", "seed"), since)))
    entry = one.attrs["summary"]["arms"]["transformer"]
    assert entry["heldout_kl_bits"]["n"] == SEEDS - 1
    assert entry["longer"]["2"]["n"] == SEEDS - 1
    assert entry["geometry"]["key_orthogonality"]["end"][0]["n"] == SEEDS - 1
    assert entry["ablation"]["layer_zeroed"][0][0]["n"] == SEEDS - 1
    assert "transformer, seed 1." in written(one, tmp_path / "one")

    since = np.where(np.arange(3)[:, None] == 0, 2, since)
    every = summarised(run.assign(diverged_step=(("arm", "seed"), since)))
    assert (
        every.attrs["summary"]["arms"]["transformer"]["heldout_kl_bits"]["mean"] is None
    )
    written(every, tmp_path / "every")


def test_pictures_are_drawn_and_named(run, tmp_path):
    drawn = layers_figures.draw(run, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == set(drawn)
    assert set(drawn) >= {"manifold.png", "ablation.png", "attention.png", "longer.png"}
    data = layers_figures.position_data(run, "position_kl_bits")
    mean = run["position_kl_bits"].values[1, :, -1].mean(axis=0)
    np.testing.assert_allclose(data["mlp"].middle, mean, rtol=1e-5)


def test_em_and_two_timescale_are_for_attention_alone():
    config = tiny_config()
    config.arms.bare.kind = "gru"
    del config.arms.bare.mlp_width
    config.arms.bare.positions = "none"
    with pytest.raises(ConfigError, match=r"arms\.bare\.algorithm='em': must be"):
        experiments.check(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms.mlp.heads": 2}, r"arms\.mlp\.heads=2: no such field for a mlp"),
        (
            {"eval_length_factor": 1.01},
            r"eval_length_factor=1.01: makes no longer sequences",
        ),
        ({"arms.mlp.kind": "history_mlp"}, r"arms\.mlp\.kind='history_mlp': must"),
        ({"model.kv_heads": 3}, r"model\.kv_heads=3: must be a divisor of heads"),
        ({"analysed_sequences": 7}, r"analysed_sequences=7: must be an integer from 1"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes, message):
    config = tiny_config()
    with config.ignore_type(), config.unlocked():
        for name, value in changes.items():
            config.update_from_flattened_dict({name: value})
    with pytest.raises(ConfigError, match=message):
        experiments.check(config)


def test_equal_tokens_count_once_among_keys(program):
    """Of a header in which one number stands everywhere there is no pair of keys."""
    model, fields = architecture(program), program.experiment.config["task"]
    params = transformer.init(model, jax.random.key(0))
    spec = tasks.SPECS["hmm"]
    task = spec.build(fields, jax.random.key(0))
    batch = draw_several(task.sample, jax.random.key(1), 2)

    @jax.jit
    def orthogonality(tokens):
        activations = jax.vmap(lambda x: transformer.apply(model, params, x))(tokens)
        heads = measured_layers.by_head(activations.heads)
        key, which = jax.random.key(2), spec.transformer.keys(fields)
        found = measured_layers.of_keys(heads, tokens, which, key, 2)
        return found["key_orthogonality"][""]

    inputs = np.array(batch.inputs)
    header = inputs.shape[1] - fields["num_observations"]
    inputs[:, :header] = 50
    assert np.isnan(orthogonality(inputs)).all()
    inputs[:, 1] = 30  # two kinds: one pair, whatever how often
    twice = orthogonality(inputs)
    inputs[:, 2:header] = 30
    # The first of each kind is all that counts, in the first layer to the last bit.
    np.testing.assert_allclose(orthogonality(inputs)[0], twice[0], rtol=1e-5)
