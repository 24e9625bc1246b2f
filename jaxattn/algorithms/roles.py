"""Roles of parameters, and an optimizer for each role."""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import optax

from jaxattn.models import transformer

# Parameters of one role move by one rule: roles of a head, and of a transformer.
ROLES = ("query", "key", "value", "output")
LAYER_ROLES = transformer.ROLES
ROLE_OF = {
    "w_q": "query",
    "w_k": "key",
    "w_v": "value",
    "w_o": "output",
    "b_o": "output",
}


class RoleError(ValueError):
    """A role that nothing moves, that two parts move, or that does not exist."""


def by_role(
    parts: Mapping[str | tuple[str, ...], optax.GradientTransformation],
    *,
    still: Collection[str] = (),
    roles: Collection[str] = ROLES,
) -> optax.GradientTransformation:
    """Returns an optimizer with a transformation for each role.

    Args:
      parts: a role, or several -> what moves it.
      still: roles that stay fixed.
      roles: of the model: `ROLES`, or `LAYER_ROLES` for trees of `transformer`.

    Returns:
      An optax transformation for trees of `Params`, parts of which may be None, or of
      `transformer.Params`. Its `init` raises RoleError for a parameter without a role.

    Raises:
      RoleError: a role that does not exist, that two parts move, or that nothing moves.
    """
    steps = {
        ", ".join(of_part): (of_part, tx)
        for of_part, tx in (
            ((key,) if isinstance(key, str) else tuple(key), tx)
            for key, tx in parts.items()
        )
    }
    named = {name: of_part for name, (of_part, _) in steps.items()}
    check_roles(named, still=still, roles=roles)
    part_of = {role: name for name, of_part in named.items() for role in of_part}

    def labels(params: Any) -> Any:
        def label(path, _):
            return part_of.get(role_of(path), "still")

        return jax.tree_util.tree_map_with_path(label, params)

    rules = {name: tx for name, (_, tx) in steps.items()}
    return optax.partition(rules | {"still": optax.set_to_zero()}, labels)


def role_of(path: tuple) -> str:
    """Returns the role of a parameter of a head or of a transformer.

    Args:
      path: of `jax.tree_util`.

    Raises:
      RoleError: it has none.
    """
    role = ROLE_OF.get(getattr(path[0], "name", None)) or transformer.role_of(path)
    if role is None:
        name = jax.tree_util.keystr(path)
        roles = ", ".join(LAYER_ROLES)
        raise RoleError(f"parameter {name}: has no role; must have one of {roles}")
    return role


def check_roles(
    parts: Mapping[str, Collection[str]],
    *,
    still: Collection[str] = (),
    shared: Collection[str] = (),
    roles: Collection[str] = ROLES,
) -> None:
    """Raises RoleError unless each role is moved by one part, or as allowed.

    Args:
      parts: name of a part -> the roles that it moves.
      still: roles that stay fixed.
      shared: roles that several parts may move.
      roles: of the model.
    """
    claims = [(role, part) for part, of_part in parts.items() for role in of_part]
    claims += [(role, "still") for role in still]
    for role, part in [*claims, *((role, "shared") for role in shared)]:
        if role not in roles:
            raise RoleError(
                f"role={role!r} of {part!r}: must be one of {', '.join(roles)}"
            )
    for role in roles:
        movers = [part for claimed, part in claims if claimed == role]
        if not movers:
            raise RoleError(
                f"role={role!r}: nothing moves it; must be moved by a part, or be in"
                f" still=({role!r},)"
            )
        if len(movers) > 1 and (role not in shared or "still" in movers):
            raise RoleError(
                f"role={role!r}: moved by {' and '.join(map(repr, movers))}; must be"
                f" moved by one part, or be in shared=({role!r},)"
            )
