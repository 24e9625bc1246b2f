"""Rounds of seeds: a seed's numbers are its own; every gradient and optimizer runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import advance_all, build, run, small_config, small_grid, small_source

from jaxattn import experiments, tasks
from jaxattn.analysis import stats
from jaxattn.engine import memory, rounds
from jaxattn.experiments import sequences
from jaxattn.measures import diagnostics
from jaxattn.theory import attention, losses

EVERY_ARM = ("sgd", "values_fast", "sgd_10x", "adam")


@pytest.fixture(autouse=True)
def _library_promotion():
    with jax.numpy_dtype_promotion("standard"):  # Adam's own arithmetic
        yield


@pytest.fixture(scope="module")
def default():
    """What `small_config` gives."""
    with jax.numpy_dtype_promotion("standard"):
        return run(small_config())


def assert_same_bits(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_a_seed_does_not_depend_on_the_others(default):
    many = run(small_config(seeds=4)).curves
    assert default.seeds.tolist() == [0, 1]
    assert_same_bits(
        {name: curve[:, :2] for name, curve in many.items()}, default.curves
    )
    assert len(np.unique(many["train_loss"][0, :, -1])) == 4


def test_an_arm_does_not_depend_on_the_others():
    both = run(small_config(run_arms=("sgd", "adam"))).curves
    adam = run(small_config(run_arms=("adam",))).curves
    assert_same_bits({name: curve[1:] for name, curve in both.items()}, adam)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4])
def test_numbers_do_not_depend_on_the_number_of_workers(workers):
    """Three seeds in rounds of 2, the last padded; and of 3 where 4 would go."""
    config = small_config(seeds=3, run_arms=("sgd", "em_majorised"))
    assert_same_bits(run(config, workers), run(config))


@pytest.mark.parametrize(
    ("devices", "together"),
    [
        (2, 2),
        pytest.param(1, 3, marks=pytest.mark.slow),
    ],
)
def test_batches_sharded_over_devices_give_the_same_run(devices, together):
    """As on accelerators: one program on a mesh, to rounding."""
    config = small_config(seeds=5, run_arms=("sgd", "em_majorised"))
    program = build(config, devices=devices, together=together)
    assert program.plan.batch == devices * together
    alone, sharded = run(config), advance_all(program, rounds.start())
    for name, curve in alone.curves.items():
        tolerance = 0.02 if "accuracy" in name else 2e-3
        np.testing.assert_allclose(sharded.curves[name], curve, atol=tolerance)
    assert_same_bits(sharded.diverged_step, alone.diverged_step)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (4, 3),
        pytest.param(1, 2, marks=pytest.mark.slow),
    ],
)
def test_going_on_with_other_workers_changes_nothing(before, after):
    """A round of 4 becomes one of 3 and one of 1, and so on; stopped twice."""
    config = small_config(seeds=5, snapshot_seeds=(1, 4), diagnostics_length=20)
    first, second = (build(config, workers) for workers in (before, after))
    carry = rounds.start()
    for program, other in ((first, second), (second, first)):
        for _ in range(4):
            carry = rounds.advance(program, carry)
        whole = rounds.collect(program, carry)
        assert rounds.steps_done(first.experiment, whole) == rounds.steps_done(
            first.experiment, carry
        )
        carry = rounds.deal(other, whole)
        assert max(len(r.records.seeds) for r in carry.rounds) <= other.plan.slots
    assert_same_bits(advance_all(first, carry), run(config))


@pytest.mark.slow
def test_memory_is_given_to_rounds_not_to_seeds():
    """States are of one round, however many seeds; of the others metrics are kept."""

    def largest(seeds):
        watched = {"snapshot_seeds": (0,), "diagnostics_length": 20}
        config = small_config(seeds=seeds, steps=10, **watched)
        program = build(config, workers=2)
        carry, sizes = rounds.start(), []
        while not rounds.is_done(program.experiment, carry):
            carry = rounds.advance(program, carry)
            states = [(r.states, r.trail, r.problems) for r in carry.rounds]
            done = [(part.curves, part.traits, part.snapshots) for part in carry.done]
            others = memory.size((carry, ())) - memory.size([states, done])
            sizes.append((memory.size(states), others - 12 * seeds))
        return np.max(sizes, axis=0)

    few, many = largest(2), largest(8)
    assert (many <= few + 200).all()


def compilations(function):
    """What a function gives, and how many programs were compiled meanwhile."""
    counted = []

    def listen(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            counted.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        return function(), len(counted)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(
    "make", ["small_config", pytest.param("small_grid", marks=pytest.mark.slow)]
)
def test_compiles_once_for_each_structure_and_never_again(make):
    """Beside training: drawing, evaluating, without a grid looking and pictures."""
    watched = {"snapshot_seeds": (0,), "diagnostics_length": 20}
    changes = watched if make == "small_config" else {}
    few, many = (globals()[make](seeds=seeds, **changes) for seeds in (2, 5))
    structures = len({arm.program for arm in few.arms})
    built = [compilations(lambda c=c: build(c, workers=2)) for c in (few, many)]
    others = 4 if make == "small_config" else 2
    assert [count for _, count in built] == [structures + others] * 2
    program, _ = built[1]
    _, more = compilations(lambda: advance_all(program, rounds.start()))
    assert more == 0
    _, planted = compilations(lambda: jax.jit(lambda x: x * 2)(np.arange(7)))
    assert planted == 1


def test_stopping_in_between_changes_nothing(default):
    program = build(small_config())
    carry = rounds.advance(program, rounds.advance(program, rounds.start()))
    assert_same_bits(advance_all(build(small_config()), carry), default)


def test_how_often_it_evaluates_changes_nothing(default):
    often, seldom = default, run(small_config(eval_every=20))
    assert_same_bits(
        {name: curve[..., [0, -1]] for name, curve in often.curves.items()},
        seldom.curves,
    )


def test_a_last_stretch_that_is_shorter():
    config = small_config(steps=7, eval_every=5)
    np.testing.assert_array_equal(config.evaluation_steps(), [0, 5, 7])
    assert np.isfinite(run(config).curves["train_loss"]).all()


def test_what_is_kept_along_the_way_is_what_the_weights_say():
    config = small_config(
        seeds=3,
        snapshot_seeds=(2, 0),
        snapshots=3,
        snapshot_length=50,
        diagnostics_length=50,
    )
    program = build(config)
    carry, way = rounds.start(), {}
    while not rounds.is_done(program.experiment, carry):
        carry = rounds.advance(program, carry)
        for round_ in carry.rounds:
            seed, step = int(round_.records.seeds[0]), int(round_.step)
            way[seed, step] = round_.states["sgd"][0].params
    kept, steps = rounds.finished(config, carry), config.evaluation_steps()
    assert config.snapshot_indices() == [0, 2, 4]
    assert kept.snapshots["attention"].shape == (2, 2, 3, 50, 50)
    mask = attention.causal_mask(50)
    for row, seed in enumerate((0, 2)):
        heldout = config.draw(config.seed_key(np.uint32(seed))).heldout
        trail = [way[seed, step] for step in steps[:-1]]
        forwards = [
            attention.forward(
                jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), params),
                heldout.inputs[:50],
                mask,
            )
            for params in trail
        ]
        drift = kept.curves["attention_drift"][1, seed]
        assert drift[-1] == 0
        for column, f in enumerate(forwards):
            if column in (0, 2):
                place = column // 2
                of_seed = {n: a[1, row, place] for n, a in kept.snapshots.items()}
                for name, array in (
                    ("attention", f.weight),
                    ("query", f.query),
                    ("key", f.key),
                    ("value", f.value),
                    ("target", heldout.targets[:50]),
                ):
                    np.testing.assert_allclose(of_seed[name], array, atol=1e-6)
            relative = diagnostics.relative_entropy(f.weight, mask)
            expected = float(diagnostics.mean(relative).value)
            found = kept.curves["relative_entropy"][1, seed, column]
            assert found == pytest.approx(expected, abs=1e-5)
        end = kept.snapshots["attention"][1, row, -1]
        first = np.abs(np.asarray(forwards[0].weight) - end).sum(axis=1).mean() / 2
        assert drift[0] == pytest.approx(first, abs=1e-6)
    for found in (kept.curves, kept.traits, kept.snapshots):
        assert all(np.isfinite(array).all() for array in found.values())


@pytest.mark.slow
def test_what_is_not_asked_for_is_not_looked_at():
    for wanted in ({}, {"snapshot_seeds": (1,)}, {"diagnostics_length": 20}):
        program = build(small_config(steps=10, **wanted))
        kept = advance_all(program, rounds.start())
        assert (
            bool(kept.snapshots)
            == bool(program.snapshots)
            == ("snapshot_seeds" in wanted)
        )
        looked = "diagnostics_length" in wanted
        assert bool(program.retrace) == bool(kept.traits) == looked
        assert ("gate" in kept.curves) == looked
        assert all(np.isfinite(curve).all() for curve in kept.curves.values())
    program = build(small_grid(seeds=2))
    assert program.retrace == program.snapshots == {}


@pytest.mark.parametrize("gradient", ["laws", "streaming"])
def test_another_way_to_the_gradient_gives_the_same_run(default, gradient):
    other = run(small_config(gradient=gradient)).curves
    for name in ("train_loss", "heldout_kl"):
        np.testing.assert_allclose(other[name], default.curves[name], atol=2e-5)


@pytest.mark.slow
def test_em_on_several_sequences_a_step_and_seeds_side_by_side():
    """Closed-form M-steps too: see `m_steps.eigh` on what could wait forever."""
    changes = {"run_arms": ("em_majorised",), "gradient": "autodiff", "batch_size": 2}
    one_by_one, together = (
        run(small_config(**changes, seeds=3), together=n).curves for n in (1, 3)
    )
    np.testing.assert_allclose(
        one_by_one["train_loss"], together["train_loss"], atol=1e-4
    )
    falls = np.diff(one_by_one["train_loss"][..., [0, -1]])
    assert (falls < 0).all()


def test_a_diverging_arm_leaves_the_others_alone(default):
    wild = run(small_config(**{"arms.sgd_10x.learning_rate": 1e30}))
    assert not np.isfinite(wild.curves["train_loss"][0, :, -1]).any()
    assert (wild.diverged_step[1] == -1).all()
    assert (wild.diverged_step[0] > 0).all()
    for name, curve in default.curves.items():
        np.testing.assert_array_equal(wild.curves[name][1], curve[1])


def test_fresh_sequences_differ_from_step_to_step_and_are_remembered():
    fresh = {"fresh": True, "batch_size": 2, "steps": 3, "eval_every": 1}
    config = small_config(**fresh)
    result = run(config)
    at_rest = run(small_config(**fresh, **{"arms.sgd.learning_rate": 0.0}))
    # Nothing is learned, yet the loss moves: other sequences.
    assert len(np.unique(at_rest.curves["train_loss"][1, 0, 1:])) == 3
    assert len(np.unique(at_rest.curves["heldout_loss"][1, 0])) == 1
    assert_same_bits(result.curves, run(config).curves)


@pytest.mark.slow
def test_fresh_train_loss_is_beside_the_floor_of_its_own_sequence():
    config = small_config(fresh=True, steps=4, eval_every=1, run_arms=("sgd",))
    curves = run(config).curves
    assert len(np.unique(curves["train_bayes_nll"][0, 0, 1:])) == 4
    assert len(np.unique(curves["heldout_bayes_nll"])) == config.seeds
    # Chance-level loss and exact answer move together from sequence to sequence.
    gap = curves["train_loss"] - curves["train_bayes_nll"]
    assert (gap > 0).all()


@pytest.mark.slow
def test_per_seed_embeddings_differ():
    def draw(config):
        def one(seed):
            return config.draw(config.seed_key(seed)).train

        return jax.jit(jax.vmap(one))(np.arange(2, dtype=np.uint32))

    shared, own = (
        draw(small_config(**{"task.embedding_seed": seed, "task.length": 200}))
        for seed in (0, -1)
    )

    def mean_of_symbol_zero(batch):
        seen = batch.targets[:, 0, :-1] == 0
        inputs = batch.inputs[:, 0, 1:]
        return [x[s].mean(axis=0) for x, s in zip(inputs, seen, strict=True)]

    gap = [np.linalg.norm(np.subtract(*mean_of_symbol_zero(p))) for p in (shared, own)]
    assert gap[0] < 2.5 < gap[1]


def test_rates_share_a_program():
    one, two = (
        build(small_config(run_arms=arms)) for arms in (("sgd",), ("sgd", "sgd_10x"))
    )
    assert len(one.train) == len(two.train) == 1
    carry = rounds.advance(two, rounds.advance(two, rounds.start()))
    slow, fast = carry.rounds[0].records.curves["train_loss"][:, 0, 1]
    assert fast < slow


@pytest.mark.slow
def test_no_trained_model_beats_bayes_on_fresh_sequences():
    """Paired over 64 sequences: the loss of every arm lies above the exact answer's."""
    config = small_config(
        **{"task.length": 500}, run_arms=EVERY_ARM, steps=300, eval_every=100
    )
    program = build(config)
    states, carry = {}, rounds.start()
    while carry.started < 2:  # the first seed
        states = carry.rounds[0].states if carry.rounds else states
        carry = rounds.advance(program, carry)
    task = sequences.Sequences(
        tasks.SPECS["sticky"], config.config["task"], 1, True
    ).task(config.seed_key(0))
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
    for arm in EVERY_ARM:
        params = jax.tree.map(lambda leaf: leaf[0], states[arm][0].params)
        model, bayes = losses_of(params, keys)
        low, _ = stats.paired_difference(model, bayes).ci95
        assert low > 0.02, arm


