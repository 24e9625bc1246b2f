"""The kinds of experiment, and how a config becomes what runs."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ml_collections import ConfigDict

from jaxattn.experiments import grid, head, kind, proof, transformer
from jaxattn.experiments.catalogue import Catalogue
from jaxattn.experiments.config import Source, flatten, override
from jaxattn.experiments.kind import Kind
from jaxattn.fields import ConfigError, Field, Fields, one_of, require

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "head": head.KIND,
        "grid": grid.KIND,
        "transformer": transformer.KIND,
        "proof": proof.KIND,
    }
)


def kind_of(config: ConfigDict) -> Kind:
    """The kind that a config names in `experiment`; raises ConfigError for no kind."""
    require("experiment", config.get("experiment"), one_of(KINDS))
    return KINDS[config.experiment]


def check(config: ConfigDict, catalogue: Catalogue | None = None) -> None:
    """Raises ConfigError, in one line, for the first thing wrong with a config.

    Args:
      config: to check.
      catalogue: of what it can name; the default is what jaxattn has.
    """
    catalogue = catalogue or Catalogue()
    own = kind_of(config)
    kind.check_fields(config, own, catalogue)
    own.check(config, catalogue)


def resolve(config: ConfigDict, catalogue: Catalogue | None = None) -> Any:
    """Turns a config into what runs; after that nobody reads it.

    Args:
      config: its `experiment` names a kind of `KINDS`.
      catalogue: of what it can name; the default is what jaxattn has.

    Returns:
      Experiment, for `engine.train`; of a config for checking laws ProofSettings.

    Raises:
      ConfigError: the config is wrong; names field, value and what it must be.
    """
    catalogue = catalogue or Catalogue()
    check(config, catalogue)
    return kind_of(config).resolve(config, catalogue)


def require_command(config: ConfigDict, command: str) -> None:
    """Raises ConfigError for a config of another command.

    Args:
      config: to check.
      command: "train" or "check".
    """
    wanted = kind_of(config).command
    if wanted != command:
        script = {"train": "train", "check": "check_gradients"}[wanted]
        raise ConfigError(
            f"experiment={config.experiment!r}: is not for this command; use jaxattn"
            f" {wanted}, or scripts/{script}.py"
        )


def overridable(config: ConfigDict, catalogue: Catalogue) -> dict[str, Field]:
    """Rules of the fields that a command line may set; `name` follows from the file.

    Args:
      config: maybe wrong.
      catalogue: of what it can name.
    """
    own = kind_of(config)
    known: Fields = own.fields(config, catalogue)
    fields = flatten(config)
    rules = {f: r for f, r in known.items() if f in fields or f in own.optional}
    arms = config.get("arms")
    for name, arm in arms.items() if isinstance(arms, ConfigDict) else ():
        if isinstance(arm, ConfigDict):
            of_arm = kind.arm_rules(arm, own, catalogue, absent=True)
            rules |= {f"arms.{name}.{field}": rule for field, rule in of_arm.items()}
    return rules


def overridden(source: Source, changes: list[tuple[str, str]]) -> Source:
    """Sets fields of a config from a command line, one after another, in place.

    Args:
      source: read.
      changes: dotted names and values as typed.

    Raises:
      ConfigError: no such field, or a value of another type.
    """
    for field, text in changes:
        known = overridable(source.config, source.catalogue)
        override(source.config, known, field, text)
    return source
