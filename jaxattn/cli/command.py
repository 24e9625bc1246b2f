"""Command lines: flags, --config.NAME=VALUE, --help, errors of one line, exit codes."""

import os
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import jax
from absl import flags

from jaxattn.experiments import Source, load, overridden
from jaxattn.experiments.registry import require_command
from jaxattn.fields import FLAG, TEXT, ConfigError, Field, nearest

_HELP = ("-h", "--help", "--helpshort", "--helpfull")
WIDTH = 80  # of a terminal


class FlagError(ValueError):
    """A command line that means nothing. The message names flag, value and rule."""


class Flag(NamedTuple):
    """--NAME=VALUE; of true or false also --NAME and --noNAME."""

    name: str
    default: Any
    rule: Field
    about: str


class Line(NamedTuple):
    """A command line as it was typed, and what it says."""

    argv: list[str]
    flags: SimpleNamespace
    overrides: list[tuple[str, str]]  # dotted names and values of --config.NAME=VALUE
    words: list[str]

    def again(self) -> str:
        """The same command, to be typed again."""
        return f"{program(self.argv[0])} {shlex.join(self.argv[1:])}"


class Command(NamedTuple):
    """What a script is, or a subcommand of jaxattn."""

    about: str  # a sentence
    flags: tuple[Flag, ...]
    main: Callable[[Line], int]  # returns the exit code
    examples: tuple[str, ...] = ()  # of arguments, for --help
    words: str = ""  # what the words beside flags are, if there may be some
    errors: tuple[type[Exception], ...] = ()  # that are a line for people


CONFIG_FLAGS = (
    Flag(
        *("config", None, TEXT),
        "FILE.py[:VARIANT], or the name of a config that comes with jaxattn",
    ),
    Flag("list", False, FLAG, "show configs, or what is in --config"),
    Flag("workdir", None, TEXT, "the run directory; else runs/<config>[-variant]"),
)
FIGURE_FLAGS = (
    Flag("html", False, FLAG, "also write the report as one page"),
    Flag("pdf", False, FLAG, "also draw the figures as PDF"),
)


