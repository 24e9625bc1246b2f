"""Algorithms that move parameters: pure (init, step) pairs, some with a name."""

from jaxattn.algorithms.base import Algorithm, Info, State
from jaxattn.algorithms.descent import gradient, two_timescale, warm_up_cosine
from jaxattn.algorithms.em import em
from jaxattn.algorithms.gradients import (
    Wiring,
    by_autodiff,
    by_laws,
    by_streaming,
    over_sequences,
)
from jaxattn.algorithms.layered_em import FixedModel, layered_em
from jaxattn.algorithms.roles import RoleError, by_role, check_roles, role_of
from jaxattn.algorithms.specs import (
    SPECS,
    AlgorithmSpec,
    HeadModel,
    LayeredModel,
    on_grid,
)

__all__ = [
    "SPECS",
    "Algorithm",
    "AlgorithmSpec",
    "FixedModel",
    "HeadModel",
    "Info",
    "LayeredModel",
    "RoleError",
    "State",
    "Wiring",
    "by_autodiff",
    "by_laws",
    "by_role",
    "by_streaming",
    "check_roles",
    "em",
    "gradient",
    "layered_em",
    "on_grid",
    "over_sequences",
    "role_of",
    "two_timescale",
    "warm_up_cosine",
]
