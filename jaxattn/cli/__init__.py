"""The command `jaxattn`: each script as a subcommand, for those without a clone."""

import importlib
import sys

import jaxattn

# Subcommand, a module here -> what it does.
COMMANDS = {
    "train": "train every arm of a config on every seed, and write a run directory",
    "report": "put finished runs side by side",
    "figures": "draw finished runs again",
    "check": "check every law by hand, by autodiff and by central differences",
}
_HELP = """\
Usage: jaxattn COMMAND [ARGUMENTS]

A JAX laboratory for how attention learns.

Commands:
{commands}

Examples:
  jaxattn train --list
  jaxattn train --config=sticky:smoke
  jaxattn COMMAND --help
  jaxattn --version"""


def main(argv: list[str] | None = None) -> int:
    """Does what a command line says; returns the exit code.

    Args:
      argv: the program and its arguments; None: sys.argv.
    """
    _, *arguments = sys.argv if argv is None else argv
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        rows = [f"  {name:<8} {about}" for name, about in COMMANDS.items()]
        print(_HELP.format(commands="\n".join(rows)))
        return 0 if arguments else 2
    if name == "--version":
        print(f"jaxattn {jaxattn.__version__}")
        return 0
    if name not in COMMANDS:
        names = ", ".join(COMMANDS)
        what = f"jaxattn: {name!r}: no such command; must be one of {names}"
        print(what, file=sys.stderr)
        return 2
    # Late: JAX takes a second, which --help and --version need not wait for.
    from jaxattn.cli import command

    module = importlib.import_module(f"jaxattn.cli.{name}")
    return command.run(module.COMMAND, [f"jaxattn {name}", *arguments[1:]])