def test_a_diverging_seed_leaves_the_others_alone():
    """The same program, with one seed's weights made infinite before it trains."""
    config = small_config(run_arms=("sgd",), seeds=3, eval_every=10)
    program = build(config, workers=3)
    carry = rounds.advance(program, rounds.start())
    states = jax.tree.map(np.array, carry.rounds[0].states)
    states["sgd"][1].params.w_q[0] = np.inf
    infected = carry.rounds[0]._replace(states=states)
    wild = advance_all(program, carry._replace(rounds=(infected,)))
    tame = advance_all(program, carry)
    for name, curve in tame.curves.items():
        assert name.endswith("bayes_nll") or not np.isfinite(wild.curves[name][0, 1, 1])
        np.testing.assert_array_equal(wild.curves[name][0, [0, 2]], curve[0, [0, 2]])
    np.testing.assert_array_equal(wild.diverged_step, [[-1, 0, -1]])


def test_the_step_of_divergence_does_not_depend_on_when_one_looks():
    changes = {"arms.sgd_10x.learning_rate": 100.0, "seeds": 4}
    often, seldom = (run(small_config(eval_every=e, **changes)) for e in (1, 20))
    since = often.diverged_step[0]
    assert len(np.unique(since)) > 1  # each seed has its own
    assert (since > 0).all()
    assert (since < 20).all()
    np.testing.assert_array_equal(seldom.diverged_step, often.diverged_step)
    for seed, step in enumerate(since):
        curve = often.curves["train_loss"][0, seed]
        assert np.isfinite(curve[:step]).all()
        assert not np.isfinite(curve[step + 1 :]).any()


