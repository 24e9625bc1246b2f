"""Tasks whose Bayes-optimal answer is known exactly, by the names of configs."""

from collections.abc import Mapping
from types import MappingProxyType

from jaxattn.tasks import bijection as _bijection
from jaxattn.tasks import hmm as _hmm
from jaxattn.tasks import recall as _recall
from jaxattn.tasks import sticky as _sticky
from jaxattn.tasks import toy as _toy
from jaxattn.tasks.base import Batch, Keys, Task, TaskSpec, TransformerSpec
from jaxattn.tasks.bijection import bijection
from jaxattn.tasks.hmm import fixed_hmm, hmm
from jaxattn.tasks.recall import recall
from jaxattn.tasks.sticky import sticky
from jaxattn.tasks.toy import toy

SPECS: Mapping[str, TaskSpec] = MappingProxyType(
    {
        "sticky": _sticky.SPEC,
        "toy": _toy.SPEC,
        "bijection": _bijection.SPEC,
        "hmm": _hmm.HMM_SPEC,
        "fixed_hmm": _hmm.FIXED_HMM_SPEC,
        "recall": _recall.SPEC,
    }
)

__all__ = [
    "SPECS",
    "Batch",
    "Keys",
    "Task",
    "TaskSpec",
    "TransformerSpec",
    "bijection",
    "fixed_hmm",
    "hmm",
    "recall",
    "sticky",
    "toy",
]
