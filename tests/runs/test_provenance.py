"""What a run's numbers depend on beside its config."""

import json
import re
import subprocess

from jaxattn.runs import provenance


def test_provenance_is_plain_and_the_same_each_time():
    found = provenance.provenance()
    assert json.loads(json.dumps(found)) == found == provenance.provenance()
    assert re.fullmatch("[0-9a-f]{16}", found["code"])


def test_outside_git_the_commit_is_unknown(monkeypatch):
    def fail(*arguments, **_):
        raise FileNotFoundError(arguments)

    monkeypatch.setattr(subprocess, "run", fail)
    assert provenance.provenance()["git_commit"] == "unknown"