# --- grids


@pytest.mark.parametrize(
    "arm",
    [
        pytest.param("em_online", marks=pytest.mark.slow),
        pytest.param("two_timescale", marks=pytest.mark.slow),
        pytest.param("em_gradient", marks=pytest.mark.slow),
    ],
)
def test_a_point_of_a_grid_is_the_run_with_its_rates(arm):
    config = small_grid(run_arms=(arm,))
    points = config.grid.points
    assert len(points["scale"]) == 2 * 3 * 2
    curves = run(config).curves
    assert curves["heldout_kl"].shape == (1, 12, config.seeds, 3)
    for index in (4, 11):  # the second with fresh sequences
        alone = small_source(
            seeds=config.seeds,
            steps=6,
            eval_every=3,
            fresh=bool(points["fresh"][index]),
            **{"task.length": config.config["task"]["length"]},
        )
        fields = config.config["arms"][arm] | at_point(points, arm, index)
        alone.arms.there = fields
        alone.run_arms, alone.baseline = ("there",), "there"
        del alone.claims
        for name, curve in run(experiments.resolve(alone)).curves.items():
            # Large rates blow rounding up, which differs between fusions.
            np.testing.assert_allclose(
                curves[name][0, index], curve[0], rtol=1e-4, atol=3e-5
            )


