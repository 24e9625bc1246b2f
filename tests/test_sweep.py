"""Sweeps: a seed's numbers are its own; every gradient and optimizer runs."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import attention, losses, stats, sweep
from jaxattn import config as config_lib

EVERY_ARM = ("sgd", "em", "sgd_matched", "adam")
CONFIG = Path(__file__).parents[1] / "configs" / "sticky.py"


@pytest.fixture(autouse=True)
def _library_promotion():
    with jax.numpy_dtype_promotion("standard"):  # Adam's own arithmetic
        yield


def small_config(**changes):
    """Two arms that share a program, unless told otherwise: compiling is what takes."""
    config = config_lib.load(f"{CONFIG}:smoke")
    config.update_from_flattened_dict({"run_arms": ("sgd", "sgd_matched")} | changes)
    config_lib.check(config)
    return config


def run(config, workers=1):
    program = sweep.build(config, workers=workers)
    carry = sweep.start(program)
    while carry.step < config.steps:
        carry = sweep.advance(program, carry)
    return sweep.finish(program, carry)


def small_grid(**changes):
    config = config_lib.load(f"{CONFIG.with_name('rates.py')}:smoke")
    few = {"run_arms": ("two_timescale",), "steps": 6, "eval_every": 3}
    # Autodiff of short sequences compiles in less time.
    few["gradient"] = "autodiff"
    config.update_from_flattened_dict(few | changes)
    config_lib.check(config)
    return config


def assert_same_bits(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_a_seed_does_not_depend_on_the_others():
    many = run(small_config(seeds=4)).curves
    few = run(small_config(seeds=2)).curves
    assert_same_bits({name: curve[:, :2] for name, curve in many.items()}, few)
    assert len(np.unique(many["train_loss"][0, :, -1])) == 4


def test_an_arm_does_not_depend_on_the_others():
    every = run(small_config(run_arms=EVERY_ARM)).curves
    adam = run(small_config(run_arms=("adam",))).curves
    assert_same_bits({name: curve[3:] for name, curve in every.items()}, adam)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_numbers_do_not_depend_on_the_number_of_workers(workers):
    """Three seeds in hands of 3; of 2, the last padded; of 1."""
    config = small_config(seeds=3)
    assert_same_bits(run(config, workers=workers), run(config))


def test_stopping_in_between_changes_nothing():
    config = small_config()
    program = sweep.build(config, workers=1)
    carry = sweep.advance(program, sweep.start(program))
    again = sweep.build(config, workers=1)
    while carry.step < config.steps:
        carry = sweep.advance(again, carry)
    assert_same_bits(sweep.finish(again, carry), run(config))


def test_how_often_it_evaluates_changes_nothing():
    often, seldom = (run(small_config(eval_every=e)) for e in (4, 20))
    assert_same_bits(
        {name: curve[..., [0, -1]] for name, curve in often.curves.items()},
        seldom.curves,
    )


def test_a_last_stretch_that_is_shorter():
    result = run(small_config(steps=7, eval_every=5))
    np.testing.assert_array_equal(result.step, [0, 5, 7])
    assert np.isfinite(result.curves["train_loss"]).all()


@pytest.mark.parametrize("gradient", ["laws", "autodiff"])
def test_another_way_to_the_gradient_gives_the_same_run(gradient):
    default = run(small_config()).curves
    other = run(small_config(gradient=gradient)).curves
    for name in ("train_loss", "heldout_kl"):
        np.testing.assert_allclose(other[name], default[name], atol=2e-5)


def test_side_by_side_gives_the_same_run():
    one_by_one, together = (run(small_config(vmap_seeds=v)).curves for v in (1, 2))
    np.testing.assert_allclose(
        one_by_one["train_loss"], together["train_loss"], atol=1e-5
    )


def test_em_on_several_sequences_a_step_and_seeds_side_by_side():
    """Closed-form M-steps too: see `m_steps._eigh` on what could wait forever."""
    changes = {"run_arms": ("em_majorised",), "gradient": "autodiff", "batch_size": 2}
    one_by_one, together = (
        run(small_config(**changes, vmap_seeds=v, seeds=3)).curves for v in (1, 3)
    )
    np.testing.assert_allclose(
        one_by_one["train_loss"], together["train_loss"], atol=1e-4
    )
    falls = np.diff(one_by_one["train_loss"][..., [0, -1]])
    assert (falls < 0).all()


def test_a_diverging_arm_leaves_the_others_alone():
    wild = run(small_config(**{"arms.sgd_matched.learning_rate": 1e30}))
    tame = run(small_config())
    assert not np.isfinite(wild.curves["train_loss"][1, :, -1]).any()
    for name, curve in tame.curves.items():
        np.testing.assert_array_equal(wild.curves[name][0], curve[0])


def test_fresh_sequences_differ_from_step_to_step_and_are_remembered():
    config = small_config(fresh=True, batch_size=2, steps=3, eval_every=1)
    result = run(config)
    at_rest = run(
        small_config(
            **{"arms.sgd.learning_rate": 0.0},
            fresh=True,
            steps=3,
            eval_every=1,
            run_arms=("sgd",),
        )
    )
    # Nothing is learned, yet the loss moves: other sequences.
    assert len(np.unique(at_rest.curves["train_loss"][0, 0, 1:])) == 3
    assert len(np.unique(at_rest.curves["heldout_loss"][0, 0])) == 1
    assert_same_bits(result.curves, run(config).curves)


def test_fresh_train_loss_is_beside_the_floor_of_its_own_sequence():
    config = small_config(fresh=True, steps=4, eval_every=1, run_arms=("sgd",))
    curves = run(config).curves
    assert len(np.unique(curves["train_bayes_nll"][0, 0, 1:])) == 4
    assert len(np.unique(curves["heldout_bayes_nll"])) == config.seeds
    # Chance-level loss and exact answer move together from sequence to sequence.
    gap = curves["train_loss"] - curves["train_bayes_nll"]
    assert (gap > 0).all()


def test_per_seed_embeddings_differ():
    shared, own = (
        sweep.build(
            small_config(**{"task.embedding_seed": seed}, run_arms=("sgd",)), workers=1
        ).problems
        for seed in (0, -1)
    )

    def mean_of_symbol_zero(problems):
        seen = problems.train.targets[:, 0, :-1] == 0
        inputs = problems.train.inputs[:, 0, 1:]
        return [x[s].mean(axis=0) for x, s in zip(inputs, seen, strict=True)]

    gap = [np.linalg.norm(np.subtract(*mean_of_symbol_zero(p))) for p in (shared, own)]
    assert gap[0] < 2.5 < gap[1]


def test_rates_share_a_program():
    one, two = (
        sweep.build(small_config(run_arms=arms), workers=1)
        for arms in (("sgd",), ("sgd", "sgd_matched"))
    )
    assert len(one.train) == len(two.train) == 1
    carry = sweep.advance(two, sweep.start(two))
    slow, fast = carry.curves["train_loss"][:, 0, 1]
    assert fast < slow


@pytest.mark.slow
def test_no_trained_model_beats_bayes_on_fresh_sequences():
    """Paired over 64 sequences: the loss of every arm lies above the exact answer's."""
    config = small_config(
        **{"task.length": 500}, run_arms=EVERY_ARM, steps=300, eval_every=100
    )
    program = sweep.build(config, workers=1)
    carry = sweep.start(program)
    while carry.step < config.steps:
        carry = sweep.advance(program, carry)
    task = sweep._task(config, jnp.uint32(0))
    mask = attention.causal_mask(499)

    @jax.jit
    def losses_of(params, keys):
        def one(key):
            batch = task.sample(key)
            model = attention.readout(params, batch.inputs, mask).logit
            return (
                losses.cross_entropy(model, batch.targets),
                losses.cross_entropy(task.bayes(batch), batch.targets),
            )

        return jax.lax.map(one, keys)

    keys = jax.random.split(jax.random.key(99), 64)
    for arm in config.run_arms:
        params = jax.tree.map(lambda leaf: leaf[0], carry.states[arm].params)
        model, bayes = losses_of(params, keys)
        low, _ = stats.paired_difference(model, bayes).ci95
        assert low > 0.02, arm


