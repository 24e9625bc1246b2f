"""From a config to an experiment, resolved once: typed, frozen, closures inside."""

from jaxattn.experiments.catalogue import Catalogue
from jaxattn.experiments.config import Source, load
from jaxattn.experiments.experiment import (
    Arm,
    Claim,
    Experiment,
    Grid,
    Problem,
    Scores,
    Snapshots,
)
from jaxattn.experiments.registry import KINDS, check, overridden, resolve
from jaxattn.fields import ConfigError

__all__ = [
    "KINDS",
    "Arm",
    "Catalogue",
    "Claim",
    "ConfigError",
    "Experiment",
    "Grid",
    "Problem",
    "Scores",
    "Snapshots",
    "Source",
    "check",
    "load",
    "overridden",
    "resolve",
]
