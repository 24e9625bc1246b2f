"""Prose: snippets run, commands parse, configs load, linked files exist."""

import importlib
import importlib.util
import re
import shlex
from pathlib import Path

import jax
import pytest

from jaxattn import experiments
from jaxattn.cli import COMMANDS, command

ROOT = Path(__file__).parents[1]
FILES = ("README.md", "results/README.md", "scripts/README.md", "CONTRIBUTING.md")
TEXTS = {name: (ROOT / name).read_text("utf-8") for name in FILES}
MOST_BYTES = 8192  # of README.md: what is longer belongs into the others

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
# But FILE.py and the like, which stand for one.
_CONFIG = re.compile(
    r"(?:--config=|\b(?=configs/))([a-z][\w/]*(?:\.py)?(?::[a-z]\w*)?)"
)
_FILE = re.compile(r"\b(?:jaxattn|scripts|configs|tests|\.ci)/[\w/]+\.\w+")
_PROGRAM = re.compile(r"\bpython (scripts/\w+\.py)|^(jaxattn) ")


def _snippets() -> list:
    return [
        pytest.param(match[2], id=f"{name}:{text.count(chr(10), 0, match.start()) + 2}")
        for name, text in TEXTS.items()
        for match in _FENCED.finditer(text)
        if match[1] == "python"
    ]


def _commands(text: str) -> set[str]:
    """Lines of code blocks, and code between words, that start one of ours."""
    blocks = [m[2] for m in _FENCED.finditer(text) if m[1] in ("", "bash")]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines += _INLINE.findall(_FENCED.sub("", text))
    return {line for line in lines if _PROGRAM.search(line)}


def _command(line: str) -> tuple[command.Command, list[str]]:
    """What a line starts, and its arguments."""
    found = _PROGRAM.search(line)
    program, *arguments = shlex.split(line[found.start() :], comments=True)
    name = arguments.pop(0)
    if program == "jaxattn":
        module = importlib.import_module(f"jaxattn.cli.{name}")
        return module.COMMAND, [f"jaxattn {name}", *arguments]
    stem = Path(name).stem
    own = {"check_gradients": "check"}.get(stem, stem)
    if own in COMMANDS:
        return importlib.import_module(f"jaxattn.cli.{own}").COMMAND, [name, *arguments]
    spec = importlib.util.spec_from_file_location(f"script_{stem}", ROOT / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.COMMAND, [name, *arguments]


def _anchors(text: str) -> set[str]:
    """Of headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", _FENCED.sub("", text), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
    return {title.replace(" ", "-") for title in plain}


def test_the_readme_is_short():
    assert len(TEXTS["README.md"].encode()) <= MOST_BYTES


@pytest.mark.parametrize("snippet", _snippets())
def test_a_snippet_runs_by_itself(snippet, monkeypatch, tmp_path):
    """Beside the committed runs, so that it writes none of its own there."""
    (tmp_path / "results").symlink_to(ROOT / "results")
    monkeypatch.chdir(tmp_path)
    with jax.numpy_dtype_promotion("standard"):  # as a reader has it
        exec(compile(snippet, "snippet", "exec"), {"__name__": "snippet"})


@pytest.mark.parametrize("name", FILES)
def test_links_and_files_exist(name):
    for target in _LINK.findall(TEXTS[name]):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        found = (ROOT / name).parent / path if path else ROOT / name
        assert found.exists(), target
        if anchor:
            assert anchor in _anchors(found.read_text("utf-8")), target
    for target in _FILE.findall(_LINK.sub("", TEXTS[name])):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("name", FILES)
def test_configs_load(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    for text in set(_CONFIG.findall(TEXTS[name])):
        experiments.resolve(experiments.load(text).config)


@pytest.mark.parametrize(
    ("name", "line"),
    [(name, line) for name, text in TEXTS.items() for line in sorted(_commands(text))],
)
def test_a_command_means_something(name, line, monkeypatch):
    """Its flags, and the fields that it sets, exist and take these values."""
    monkeypatch.chdir(ROOT)
    found, argv = _command(line)
    parsed = command.parse(found, argv)
    if parsed.overrides:
        source = experiments.load(parsed.flags.config)
        experiments.check(experiments.overridden(source, parsed.overrides).config)


def test_the_map_names_every_package():
    folders = {path.parent.name for path in ROOT.glob("jaxattn/*/__init__.py")}
    assert (
        set(re.findall(r"^\| `(\w+)` \|", TEXTS["README.md"], re.MULTILINE)) == folders
    )


def test_every_committed_run_has_its_command():
    rows = re.compile(r"^\| \[([\w-]+)\]\(\1/report\.\w+\)", re.MULTILINE)
    named = rows.findall(TEXTS["results/README.md"])
    runs = {path.parent.name for path in ROOT.glob("results/*/summary.json")}
    assert set(named) == runs


def test_the_readme_names_what_is_in_the_files_that_it_points_to():
    rows = TEXTS["README.md"].partition("## Where do I add")[2].partition("\n## ")[0]
    found = re.findall(r"`(\w+)` (?:in|of) \[[\w.]+\]\(([\w/.]+)\)", rows)
    assert len(found) > 5
    for name, path in found:
        assert re.search(rf"^(?:def )?{name}\b", (ROOT / path).read_text("utf-8"), re.M)
