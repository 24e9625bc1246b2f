"""What a config can name: tasks, algorithms and measures."""

from collections.abc import Mapping
from types import ModuleType
from typing import NamedTuple

from jaxattn import algorithms, tasks
from jaxattn.algorithms import AlgorithmSpec
from jaxattn.fields import ConfigError
from jaxattn.measures.base import Measure
from jaxattn.tasks import TaskSpec


class Catalogue(NamedTuple):
    """Entries by the names that configs use."""

    tasks: Mapping[str, TaskSpec] = tasks.SPECS
    algorithms: Mapping[str, AlgorithmSpec] = algorithms.SPECS
    measures: Mapping[str, Measure] = {}

    def extended(self, module: ModuleType) -> "Catalogue":
        """Adds what a config file defines as TASKS, ALGORITHMS and MEASURES.

        Args:
          module: the file.

        Raises:
          ConfigError: one of them is no mapping to entries of its kind, or takes a name
            that is taken.
        """
        found = {}
        for field, kind in (
            ("tasks", TaskSpec),
            ("algorithms", AlgorithmSpec),
            ("measures", Measure),
        ):
            known, name = getattr(self, field), field.upper()
            more = getattr(module, name, {})
            if not isinstance(more, Mapping):
                raise ConfigError(
                    f"{name}={more!r}: must be a mapping from name to {kind.__name__}"
                )
            for key, entry in more.items():
                if not isinstance(entry, kind):
                    raise ConfigError(f"{name}[{key!r}]: must be a {kind.__name__}")
                if key in known:
                    raise ConfigError(f"{name}[{key!r}]: must have another name")
            found[field] = {**known, **more}
        return Catalogue(**found)
