"""One check for all sizes: lengths, widths, numbers of heads and classes."""

import numpy as np


def check_size(name: str, size: int, least: int = 1, most: int | None = None) -> None:
    """Checks that a size is an integer within bounds.

    Args:
      name: of the size, for the error.
      size: to check.
      least: lower bound.
      most: upper bound; None: there is none.

    Raises:
      ValueError: the size is not an integer, or out of bounds.
    """
    integer = isinstance(size, int | np.integer) and not isinstance(size, bool)
    if not integer or size < least or (most is not None and size > most):
        bounds = f", at least {least}" if most is None else f" from {least} to {most}"
        raise ValueError(f"{name}={size!r}: must be an integer{bounds}")
