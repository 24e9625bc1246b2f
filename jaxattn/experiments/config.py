"""Config files: find one, read it, apply a variant, override fields from text."""

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict
from ml_collections.config_dict import RequiredValueError

import jaxattn
from jaxattn.experiments.catalogue import Catalogue
from jaxattn.fields import ConfigError, Fields, nearest, three_nearest


class Source(NamedTuple):
    """A config file, read."""

    config: ConfigDict
    catalogue: Catalogue  # what the config can name, with what its file defines
    about: str  # first line of the file's docstring
    variants: Mapping[str, Mapping[str, Any]]  # name -> changes


def shipped() -> dict[str, Path]:
    """Lists the config files that come with jaxattn, by name."""
    package = Path(jaxattn.__file__).parent
    inside = package / "configs"  # of a wheel; a checkout has them beside the package
    folder = inside if inside.is_dir() else package.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("[!_]*.py"))}


def find(path_text: str) -> Path:
    """Finds the file that a command line names.

    Args:
      path_text: a Python file; or "sticky" or "configs/sticky.py", which are the file
        configs/sticky.py here, or else the one that comes with jaxattn.

    Raises:
      ConfigError: no such file.
    """
    named, ours = Path(path_text), shipped()
    if re.fullmatch(r"[\w-]+", path_text):
        named = Path("configs", f"{path_text}.py")
    if named.suffix == ".py" and named.is_file():
        return named
    if named.stem in ours and named == Path("configs", ours[named.stem].name):
        return ours[named.stem]
    raise ConfigError(
        f"config={path_text!r}: no such file{nearest(named.stem, ours)}; must be a"
        f" Python file, or one of {', '.join(ours)}, each with :VARIANT if wanted"
    )


def load(path_and_variant: str) -> Source:
    """Reads a config file.

    Args:
      path_and_variant: "configs/sticky.py" or "sticky:smoke", see `find`.

    Returns:
      Source, with `config.name` set to the file's name with "-variant" appended.

    Raises:
      ConfigError: no such file or variant, or a file that fails.
    """
    path_text, _, variant = path_and_variant.partition(":")
    path = find(path_text)
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config(variant)
        if isinstance(config, ConfigDict):
            config = ConfigDict(config)  # a copy, for changes
    except ConfigError:
        raise
    except Exception as error:  # whatever a person's own file may raise
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"config={path_text!r}: cannot be read ({cause}); must be a Python file"
            " with get_config(variant)"
        ) from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(
            f"config={path_text!r}: get_config returned a {type(config).__name__}; must"
            " be an ml_collections.ConfigDict"
        )
    with config.ignore_type(), config.unlocked():  # whatever it was
        config.name = f"{path.stem}-{variant}" if variant else path.stem
    require_plain(config)
    about = (module.__doc__ or "").partition("\n")[0]
    own = (getattr(module, name, {}) for name in ("TASKS", "ALGORITHMS", "MEASURES"))
    catalogue = Catalogue().extended(*own)
    return Source(config, catalogue, about, getattr(module, "VARIANTS", {}))


def vary(config: ConfigDict, variants: Mapping[str, Mapping], variant: str) -> None:
    """Applies a named variant, a mapping from dotted field to value, in place.

    Args:
      config: to change.
      variants: name -> changes.
      variant: the one asked for; "" is the config as it is.

    Raises:
      ConfigError: no such variant.
    """
    if variant and variant not in variants:
        raise ConfigError(
            f"variant={variant!r}: unknown{nearest(variant, variants)}; must be one of"
            f" {', '.join(variants)}, or none"
        )
    config.update_from_flattened_dict(variants.get(variant, {}))


def override(config: ConfigDict, known: Fields, field: str, text: str) -> None:
    """Sets one field from a command line, in place.

    An integer may be written 1e3. Names are separated by commas.

    Args:
      config: to change.
      known: dotted name -> rule, of the fields that may be set.
      field: dotted name.
      text: the value as typed.

    Raises:
      ConfigError: no such field, or a value of another type.
    """
    if field not in known:
        group = [name for name in known if name.startswith(field + ".")]
        if group:
            some = ", ".join(group[:3]) + (", ..." if len(group) > 3 else "")
            raise ConfigError(f"{field}={text!r}: names a group; set one of {some}")
        raise ConfigError(
            f"{field}={text!r}: no such field{three_nearest(field, known)}"
        )
    try:
        value = known[field].parse(text)
    except (ValueError, OverflowError):
        raise ConfigError(f"{field}={text!r}: must be {known[field].must}") from None
    with config.ignore_type(), config.unlocked():
        config.update_from_flattened_dict({field: value})


def flatten(config: Mapping[str, Any] | ConfigDict) -> dict[str, Any]:
    """Maps dotted name -> value, for every field that is not a group."""
    flat = {}
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            flat |= {f"{name}.{inner}": v for inner, v in flatten(value).items()}
        else:
            flat[name] = value
    return flat


def require_plain(config: ConfigDict) -> None:
    """Raises ConfigError for a value of a type that no rule is made for."""
    try:
        fields = flatten(config)
    except (RequiredValueError, TypeError) as error:  # what cannot be given or sorted
        raise ConfigError(
            f"config: {error}; must have names of text, and a value for each"
        ) from None
    for field, value in fields.items():
        for part in (field, *(value if isinstance(value, tuple | list) else [value])):
            if type(part) not in (bool, int, float, str):
                raise ConfigError(
                    f"{field}={value!r}: has a {type(part).__name__}; must be Python's"
                    " own numbers, text, True, False, or tuples of them"
                )
