"""What a config can name: tasks, algorithms and measures."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxattn import algorithms, tasks
from jaxattn.algorithms import AlgorithmSpec
from jaxattn.fields import ConfigError
from jaxattn.measures.base import Measure
from jaxattn.tasks import TaskSpec

_NONE: Mapping[str, Any] = MappingProxyType({})


class Catalogue(NamedTuple):
    """Entries by the names that configs use."""

    tasks: Mapping[str, TaskSpec] = tasks.SPECS
    algorithms: Mapping[str, AlgorithmSpec] = algorithms.SPECS
    measures: Mapping[str, Measure] = _NONE

    def extended(
        self,
        tasks: Mapping[str, TaskSpec] = _NONE,
        algorithms: Mapping[str, AlgorithmSpec] = _NONE,
        measures: Mapping[str, Measure] = _NONE,
    ) -> "Catalogue":
        """Adds entries, such as what a config file defines in TASKS, ALGORITHMS, ...

        Args:
          tasks: by name.
          algorithms: by name.
          measures: by name.

        Raises:
          ConfigError: one is no mapping to entries of its kind, or takes a name that is
            taken.
        """
        more = {"tasks": tasks, "algorithms": algorithms, "measures": measures}
        kinds = {"tasks": TaskSpec, "algorithms": AlgorithmSpec, "measures": Measure}
        return Catalogue(
            **{
                name: {
                    **known,
                    **_checked(name.upper(), more[name], kinds[name], known),
                }
                for name, known in self._asdict().items()
            }
        )


def _checked(
    name: str, more: Mapping[str, Any], kind: type, known: Mapping[str, Any]
) -> Mapping[str, Any]:
    if not isinstance(more, Mapping):
        raise ConfigError(
            f"{name}={more!r}: must be a mapping from name to {kind.__name__}"
        )
    for key, entry in more.items():
        if not isinstance(entry, kind):
            raise ConfigError(f"{name}[{key!r}]: must be a {kind.__name__}")
        if key in known:
            raise ConfigError(f"{name}[{key!r}]: must have another name")
    return more
