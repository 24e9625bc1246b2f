"""What the engine does with one seed: begin, train, evaluate, look back.

On a grid all but the first map over its points.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.algorithms import State
from jaxattn.experiments import Arm, Experiment, Problem, Scores
from jaxattn.experiments.experiment import Options, stream
from jaxattn.measures.trajectory import Retraced


def by_program(experiment: Experiment) -> dict[Hashable, Arm]:
    """Programs that train, each with the first arm that it is of."""
    return {arm.program: arm for arm in reversed(experiment.arms)}


def by_reading(experiment: Experiment) -> dict[Hashable, Arm]:
    """Programs that evaluate, each with the first arm that it is of."""
    return {arm.reading: arm for arm in reversed(experiment.arms)}


def options(experiment: Experiment) -> dict[str, np.ndarray]:
    """What programs are told of the points of a grid; empty without one."""
    return dict(experiment.grid.options) if experiment.grid else {}


def begin(
    experiment: Experiment, seed_id: jax.Array
) -> tuple[Problem, dict[Hashable, State]]:
    """Draws the problem of a seed, and the state that each program starts from."""
    key = experiment.seed_key(seed_id)
    problem = experiment.draw(key)
    states = {}
    for program, arm in by_program(experiment).items():
        params = arm.start(stream(key, "init"))
        # Whatever its rates, an algorithm starts the same.
        rates = {name: np.ravel(rate)[0] for name, rate in arm.rates.items()}
        states[program] = arm.algorithm(rates).init(params)
    return problem, states


def train(
    experiment: Experiment,
    arm: Arm,
    rates: Mapping[str, jax.Array],
    options: Options,
    first: jax.Array,
    end: jax.Array,
    seed_id: jax.Array,
    state: State,
    problem: Problem,
) -> tuple[State, jax.Array]:
    """Takes the steps from `first` to before `end`.

    Returns:
      The state at the end, and the last step before its weights were not finite, or -1.
    """
    key = experiment.seed_key(seed_id)

    def at_point(options: Options, rates, state: State) -> tuple[State, jax.Array]:
        algorithm, of_steps = arm.algorithm(rates), stream(key, "step")

        def step(index: jax.Array, so_far: tuple) -> tuple:
            state, since = so_far
            batch = experiment.batch(key, index, options, problem)
            state, _ = algorithm.step(state, batch, jax.random.fold_in(of_steps, index))
            finite = jax.tree.map(lambda w: jnp.isfinite(w).all(), state.params)
            lost = ~jnp.stack(jax.tree.leaves(finite)).all()
            return state, jnp.where((since < 0) & lost, index, since)

        return jax.lax.fori_loop(first, end, step, (state, jnp.int32(-1)))

    return _at_points(experiment, at_point, options, rates, state)


def evaluate(
    experiment: Experiment,
    arm: Arm,
    step: jax.Array,
    options: Options,
    seed_id: jax.Array,
    params: Any,
    problem: Problem,
) -> Scores:
    """Scores parameters after a step."""
    key = experiment.seed_key(seed_id)

    def at_point(options: Options, params) -> Scores:
        return arm.score(key, params, problem, step, options)

    return _at_points(experiment, at_point, options, params)


def retrace(
    experiment: Experiment,
    arm: Arm,
    seed_id: jax.Array,
    trail: Any,
    final: Any,
    problem: Problem,
) -> Retraced:
    """Looks back at a finished seed."""
    return arm.retrace(experiment.seed_key(seed_id), trail, final, problem)


def _at_points(experiment: Experiment, function: Callable, options: Options, *own):
    """function(options, *own) at each point of the grid, or where there is none."""
    if experiment.grid is None:
        return function(options, *own)
    return jax.lax.map(lambda point: function(*point), (options, *own))