def test_a_diverging_seed_leaves_the_others_alone():
    """The same program, with one seed's weights made infinite before it trains."""
    config = small_config(run_arms=("sgd",), seeds=3)
    program = sweep.build(config, workers=1)
    carry = sweep.start(program)
    states = jax.tree.map(np.array, carry.states)
    states["sgd"].params.w_q[1] = np.inf
    wild = sweep.advance(program, carry._replace(states=states))
    tame = sweep.advance(program, carry)
    for name, curve in tame.curves.items():
        assert name.endswith("bayes_nll") or not np.isfinite(wild.curves[name][0, 1, 1])
        np.testing.assert_array_equal(wild.curves[name][0, [0, 2]], curve[0, [0, 2]])


# --- grids


@pytest.mark.parametrize(
    "arm",
    [
        "em_online",
        pytest.param("two_timescale", marks=pytest.mark.slow),
        pytest.param("em_gradient", marks=pytest.mark.slow),
    ],
)
def test_a_point_of_a_grid_is_the_run_with_its_rates(arm):
    config = small_grid(run_arms=(arm,))
    points = sweep.points(config)
    assert len(points.scale) == 2 * 3 * 2
    curves = run(config).curves
    assert curves["heldout_kl"].shape == (1, 12, config.seeds, 3)
    for index in (4, 11):  # the second with fresh sequences
        alone = small_config(
            seeds=config.seeds,
            steps=6,
            eval_every=3,
            gradient=config.gradient,
            fresh=bool(points.fresh[index]),
            **{"task.length": config.task.length},
        )
        alone.arms.there = config.arms[arm].to_dict() | at_point(points, arm, index)
        alone.run_arms = ("there",)
        config_lib.check(alone)
        for name, curve in run(alone).curves.items():
            np.testing.assert_allclose(curves[name][0, index], curve[0], atol=3e-5)


def at_point(points, arm, index):
    scale, ratio = (float(axis[index]) for axis in (points.scale, points.ratio))
    rates = {"routing_rate": scale, "output_rate": scale}
    if arm in ("two_timescale", "em_gradient"):
        return rates | {"value_rate": scale * ratio}
    return rates | {"ridge": 0.1 / ratio}


def test_a_grid_is_one_program_for_each_kind_of_arm():
    arms = ("two_timescale", "em_majorised", "em_online")
    program = sweep.build(small_grid(run_arms=arms), workers=1)
    assert len(program.train) == 2  # the online arm has another rate, that is all


def test_stopping_a_grid_in_between_changes_nothing():
    config = small_grid()
    program = sweep.build(config, workers=2)
    carry = sweep.advance(program, sweep.start(program))
    again = sweep.build(config, workers=1)
    while carry.step < config.steps:
        carry = sweep.advance(again, carry)
    assert_same_bits(sweep.finish(again, carry), run(config))


def test_fresh_points_draw_and_the_others_do_not():
    config = small_grid(**{"grid.scale": (1e-9,)}, steps=3, eval_every=1)
    points, curves = sweep.points(config), run(config).curves["train_bayes_nll"]
    for index, fresh in enumerate(points.fresh):
        assert len(np.unique(curves[0, index, 0, 1:])) == (3 if fresh else 1)