def at_point(points, arm, index):
    scale, ratio = (float(axis[index]) for axis in (points["scale"], points["ratio"]))
    rates = {"routing_rate": scale, "output_rate": scale}
    if arm in ("two_timescale", "em_gradient"):
        return rates | {"value_rate": scale * ratio}
    return rates | {"ridge": 0.1 / ratio}


def test_a_grid_is_one_program_for_each_kind_of_arm():
    arms = ("two_timescale", "em_majorised", "em_online")
    program = build(small_grid(run_arms=arms))
    assert len(program.train) == 2  # the online arm has another rate, that is all


@pytest.mark.slow
def test_stopping_a_grid_in_between_changes_nothing():
    config = small_grid()
    program, again = build(config, workers=2), build(config)
    carry = rounds.advance(program, rounds.advance(program, rounds.start()))
    carry = rounds.deal(again, rounds.collect(program, carry))
    assert len(carry.rounds) == 2
    assert_same_bits(advance_all(again, carry), run(config))


def test_fresh_points_draw_and_the_others_do_not():
    config = small_grid(**{"grid.scale": (1e-9,)}, steps=3, eval_every=1)
    curves = run(config).curves["train_bayes_nll"]
    for index, fresh in enumerate(config.grid.points["fresh"]):
        assert len(np.unique(curves[0, index, 0, 1:])) == (3 if fresh else 1)
