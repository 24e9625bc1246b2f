"""A laboratory for how attention learns.

`from jaxattn import attention, laws, streaming, ...` gives the modules that users call;
each is loaded when it is first asked for.
"""

import importlib

__version__ = "0.1.0"

# What users call, and the package that has it; "" for a package itself.
_HOMES = {
    "attention": "theory",
    "losses": "theory",
    "laws": "theory",
    "m_steps": "theory",
    "streaming": "kernels",
    "flax_attention": "kernels",
    "tasks": "",
    "transformer": "models",
    "algorithms": "",
    "diagnostics": "measures",
    "geometry": "measures",
    "posterior": "measures",
    "runs": "",
    "experiments": "",
    "engine": "",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str):
    """Imports what users call, on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(
        ".".join(filter(None, [__name__, _HOMES[name], name]))
    )


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
