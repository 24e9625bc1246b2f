"""Every command: its help, its errors of one line, lists, progress and Ctrl-C."""

import importlib.util
import os
import signal
import sys
import threading
import tomllib
from pathlib import Path

import pytest

import jaxattn
from jaxattn import cli, experiments
from jaxattn.cli import check, command, figures, report, train
from jaxattn.engine import progress
from jaxattn.experiments import config as config_lib
from jaxattn.experiments import registry

ROOT = Path(__file__).parents[2]


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.COMMAND


# Program -> command.
COMMANDS = {
    "jaxattn train": train.COMMAND,
    "jaxattn report": report.COMMAND,
    "jaxattn figures": figures.COMMAND,
    "jaxattn check": check.COMMAND,
    "scripts/benchmark.py": script("benchmark"),
    "scripts/tapped_transformer.py": script("tapped_transformer"),
}


@pytest.mark.parametrize("program", COMMANDS)
def test_help_is_short_and_names_every_flag(program, capsys):
    assert command.run(COMMANDS[program], [program, "--nope", "-h"]) == 0
    said, error = capsys.readouterr()
    assert command.run(COMMANDS[program], [program, "--help"]) == 0
    assert capsys.readouterr().out == said
    lines = said.splitlines()
    assert error == ""
    assert lines[0].startswith(f"Usage: {command.program(program)} ")
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 40
    for flag in COMMANDS[program].flags:
        assert f"--{flag.name}=" in said or f"--[no]{flag.name} " in said
        assert flag.default is None or flag.rule.accepts(flag.default)
    for example in COMMANDS[program].examples:
        line = [program, *example.split()]
        command.parse(COMMANDS[program], line)  # or it raises
        assert f"  {command.program(program)} {example}\n" in said


@pytest.mark.parametrize("program", COMMANDS)
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("--nope", "--nope: no such flag; --help lists all"),
        ("--helpp=1", "--helpp: no such flag"),
        ("-x", "--x: no such flag"),
    ],
)
def test_an_unknown_flag_is_one_line_and_code_2(program, wrong, said, capsys):
    assert command.run(COMMANDS[program], [program, wrong]) == 2
    name = program.rpartition("/")[2]
    assert capsys.readouterr().err.startswith(f"{name}: {said}")


@pytest.mark.parametrize("program", COMMANDS)
def test_a_word_too_many_is_one_line_and_code_2(program, capsys):
    assert command.run(COMMANDS[program], [program, "nowhere"]) == 2
    printed, error = capsys.readouterr()
    expected = "unexpected argument 'nowhere'"
    if COMMANDS[program].words:
        expected = "run='nowhere': not a run directory"
    assert f": {expected}" in error
    assert error.count("\n") == 1
    assert printed == ""


@pytest.mark.parametrize(
    ("program", "wrong", "said"),
    [
        ("scripts/benchmark.py", "--parts=", "--parts=: must be one or more of a"),
        ("scripts/benchmark.py", "--parts=head,hat", "--parts=head,hat: must be one"),
        ("scripts/benchmark.py", "--lengths=", "--lengths=: must be integers"),
        ("scripts/benchmark.py", "--heads=()", "--heads=(): must be integers"),
        ("scripts/benchmark.py", "--heads=0", "--heads=0: must be integers"),
        ("scripts/benchmark.py", "--repeats=0", "--repeats=0: must be an integer"),
        ("scripts/benchmark.py", "--json=", "--json=: must be text"),
        ("scripts/benchmark.py", "--json=/none/x", "json='/none/x': cannot be written"),
        ("scripts/benchmark.py", "--json=/", "json='/': cannot be written (Is a"),
        ("scripts/benchmark.py", "--config.seeds=1", "--config.seeds: no such flag"),
        ("scripts/tapped_transformer.py", "--steps=0", "--steps=0: must be an in"),
        ("jaxattn report", "", "RUN: not given; must be run directories"),
        ("jaxattn figures", "--html", "RUN: not given; must be run directories"),
        ("jaxattn figures", "--config.seeds=1", "--config.seeds: no such flag"),
    ],
)
def test_what_else_may_be_wrong_with_flags(program, wrong, said, capsys):
    assert command.run(COMMANDS[program], [program, *wrong.split()]) == 2
    printed, error = capsys.readouterr()
    assert f": {said}" in error
    assert error.count("\n") == 1
    assert printed == ""


def test_flags_may_stand_anywhere_and_be_written_in_three_ways():
    words = ["a", "--html", "b", "--nopdf"]
    line = command.parse(figures.COMMAND, ["scripts/figures.py", *words])
    assert line.words == ["a", "b"]
    assert (line.flags.html, line.flags.pdf) == (True, False)
    assert line.again() == "python scripts/figures.py a --html b --nopdf"
    words = ["--workers", "2", "--html=true", "--config.steps", "1e3", "--config.a=b=c"]
    line = command.parse(train.COMMAND, ["jaxattn train", *words])
    assert (line.flags.workers, line.flags.html) == (2, True)
    assert line.overrides == [("steps", "1e3"), ("a", "b=c")]
    assert line.again().startswith("jaxattn train --workers 2 ")
    lists = command.parse(COMMANDS["scripts/benchmark.py"], ["x", "--heads=(1, 8)"])
    assert lists.flags.heads == (1, 8)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "Usage: jaxattn COMMAND"),
        ([], 2, "Usage: jaxattn COMMAND"),
        (["--version"], 0, f"jaxattn {jaxattn.__version__}\n"),
        (["train", "--help"], 0, "Usage: jaxattn train "),
        (
            ["trian"],
            2,
            "jaxattn: 'trian': no such command; must be one of train, report, ",
        ),
        (["train", "--nope"], 2, "jaxattn train: --nope: no such flag"),
    ],
)
def test_the_command_jaxattn(arguments, code, said, capsys):
    assert cli.main(["/somewhere/bin/jaxattn", *arguments]) == code
    printed = capsys.readouterr()
    assert said in printed.out + printed.err


