"""Draws finished runs again, from what lies in their directories alone.

python scripts/figures.py --help says how; `jaxattn figures` is the same.
"""

import sys

from jaxattn.cli import command, figures

if __name__ == "__main__":
    sys.exit(command.run(figures.COMMAND, sys.argv))
