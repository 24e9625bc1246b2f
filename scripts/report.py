"""Puts finished runs side by side.

python scripts/report.py --help says how; `jaxattn report` is the same.
"""

import sys

from jaxattn.cli import command, report

if __name__ == "__main__":
    sys.exit(command.run(report.COMMAND, sys.argv))