def test_every_subcommand_is_a_module_with_a_script():
    programs = {"jaxattn " + name for name in cli.COMMANDS}
    assert programs == {program for program in COMMANDS if "/" not in program}
    for name in cli.COMMANDS:
        typed = command.sibling("scripts/train.py", name)
        assert (ROOT / typed.removeprefix("python ")).is_file()
        assert command.sibling("jaxattn train", name) == f"jaxattn {name}"


def test_the_wheel_has_every_package_and_the_configs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tools = project["tool"]["setuptools"]
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "jaxattn").rglob("*.py")
    }
    assert {*tools["packages"]} == found | {"jaxattn.configs"}
    assert tools["package-dir"] == {"jaxattn.configs": "configs"}
    assert project["project"]["scripts"] == {"jaxattn": "jaxattn.cli:main"}
    assert {*config_lib.shipped()} == {p.stem for p in (ROOT / "configs").glob("*.py")}


def test_configs_are_listed_with_their_first_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.py").write_text('"""My own.\n\nMore."""\n1 / 0')
    (tmp_path / "configs" / "half.py").write_text("def get_config(")
    monkeypatch.chdir(tmp_path)
    assert command.run(train.COMMAND, ["jaxattn train", "--list"]) == 0
    said = capsys.readouterr().out
    assert "  sticky     The sticky chain: SGD and EM on one sequence, against" in said
    assert "  mine       My own.\n" in said
    assert "  half       cannot be read (SyntaxError)\n" in said
    assert "jaxattn train --config=NAME --list" in said
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize("name", config_lib.shipped())
def test_a_config_is_listed_with_all_that_may_be_set(name, capsys):
    line = ["scripts/train.py", f"--config={name}:smoke", "--list", "--config.seeds=3"]
    assert command.run(train.COMMAND, line) == 0
    said = capsys.readouterr().out
    source = experiments.load(name)
    config = source.config
    joined = " ".join(said.split())
    values = config_lib.flatten(config)
    for field in registry.overridable(config, source.catalogue):
        if field in values:
            assert f"{field.rpartition('.')[2]}=" in joined
    for named in (*source.variants, *config.arms):
        assert f"{named} " in joined
    assert " seeds=3 " in joined
    kind = "check_gradients" if name == "gradients" else "train"
    assert f"  python scripts/{kind}.py --config={name}:smoke\n" in said
    lines = [text for text in said.splitlines() if "  python " not in text]
    assert max(map(len, lines)) <= 80


def test_a_wrong_config_is_not_listed(capsys):
    line = ["jaxattn train", "--config=sticky", "--list", "--config.seeds=0"]
    assert command.run(train.COMMAND, line) == 2
    assert capsys.readouterr().err.startswith("jaxattn train: seeds=0: must be")


def test_progress_in_a_file_is_a_line_for_each_twentieth(capsys):
    with progress.shown("mine", 1000, 100, unit="step") as tell:
        for done in range(101, 1001):
            tell(done, f"step {done}/1000")
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(", ")[0] for line in lines] == [
        f"mine: {share} % step {10 * share}/1000" for share in range(15, 101, 5)
    ]
    assert all(line.endswith(" s") for line in lines)
    with progress.shown("mine", 2, unit="step", silent=True) as tell:
        tell(2, "end")
    assert capsys.readouterr().err == ""


def test_progress_on_a_terminal_is_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.shown("mine", 4, unit="step") as tell:
        tell(1, "here")
        tell(4, "there")
    assert "there: 100%" in capsys.readouterr().err


def test_a_signal_is_answered_at_once_and_the_second_is_not_kept(capfd):
    before = signal.getsignal(signal.SIGINT)
    with progress.signals_kept("at the end") as signals:
        assert not signals
        signal.raise_signal(signal.SIGINT)
        assert signals
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr().err == "stopping at the end; again to stop now\n"


@pytest.mark.parametrize("when", ["before", "meanwhile", "never"])
def test_work_left_behind(when):
    release, done = threading.Event(), []

    def work():
        if when == "meanwhile":
            os.kill(os.getpid(), signal.SIGINT)
        release.wait(5 if when == "meanwhile" else 0)
        done.append("work")
        return "result"

    with progress.signals_kept("then") as signals:
        if when == "before":
            signal.raise_signal(signal.SIGINT)
        if when == "never":
            assert signals.left_behind(work) == "result"
        else:
            with pytest.raises(progress.StoppedError):
                signals.left_behind(work)
            assert done == []
        release.set()


def test_what_fails_in_work_left_behind_is_raised():
    def work():
        raise ValueError("mine")

    with (
        progress.signals_kept("then") as signals,
        pytest.raises(ValueError, match="mine"),
    ):
        signals.left_behind(work)


def test_ctrl_c_elsewhere_is_code_130(capsys):
    def main(line):
        raise KeyboardInterrupt

    assert command.run(command.Command("Mine.", (), main), ["mine.py"]) == 130
    assert capsys.readouterr().err == "\nmine.py: stopped\n"
