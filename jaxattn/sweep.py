"""Arms x seeds x grid: each kind of arm is one compiled program, on every core.

Random numbers derive from one root key, folded with the seed's id and the name of a
stream, so that a seed's numbers never depend on which other seeds or arms run.
"""

import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jaxattn import attention, losses, schedules
from jaxattn import config as config_lib
from jaxattn.attention import Params
from jaxattn.tasks import catalogue
from jaxattn.tasks.base import Batch, Task

_STREAMS = ("init", "data", "eval", "dropout", "embedding")

# Of the training sequence ("train_...") and of the held-out one.
METRICS = (
    "train_loss",
    "train_bayes_nll",
    "train_kl",
    "train_accuracy",
    "train_predictive_entropy",
    "train_attention_entropy",
    "heldout_loss",
    "heldout_bayes_nll",
    "heldout_kl",
    "accuracy",
    "predictive_entropy",
    "attention_entropy",
)


class Problem(NamedTuple):
    """What one seed is given: where it starts, what it trains on, what judges it."""

    params: Params
    train: Batch  # (batch_size, ...)
    heldout: Batch
    log_bayes_train: jax.Array  # (batch_size, T, C), nats
    log_bayes_heldout: jax.Array  # (T, C), nats


class Points(NamedTuple):
    """The points of a config's grid: every regime x ratio x scale."""

    fresh: np.ndarray  # (P,) bool, whether every step draws new sequences
    ratio: np.ndarray  # (P,), how much faster the values move than the frame
    scale: np.ndarray  # (P,), times every learning rate


class Carry(NamedTuple):
    """A run in the middle: all that is needed to go on from here."""

    step: np.ndarray  # steps done, a scalar
    states: dict[str, schedules.State]  # by arm; leaves lead with seed, and point
    curves: dict[str, np.ndarray]  # as in `Result`, NaN if to come


class Result(NamedTuple):
    """A finished run; arrays of a grid have its points behind the arm."""

    step: np.ndarray  # (evaluation,)
    curves: dict[str, np.ndarray]  # metric -> (arm, seed, evaluation)
    attention: dict[str, np.ndarray]  # "initial", "allowed" (n, n); "final" (arm, n, n)


class Sweep(NamedTuple):
    """A sweep, compiled: one training program per structure of an arm."""

    config: ConfigDict
    problems: Problem  # leaves lead with the seed
    train: dict[schedules.Structure, Callable]  # (shared, states, batches) -> states
    evaluate: Callable  # (step, params, problems) -> metrics


def stream(key: jax.Array, name: str) -> jax.Array:
    """The key of a named stream: "init", "data", "eval", "dropout" or "embedding"."""
    return jax.random.fold_in(key, _STREAMS.index(name))


def evaluation_steps(config: ConfigDict) -> np.ndarray:
    """Steps after which metrics are taken: 0, every `eval_every`, and the last."""
    return np.append(np.arange(0, config.steps, config.eval_every), config.steps)


def points(config: ConfigDict) -> Points | None:
    """The grid's points in order, the scale fastest; None without a grid."""
    if "grid" not in config:
        return None
    axes = config.grid.fresh, config.grid.ratio, config.grid.scale
    fresh, ratio, scale = (axis.ravel() for axis in np.meshgrid(*axes, indexing="ij"))
    return Points(fresh, ratio.astype(np.float32), scale.astype(np.float32))


def build(config: ConfigDict, *, workers: int) -> Sweep:
    """Draws every seed's problem and compiles the programs.

    Rates, step numbers and states are arguments of the programs, so arms that differ
    in nothing else share one.

    Args:
      config: checked, see `config.check`.
      workers: seeds are dealt to so many threads. One per core is right on a CPU, where
        it is twice as fast as splitting each operation over 2 cores (measured), and one
        on an accelerator. On a CPU the numbers do not depend on it, to the last bit;
        with seeds side by side (`vmap_seeds`) they agree to rounding.

    Returns:
      Sweep.

    Raises:
      ConfigError: the task drew evidence that its own model calls impossible.
    """
    problem = _lower(
        config, workers, lambda _, seed_id: draw_problem(config, seed_id), ()
    )
    problems = _deal(config, workers, problem.compile())(())
    if not np.isfinite(np.max(problems.log_bayes_heldout, axis=-1)).all():
        raise config_lib.ConfigError(
            f"task.name={config.task.name!r}: drew evidence that is impossible under"
            " its own model; allowed: task settings that give it a positive probability"
        )
    arms = {_structure(config, arm): arm for arm in reversed(config.run_arms)}
    lowered = [_lower_train(config, workers, arm, problems) for arm in arms.values()]
    lowered.append(_lower_evaluate(config, workers, problems))
    with ThreadPoolExecutor() as pool:  # XLA compiles outside Python's lock
        compiled = pool.map(lambda program: program.compile(), lowered)
        *train, evaluate = (_deal(config, workers, program) for program in compiled)
    return Sweep(config, problems, dict(zip(arms, train, strict=True)), evaluate)


