"""Roles of parameters, and optimizers by role."""

import functools

import jax
import numpy as np
import optax
import pytest
from problems import random_problem, relative_error

from jaxattn.algorithms import Wiring, by_autodiff, descent, roles
from jaxattn.tasks.base import Batch
from jaxattn.theory import attention


def test_roles_cover_the_parameters_once():
    params = attention.Params(*map(np.zeros, (1, 2, 3, 4, 5)))
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    expected = ["query", "key", "value", "output", "output"]
    assert [roles.role_of(path) for path in paths] == expected
    assert set(expected) == set(roles.ROLES)


def test_rules_by_role_move_only_what_they_name(x64):
    params, inputs, targets = random_problem(0)
    tx = roles.by_role({"value": optax.sgd(0.5)}, still=("query", "key", "output"))
    dense = functools.partial(by_autodiff, wiring=Wiring(causal=True))
    algorithm = descent.gradient(tx, dense)
    state, _ = jax.jit(algorithm.step)(
        algorithm.init(params), Batch(inputs, targets), None
    )
    assert relative_error(state.params.w_v, params.w_v) > 1e-3
    still = state.params._replace(w_v=params.w_v)
    jax.tree.map(np.testing.assert_array_equal, still, params)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"query": 1}, "role='key': nothing moves it"),
        ({("query", "key"): 1, "key": 1, "value": 1, "output": 1}, "role='key': moved"),
        (
            {("query", "kye"): 1},
            "role='kye' of 'query, kye': must be one of query, key, value, output",
        ),
    ],
)
def test_rules_by_role_are_checked(parts, message):
    with pytest.raises(roles.RoleError, match=message):
        roles.by_role({roles: optax.sgd(rate) for roles, rate in parts.items()})


def test_a_parameter_without_a_role_is_refused():
    tx = roles.by_role({roles.LAYER_ROLES: optax.sgd(0.1)}, roles=roles.LAYER_ROLES)
    with pytest.raises(roles.RoleError, match=r"'gain'.*has no role"):
        tx.init({"gain": np.zeros(2)})
