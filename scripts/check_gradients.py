"""Checks every law by hand, by autodiff and by central differences.

python scripts/check_gradients.py --help says how; `jaxattn check` is the same.
"""

import sys

from jaxattn.cli import check, command

if __name__ == "__main__":
    sys.exit(command.run(check.COMMAND, sys.argv))