def start(sweep: Sweep) -> Carry:
    """The run before its first step: everything drawn, step 0 evaluated."""
    config = sweep.config
    over_points = _over_points(config)
    shape = (
        len(config.run_arms),
        *over_points,
        config.seeds,
        len(evaluation_steps(config)),
    )
    curves = {name: np.full(shape, np.nan, np.float32) for name in METRICS}
    params = sweep.problems.params
    states = {arm: _initial_state(config, arm, params) for arm in config.run_arms}
    params = _at_every_point(config, params)
    metrics = sweep.evaluate((np.int32(0), _fresh(config)), params, sweep.problems)
    for row in range(len(config.run_arms)):  # every arm starts from the same weights
        _record(curves, (row, 0), metrics)
    return Carry(np.array(0), states, curves)


def advance(
    sweep: Sweep, carry: Carry, on_progress: Callable[[int], None] = lambda _: None
) -> Carry:
    """Trains every arm up to the next evaluation, and evaluates.

    Args:
      sweep: from `build`.
      carry: from `start`, `advance` or a checkpoint; not changed.
      on_progress: told the number of steps, of all seeds and points, after each arm.

    Returns:
      The next Carry.
    """
    config = sweep.config
    steps = evaluation_steps(config)
    index = int(np.searchsorted(steps, carry.step, side="right"))
    begin, end = np.int32(carry.step), np.int32(steps[index])
    curves = {name: curve.copy() for name, curve in carry.curves.items()}

    states = {}
    for row, arm in enumerate(config.run_arms):
        states[arm] = sweep.train[_structure(config, arm)](
            (_rates(config, arm), _fresh(config), begin, end),
            carry.states[arm],
            sweep.problems.train,
        )
        metrics = sweep.evaluate(
            (end, _fresh(config)), states[arm].params, sweep.problems
        )
        _record(curves, (row, index), metrics)
        on_progress(int(end - begin) * cells(config))
    return Carry(np.array(int(end)), states, curves)


def cells(config: ConfigDict) -> int:
    """How many runs an arm is: seeds, times the points of a grid."""
    return math.prod((config.seeds, *_over_points(config)))


def finish(sweep: Sweep, carry: Carry) -> Result:
    """What is kept of a finished run; attention maps only without a grid."""
    config = sweep.config
    if points(config) is not None:
        return Result(evaluation_steps(config), carry.curves, {})
    inputs = sweep.problems.heldout.inputs[config.snapshot_seed]
    length = min(config.snapshot_length, len(inputs))
    if catalogue.TASKS[config.task.name].causal:
        inputs = inputs[:length]  # later positions are not looked at
    mask = head_mask(config, len(inputs))

    @jax.jit
    def attention_map(params: Params) -> jax.Array:
        one = jax.tree.map(lambda leaf: leaf[config.snapshot_seed], params)
        return attention.forward(one, inputs, mask).weight[:length, :length]

    finals = [attention_map(carry.states[arm].params) for arm in config.run_arms]
    return Result(
        step=evaluation_steps(config),
        curves=carry.curves,
        attention={
            "initial": np.asarray(attention_map(sweep.problems.params)),
            "final": np.stack(finals),
            "allowed": np.ones((length, length), bool) if mask is None else mask,
        },
    )


# --- one seed


def draw_problem(config: ConfigDict, seed_id: jax.Array) -> Problem:
    """The problem of a seed; it depends on nothing else that runs."""
    seed_key, task = _seed_key(config, seed_id), _task(config, seed_id)
    params = attention.init_params(
        stream(seed_key, "init"),
        d_x=config.task.d_x,
        d_k=config.model.d_k,
        d_v=config.model.d_v,
        num_classes=catalogue.TASKS[config.task.name].num_classes(config.task),
        scale=config.model.init_scale,
        bias=config.model.bias,
    )
    train = draw_batch(config, seed_id, 0)
    heldout = task.sample(stream(seed_key, "eval"))
    return Problem(
        params, train, heldout, jax.vmap(task.bayes)(train), task.bayes(heldout)
    )


def _train(
    config: ConfigDict,
    schedule: schedules.Schedule,
    fresh: jax.Array | bool,
    begin: jax.Array,
    end: jax.Array,
    seed_id: jax.Array,
    state: schedules.State,
    train: Batch,
) -> schedules.State:
    key = stream(_seed_key(config, seed_id), "dropout")

    def step(index: jax.Array, state: schedules.State) -> schedules.State:
        batch = _only_if(fresh, lambda: draw_batch(config, seed_id, index), train)
        return schedule.step(state, batch, jax.random.fold_in(key, index))[0]

    return jax.lax.fori_loop(begin, end, step, state)


