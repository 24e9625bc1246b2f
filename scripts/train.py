"""Trains every arm of a config on every seed, and writes a run directory.

python scripts/train.py --help says how; `jaxattn train` is the same.
"""

import sys

from jaxattn.cli import command, train

if __name__ == "__main__":
    sys.exit(command.run(train.COMMAND, sys.argv))