def run(command: Command, argv: list[str]) -> int:
    """Does what a command line says.

    Args:
      command: what it is.
      argv: sys.argv, or the same with another name for the program.

    Returns:
      The exit code: 2 and one line on stderr for what a person can put right.
    """
    try:
        if any(argument in _HELP for argument in argv[1:]):
            print(help_text(command, argv[0]), flush=True)
            return 0
        code = command.main(parse(command, argv))
        sys.stdout.flush()
        return code
    except (FlagError, ConfigError, *command.errors) as error:
        print(f"{name_of(argv[0])}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{name_of(argv[0])}: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # who read the output, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def parse(command: Command, argv: list[str]) -> Line:
    """Reads a command line.

    Args:
      command: its flags; --config.NAME=VALUE only with CONFIG_FLAGS.
      argv: as for `run`.

    Raises:
      FlagError: an unknown flag, a wrong value or a word too many.
    """
    own, overrides = [], []
    rest = iter(argv)
    has_config = any(flag.name == "config" for flag in command.flags)
    for argument in rest:
        if has_config and argument.startswith("--config."):
            field, equals, text = argument.removeprefix("--config.").partition("=")
            overrides.append((field, text if equals else next(rest, "")))
        else:
            own.append(argument)
    values = _defined(command.flags)
    try:
        _, *words = values(own)
    except flags.UnrecognizedFlagError as error:
        likely = nearest(error.flagname, list(values))
        text = f"--{error.flagname}: no such flag{likely}; --help lists all"
        raise FlagError(text) from None
    except flags.Error as error:
        raise FlagError(str(error).removeprefix("flag ")) from None
    if words and not command.words:
        raise FlagError(f"unexpected argument {words[0]!r}; must be flags only")
    found = SimpleNamespace(**{name: values[name].value for name in values})
    return Line(argv, found, overrides, words)


class _Reader(flags.ArgumentParser):
    """What reads a flag by the rule that a field of a config would have."""

    def __init__(self, rule: Field):
        self._rule = rule

    def parse(self, argument: Any) -> Any:
        """The value of a text, as absl asks for it."""
        if not isinstance(argument, str):
            return argument  # a default
        try:
            value = self._rule.parse(argument)
        except (ValueError, OverflowError):
            value = None
        if not self._rule.accepts(value):
            raise ValueError(f"must be {self._rule.must}")
        return value


def _defined(wanted: tuple[Flag, ...]) -> flags.FlagValues:
    """The flags of one command alone, as absl's."""
    values = flags.FlagValues()
    for flag in wanted:
        own = flag.name, flag.default, flag.about
        if _is_switch(flag):  # absl's, for --noNAME
            switch = flags.BooleanFlag(*own)
            switch.parser = _Reader(flag.rule)
            flags.DEFINE_flag(switch, flag_values=values)
        else:
            flags.DEFINE(_Reader(flag.rule), *own, flag_values=values)
    return values


def _is_switch(flag: Flag) -> bool:
    return flag.rule is FLAG


def leave(code: int) -> NoReturn:
    """Ends this process at once, with whatever its threads are doing."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def name_of(program: str) -> str:
    """What a line on stderr begins with."""
    return Path(program).name


def program(name: str) -> str:
    """What a person types to start it: a script needs Python."""
    return f"python {name}" if name.endswith(".py") else name


def sibling(name: str, other: str) -> str:
    """What a person types for another command, called as this one is.

    Args:
      name: of this program, as in argv.
      other: the subcommand of jaxattn.
    """
    script = f"{'check_gradients' if other == 'check' else other}.py"
    return program(
        str(Path(name).with_name(script))
        if name.endswith(".py")
        else f"jaxattn {other}"
    )


def help_text(command: Command, name: str) -> str:
    """What --help prints.

    Args:
      command: what it is.
      name: of the program, as in argv.
    """
    rows = []
    for flag in command.flags:
        shown, default = f"--{flag.name}=", flag.default
        if isinstance(default, tuple):
            default = ",".join(map(str, default))
        if _is_switch(flag):
            shown, default = f"--[no]{flag.name}", str(default).lower()
        rows.append((shown, flag.about + (f" ({default})" if flag.default else "")))
        if flag.default is False or flag.default == 0:
            rows[-1] = shown, f"{flag.about} ({default})"
    start, needed = program(name), [command.words] if command.words else []
    if any(flag.name == "config" for flag in command.flags):
        needed.append("--config=CONFIG")
        rows.append(("--config.NAME=VALUE", "set a field of the config"))
    usage = " ".join([start, *needed, "[FLAGS]" if rows else ""]).rstrip()
    lines = [f"Usage: {usage}", "", *textwrap.wrap(command.about, WIDTH)]
    if rows:
        lines += ["", "Flags, with their defaults:", *table(rows)]
    if command.examples:
        lines += ["", "Examples:"]
        lines += [f"  {start} {example}".rstrip() for example in command.examples]
    return "\n".join(lines)


def table(rows: list[tuple[str, str]]) -> list[str]:
    """Names and what they are, in lines of a terminal's width."""
    indent = 4 + max(len(name) for name, _ in rows)
    lines = []
    for name, text in rows:
        lines += textwrap.wrap(
            text or " ",
            WIDTH,
            initial_indent=f"  {name}".ljust(indent),
            subsequent_indent=" " * indent,
            break_on_hyphens=False,
        )
    return lines


def read_config(line: Line, command: str) -> Source:
    """Reads the config that a command line asks for, with its overrides.

    Args:
      line: of a command with CONFIG_FLAGS.
      command: "train" or "check".

    Raises:
      ConfigError: none was given, it is of another command, or an override is wrong.
    """
    if line.flags.config is None:
        some = {"train": "sticky", "check": "gradients"}[command]
        raise ConfigError(
            f"config: not given; must be a config, as in --config={some}; --list shows"
            " them"
        )
    source = load(line.flags.config)
    require_command(source.config, command)
    return overridden(source, line.overrides)


def workdir(line: Line, name: str) -> Path:
    """Where a command line wants its run.

    Args:
      line: of the command.
      name: of the config.
    """
    return Path(line.flags.workdir or Path("runs") / name)


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
