"""The house: sizes of modules, who may import what, names that others call."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import jaxattn

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "jaxattn").rglob("*.py"))
LONGEST = 450  # lines
LONGER = {"laws.py"}


def name(path):
    return str(path.relative_to(ROOT))


def test_no_module_is_long():
    lengths = {name(p): len(p.read_text("utf-8").splitlines()) for p in MODULES}
    assert {n for n, lines in lengths.items() if lines > LONGEST} == {
        name(p) for p in MODULES if p.name in LONGER
    }


def test_a_config_is_read_in_experiments_alone():
    found = {name(p) for p in MODULES if "ml_collections" in p.read_text("utf-8")}
    assert found
    assert all(n.startswith("jaxattn/experiments/") for n in found)


def test_the_engine_knows_no_task_model_measure_or_view():
    """By name; nor does it import what has them. It knows that there may be a grid."""
    kinds = [*importlib.import_module("jaxattn.experiments").KINDS]
    tasks = [*importlib.import_module("jaxattn.tasks").SPECS]
    views = [*importlib.import_module("jaxattn.views").VIEWS]
    algorithms = [*importlib.import_module("jaxattn.algorithms").SPECS]
    others = ["attention", "heads", "layers", "kl", "entropy", "loss", "accuracy"]
    named = "|".join(
        {*kinds, *tasks, *views, *others, *algorithms} - {"gradient", "grid"}
    )
    for path in sorted((ROOT / "jaxattn" / "engine").glob("*.py")):
        text = path.read_text("utf-8")
        assert not re.findall(rf"\b(?:{named})\b", text), path.name
        packages = set(re.findall(r"^from jaxattn\.(\w+)", text, re.MULTILINE))
        assert not packages & {"tasks", "models", "kernels", "theory", "views"}


def functions(tree):
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def dropped(function):
    """Arguments that a function only deletes."""
    arguments = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
    return [
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Delete)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in arguments
    ]


def test_no_argument_is_taken_to_be_deleted():
    for path in MODULES:
        for function in functions(ast.parse(path.read_text("utf-8"))):
            assert not dropped(function), (name(path), function.name)
    (planted,) = functions(ast.parse("def f(a, b):\n    del a\n    return b"))
    assert dropped(planted) == ["a"]


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("test_*.py")), ids=name)
def test_no_test_reaches_into_what_is_private(path):
    """A module's `_name`; what a test patches is a module's own affair."""
    tree = ast.parse(path.read_text("utf-8"))
    modules = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    private = [
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.match(r"_(?!_|replace\b|asdict\b|fields\b)", node.attr)
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
    ]
    assert private == []


def test_tests_lie_where_their_package_does():
    packages = {p.parent.name for p in ROOT.glob("jaxattn/*/__init__.py")}
    folders = {p.parent.name for p in ROOT.glob("tests/*/test_*.py")}
    assert folders == packages


def test_names_that_others_call():
    for text in (
        "attention.Params init_params Forward forward causal_mask",
        "losses.cross_entropy predictive_entropy kl_to_bayes",
        "laws.logit_gradient upstream_gradient compatibility advantage score_gradient"
        " value_gradient query_gradient key_gradient column_usage prototype_signal"
        " overlap_kernel loss_and_gradient",
        "streaming.attend",
        "algorithms.Algorithm State Info",
        "tasks.sticky Task Batch TaskSpec",
        "runs.load",
        "experiments.resolve",
        "engine.train",
        "transformer.Architecture",
        "flax_attention.TappedAttention",
        "diagnostics.Measurement",
        "geometry.key_axes",
    ):
        module, _, names = text.partition(".")
        for own in names.split():
            assert hasattr(getattr(jaxattn, module), own), (module, own)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        jaxattn.nothing  # noqa: B018
