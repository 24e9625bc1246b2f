"""What the scripts share: --config=FILE, --config.NAME=VALUE, and kept programs."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import jax
from absl import flags
from ml_collections import ConfigDict

from jaxattn import config as config_lib


def read_config(
    path: str | None,
    overrides: list[tuple[str, str]],
    check: Callable[[ConfigDict], None],
    example: str,
) -> ConfigDict:
    """The config that a command line asks for.

    Args:
      path: a config file, with :VARIANT behind it; None if the flag was left out.
      overrides: dotted names and values as typed.
      check: raises ConfigError for a wrong config.
      example: what could have been given.

    Returns:
      A config that passes the check.

    Raises:
      ConfigError: none was given, or it is wrong.
    """
    if path is None:
        raise config_lib.ConfigError(
            f"config: not given; allowed: a config file, as in --config={example}"
        )
    config = config_lib.load(path)
    for field, text in overrides:
        config_lib.override(config, field, text)
    check(config)
    return config


def keep_programs(wanted: bool) -> None:
    """Keeps compiled programs for the next run in `programs_folder`, or does not.

    Where that cannot be written they are not kept, and a line on stderr says so. JAX
    does not write an entry at once: of one that a killed run left in half it warns at
    each run, which compiles it anew, until the file is removed.
    """
    if wanted:
        folder = programs_folder()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            print(f"{folder}: no programs kept ({error.strerror})", file=sys.stderr)
            wanted = False
        else:
            jax.config.update("jax_compilation_cache_dir", str(folder))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_enable_compilation_cache", wanted)


def programs_folder() -> Path:
    """JAX_COMPILATION_CACHE_DIR, or jaxattn in the user's folder of caches."""
    given = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(given or Path(caches) / "jaxattn").expanduser()


def split(arguments: list[str]) -> list[tuple[str, str]]:
    """Parses flags; --config.NAME=VALUE (or --config.NAME VALUE) are set aside.

    Args:
      arguments: sys.argv.

    Returns:
      The names and values set aside. A wrong flag ends the program with code 2.
    """
    own, overrides = [], []
    rest = iter(arguments)
    for argument in rest:
        if argument.startswith("--config."):
            name, equals, text = argument.removeprefix("--config.").partition("=")
            overrides.append((name, text if equals else next(rest, "")))
        else:
            own.append(argument)
    try:
        extra = flags.FLAGS(own)[1:]
    except flags.Error as error:
        stop(str(error))
    if extra:
        stop(f"unexpected argument {extra[0]!r}")
    return overrides


def stop(message: str) -> NoReturn:
    """Says in one line what is wrong, and ends the program with code 2."""
    name = sys.argv[0].rpartition("/")[2]
    print(f"{name}: {message}", file=sys.stderr)
    sys.exit(2)