def _evaluate(
    config: ConfigDict,
    step: jax.Array,
    fresh: jax.Array | bool,
    seed_id: jax.Array,
    params: Params,
    problem: Problem,
) -> dict[str, jax.Array]:
    def last_trained_on() -> tuple[Batch, jax.Array]:
        batch = draw_batch(config, seed_id, jnp.maximum(step - 1, 0))
        return batch, jax.vmap(_task(config, seed_id).bayes)(batch)

    train, log_bayes_train = _only_if(
        fresh, last_trained_on, (problem.train, problem.log_bayes_train)
    )
    on_train = jax.lax.map(
        lambda x: _scores(config, params, *x), (train, log_bayes_train)
    )
    heldout = _scores(config, params, problem.heldout, problem.log_bayes_heldout)
    metrics = {f"train_{name}": jnp.mean(value) for name, value in on_train.items()}
    metrics |= {
        f"heldout_{name}": heldout.pop(name) for name in ("loss", "bayes_nll", "kl")
    }
    return metrics | heldout


def _scores(
    config: ConfigDict, params: Params, batch: Batch, log_bayes: jax.Array
) -> dict[str, jax.Array]:
    readout = attention.readout(
        params, batch.inputs, head_mask(config, len(batch.inputs))
    )
    logit, weights = readout.logit, batch.weights
    share = losses.position_shares(weights, len(logit), logit.dtype)
    return {
        "loss": losses.cross_entropy(logit, batch.targets, weights),
        "bayes_nll": losses.cross_entropy(log_bayes, batch.targets, weights),
        "kl": losses.kl_to_bayes(log_bayes, logit, weights),
        "accuracy": losses.accuracy(logit, batch.targets, weights),
        "predictive_entropy": losses.predictive_entropy(logit, weights),
        "attention_entropy": jnp.vdot(share, readout.attention_entropy),
    }


def _only_if(condition: jax.Array | bool, drawn: Callable, otherwise):
    """A choice that a program makes, or that is made before there is one."""
    if isinstance(condition, bool):
        return drawn() if condition else otherwise
    return jax.lax.cond(condition, drawn, lambda: otherwise)


def draw_batch(config: ConfigDict, seed_id: jax.Array, step) -> Batch:
    """The sequences of a step (batch_size, ...), if they are fresh ones."""
    key = stream(_seed_key(config, seed_id), "data")
    key = jax.random.fold_in(key, step)
    sample = _task(config, seed_id).sample
    return jax.vmap(lambda n: sample(jax.random.fold_in(key, n)))(
        jnp.arange(config.batch_size)
    )


# --- what a config says


def _seed_key(config: ConfigDict, seed_id: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.key(config.seed), seed_id)


def _task(config: ConfigDict, seed_id: jax.Array) -> Task:
    key = _seed_key(config, seed_id)
    if config.task.embedding_seed >= 0:  # one for all seeds, with an id of none of them
        root = jax.random.key(config.task.embedding_seed)
        key = jax.random.fold_in(root, np.uint32(2**32 - 1))
    return catalogue.TASKS[config.task.name].build(
        config.task, stream(key, "embedding")
    )


def head_mask(config: ConfigDict, length: int) -> np.ndarray | None:
    """What a head of the config's task may look at; None for everything."""
    causal = catalogue.TASKS[config.task.name].causal
    return attention.causal_mask(length) if causal else None


def _structure(config: ConfigDict, arm: str) -> schedules.Structure:
    return config_lib.structure(config.arms[arm])


def _rates(config: ConfigDict, arm: str) -> dict[str, np.ndarray]:
    """The rates of an arm, scalars or (P,)."""
    rates = config_lib.rates(config.arms[arm])
    rates = {name: np.float32(rate) for name, rate in rates.items()}
    grid = points(config)
    return rates if grid is None else schedules.spread(rates, grid.scale, grid.ratio)


def _fresh(config: ConfigDict) -> np.ndarray | None:
    """What a program is told of fresh sequences: (P,); without a grid it knows."""
    grid = points(config)
    return None if grid is None else grid.fresh


def _over_points(config: ConfigDict) -> tuple[int, ...]:
    grid = points(config)
    return () if grid is None else grid.scale.shape


def _at_every_point(config: ConfigDict, tree):
    """Leaves that lead with the seed: given the points, if any, behind it."""
    for count in _over_points(config):
        tree = jax.tree.map(
            lambda leaf, n=count: np.repeat(np.asarray(leaf)[:, None], n, axis=1), tree
        )
    return tree


def _schedule(
    config: ConfigDict, structure: schedules.Structure, rates: dict
) -> schedules.Schedule:
    causal = catalogue.TASKS[config.task.name].causal
    gradient = functools.partial(schedules.GRADIENTS[config.gradient], causal=causal)
    mix = functools.partial(schedules.MIXES[config.gradient], causal=causal)
    return schedules.build(structure, rates, gradient, mix)


