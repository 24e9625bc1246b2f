"""Experiments x seeds -> arrays, without knowing what is trained."""

from jaxattn.engine.plan import Settings
from jaxattn.engine.progress import StoppedError
from jaxattn.engine.training import train

__all__ = ["Settings", "StoppedError", "train"]