def _initial_state(config: ConfigDict, arm: str, params: Params) -> schedules.State:
    schedule = _schedule(config, _structure(config, arm), _rates(config, arm))
    return _at_every_point(config, jax.vmap(schedule.init)(params))


def _record(curves: dict, where: tuple[int, int], metrics: dict) -> None:
    for name, values in metrics.items():
        row, index = where
        curves[name][row, ..., index] = values.T  # a grid's points come first


# --- where seeds run


def _hand(config: ConfigDict, workers: int) -> int:
    """Room for the seeds dealt to one worker.

    At least 2: XLA simplifies arrays of one, and other fusions would be other bits.
    """
    return max(2, -(-config.seeds // workers))


def _lower(
    config: ConfigDict, workers: int, function: Callable, shared, *own
) -> jax.stages.Lowered:
    """Lowers function(shared, seed_id, *of one seed), over one hand of seeds.

    One seed after another keeps the working set in cache, which on CPU is about twice
    as fast as all at once.

    Args:
      config: how many seeds, and how many of them to run side by side.
      workers: among whom they are dealt.
      function: of what all seeds share, a seed's id, and what is the seed's own.
      shared: an example of what is shared.
      own: examples of what is the seed's own, leading with the seed.

    Returns:
      Lowered (shared, number of seeds in the hand, ids, *own) -> results.
    """
    width = config.vmap_seeds
    if width == 0:
        width = 1 if jax.default_backend() == "cpu" else config.seeds
    size = _hand(config, workers)

    def side_by_side(shared, count, *own):
        del count  # all of them, padding too
        return jax.lax.map(lambda one: function(shared, *one), own, batch_size=width)

    def one_by_one(shared, count, *own):
        def one(index):
            return function(shared, *jax.tree.map(lambda leaf: leaf[index], own))

        room = jax.tree.map(
            lambda leaf: jnp.zeros((size, *leaf.shape), leaf.dtype),
            jax.eval_shape(one, 0),
        )
        return jax.lax.fori_loop(
            0,
            count,
            lambda index, results: jax.tree.map(
                lambda all_, new: all_.at[index].set(new), results, one(index)
            ),
            room,
        )

    examples = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype), own
    )
    ids = jax.ShapeDtypeStruct((size,), np.uint32)
    program = jax.jit(side_by_side if width > 1 else one_by_one)
    return program.lower(shared, np.int32(0), ids, *examples)


def _deal(config: ConfigDict, workers: int, compiled: Callable) -> Callable:
    """Makes a function over all seeds from one compiled over a hand of them."""
    size = _hand(config, workers)
    hands = [range(start, start + size) for start in range(0, config.seeds, size)]

    def play(hand, shared, own):
        # Room that no seed fills is given the last one's things.
        ids = np.minimum(np.array(hand, np.uint32), config.seeds - 1)
        count = np.int32(min(size, config.seeds - hand[0]))
        mine = jax.tree.map(lambda leaf: leaf[ids], own)
        results = compiled(shared, count, ids, *mine)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[:count], results)

    def over_all(shared, *own):
        own = jax.tree.map(np.asarray, own)
        with ThreadPoolExecutor(len(hands)) as pool:
            played = list(pool.map(lambda hand: play(hand, shared, own), hands))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *played)

    return over_all


def _lower_train(
    config: ConfigDict, workers: int, arm: str, problems: Problem
) -> jax.stages.Lowered:
    structure = _structure(config, arm)

    def one(shared, seed_id, state, batch):
        rates, fresh, begin, end = shared

        def at_point(fresh, rates, state):
            schedule = _schedule(config, structure, rates)
            return _train(config, schedule, fresh, begin, end, seed_id, state, batch)

        return _map_points(config, at_point, fresh, rates, state)

    states = _initial_state(config, arm, problems.params)
    shared = _rates(config, arm), _fresh(config), np.int32(0), np.int32(0)
    return _lower(config, workers, one, shared, states, problems.train)


def _lower_evaluate(
    config: ConfigDict, workers: int, problems: Problem
) -> jax.stages.Lowered:
    def one(shared, seed_id, params, problem):
        step, fresh = shared

        def at_point(fresh, params):
            return _evaluate(config, step, fresh, seed_id, params, problem)

        return _map_points(config, at_point, fresh, params)

    params = _at_every_point(config, problems.params)
    shared = np.int32(0), _fresh(config)
    return _lower(config, workers, one, shared, params, problems)


def _map_points(config: ConfigDict, function: Callable, fresh, *own):
    """function(fresh, *own) at each point of the grid, or where there is none."""
    if fresh is None:
        return function(config.fresh, *own)
    return jax.lax.map(lambda point: function(*point), (fresh, *own))
