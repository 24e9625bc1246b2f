"""The run directory, and what is read, tabled and drawn from it."""

import contextlib
import errno
import json
import math
import os
import platform
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from problems import result_of

from jaxattn.analysis import report, runs, stats
from jaxattn.cli import launch
from jaxattn.engine import sweep
from jaxattn.experiments import config as config_lib
from jaxattn.experiments import one_head
from jaxattn.measures import trajectory
from jaxattn.views import figures, html, run_figures

PICTURES = [
    *("curves.png", "final.png", "arrival.png", "frame.png", "diagnostics.png"),
    *("gate.png", "attention.png", "advantage.png", "values.png", "usage.png"),
    "motion.gif",
]
CONFIG = Path(__file__).parents[1] / "configs" / "sticky.py"
ARMS = ("sgd", "em", "adam")
SEEDS = 8


@pytest.fixture
def config():
    config = config_lib.load(f"{CONFIG}:smoke")
    config.update({"seeds": SEEDS, "steps": 100, "eval_every": 50, "run_arms": ARMS})
    config.update({"snapshots": 2})
    return config


@pytest.fixture
def result(config):
    """Made-up numbers: em twice as fast as sgd, adam over-fits, its seed 3 diverges."""
    rng = np.random.default_rng(0)
    start = 2.1 + 0.01 * rng.random(SEEDS)
    fall = {"sgd": [0, 0.02, 0.04], "em": [0, 0.05, 0.1], "adam": [0, 0.3, 0.5]}
    train = np.stack([start[:, None] - np.array(fall[arm]) for arm in ARMS])
    curves = {name: np.ones((3, SEEDS, 3)) for name in one_head.METRICS}
    curves |= {
        "train_loss": train,
        "train_bayes_nll": np.full_like(train, 1.9),
        "heldout_bayes_nll": np.full_like(train, 1.91),
        "heldout_kl": train - 1.5,
        "heldout_loss": train + np.array([0, 0, 1])[:, None, None],
    }
    for curve in curves.values():
        curve[2, 3, 2] = np.nan  # though at 50 steps it was below sgd's last
    maps = np.stack([np.tri(6) / np.arange(1, 7)[:, None], np.eye(6)])
    return result_of(config, curves, np.stack([maps[None]] * 3))


@pytest.fixture
def run(tmp_path, config, result):
    run = runs.write_metrics(tmp_path, config, result)
    return run._replace(summary=report.summarise(run, {"compile": 1.0, "run": 2.0}))


def test_metrics_are_read_back_with_their_axes(run, result):
    for name in one_head.METRICS:
        np.testing.assert_array_equal(run.metrics[name], result.kept.curves[name])
        assert run.axes["axes"][name] == ["arm", "seed", "eval"]
    for name, array in run.metrics.items():
        assert array.ndim == len(run.axes["axes"][name])
    assert run.axes["coordinates"] == {
        "arm": list(ARMS),
        "seed": list(range(SEEDS)),
        "eval": [0, 50, 100],
        "snapshot_seed": [0],
        "snapshot_step": [0, 100],
    }
    assert runs.load(run.path).summary is None


def test_config_says_what_the_numbers_depend_on(run, config):
    assert run.config["config"] == json.loads(json.dumps(config.to_dict()))
    named = {"jax", "jaxlib", "optax", "jaxattn", "python"}
    assert named <= run.config["versions"].keys()
    assert run.config["device"]["count"] >= 1
    assert run.config["git_commit"]
    assert run.config["prng_implementation"] == "threefry2x32"


def test_summary_has_what_the_contract_names(run):
    summary = run.summary
    assert {k: summary[k] for k in ("config", "steps", "seeds", "complete")} == {
        "config": "sticky-smoke",
        "steps": 100,
        "seeds": SEEDS,
        "complete": True,
    }
    assert summary["wall_seconds"] == {"compile": 1.0, "run": 2.0}
    assert summary["floors"]["chance"] == math.log(8)
    assert summary["floors"]["bayes_heldout_nll"]["mean"] == pytest.approx(1.91)
    assert summary["floors"]["entropy_rate"] == pytest.approx(1.883, abs=1e-3)
    assert list(summary["arms"]) == list(ARMS)
    for entry in summary["arms"].values():
        for name in one_head.METRICS:
            assert set(entry[name]) == {"mean", "std", "ci95", "n"}
    text = json.dumps(summary, allow_nan=False)
    assert json.loads(text)["arms"]["sgd"]["train_loss"]["n"] == SEEDS


def test_summary_estimates_over_seeds(run, result):
    expected = stats.estimate(result.kept.curves["train_loss"][1, :, -1])
    assert run.summary["arms"]["em"]["train_loss"] == expected._asdict()


def test_diverged_seeds_are_counted_and_left_out(run):
    adam = run.summary["arms"]["adam"]
    assert adam["diverged"] == 1
    assert adam["train_loss"]["n"] == SEEDS - 1
    assert run.summary["arms"]["sgd"]["diverged"] == 0
    assert adam["first_diverged_step"] == 100
    assert run.summary["arms"]["sgd"]["first_diverged_step"] is None


def test_flags(run):
    assert run.summary["arms"]["adam"]["flags"] == [
        "diverged in 1 of 8 seeds, the first at step 100",
        "train loss below the Bayes floor in 7 of 8 seeds",
        "held-out loss above chance in 7 of 8 seeds",
    ]
    assert run.summary["arms"]["em"]["flags"] == []


def test_comparisons(run):
    em, adam = run.summary["comparisons"]
    assert (em["arm"], em["baseline"]) == ("em", "sgd")
    difference = em["paired_difference"]["train_loss"]
    assert difference["mean"] == pytest.approx(-0.06)
    assert difference["ci95"] == pytest.approx((-0.06, -0.06))
    assert em["steps_to_baseline_final"] == {"median": 50, "reached": 8, "n": 8}
    assert em["speedup"]["median"] == 2.0
    # Some time before 50 against some time from 50 to 100, as far as was looked.
    assert em["speedup"]["ci95"] == (1.0, None)
    assert em["speedup"]["beyond"] == ("", "≥", ">")
    # The diverged seed never arrived: it is counted, not dropped.
    assert adam["steps_to_baseline_final"] == {"median": 50, "reached": 7, "n": 8}
    assert adam["speedup"]["ci95"] == (None, None)
    assert adam["speedup"]["beyond"] == ("<", "≥", ">")
    assert adam["speedup"]["n"] == 8
    assert report.speedup_cell(em["speedup"]) == "≥2x [1, ∞]"
    assert report.speedup_cell(adam["speedup"]) == "≥2x [0, ∞]"


def test_an_arm_is_as_fast_as_its_copy(tmp_path, config, result):
    """Also where the curve comes down early and then goes up, or just wobbles."""
    rng = np.random.default_rng(0)
    for values in result.kept.curves.values():
        curve = rng.random((SEEDS, 3)) + np.array([1.0, 0.0, 0.0])
        curve[:4, 2] = curve[:4, 1] + 0.5
        values[:] = curve
    result = result_of(config, result.kept.curves)  # none diverges
    run = runs.write_metrics(tmp_path, config, result)
    for entry in report.summarise(run, {"compile": 1.0, "run": 2.0})["comparisons"]:
        for name in ("speedup", "heldout_speedup"):
            low, high = entry[name]["ci95"]
            assert (low or 0) <= 1 <= (high or np.inf)
            assert entry[name]["median"] in (1.0, None)  # None: both at once


def test_no_speedup_over_a_baseline_that_did_not_learn(tmp_path, config, result):
    result.kept.curves["heldout_kl"][0, :, 2] = 5.0
    run = runs.write_metrics(tmp_path, config, result)
    em, _ = report.summarise(run, {"compile": 1.0, "run": 2.0})["comparisons"]
    assert em["heldout_speedup"]["median"] is None
    assert em["heldout_speedup"]["beyond"] == ("", "?", "")
    assert em["heldout_steps_to_baseline_final"]["n"] == 0
    assert em["speedup"]["median"] == 2.0


def test_relative_attention_counts_what_is_allowed_not_what_is_used():
    relative = figures.relative_attention(np.eye(4), np.tri(4, dtype=bool))
    np.testing.assert_array_equal(np.diag(relative), [1, 2, 3, 4])
    assert relative[3, 0] == 0
    assert np.isnan(relative[0, 3])


def test_no_comparison_without_the_baseline(tmp_path, config, result):
    config.baseline = "sgd_matched"
    run = runs.write_metrics(tmp_path, config, result)
    summary = report.summarise(run, {"compile": 1.0, "run": 2.0})
    assert summary["comparisons"] == []
    assert "sgd_matched, the baseline, did not run" in report.terminal(summary)
    assert "Against" not in report.markdown(summary, {})


def test_no_verdict_on_an_arm_that_never_moved(tmp_path, config, result):
    curves = result.kept.curves
    for name in ("heldout_loss", "heldout_kl", "train_loss"):
        curves[name][0] = curves[name][0, :, :1]
    run = runs.write_metrics(tmp_path, config, result)
    assert report.moved(run).tolist() == [False, True, True]
    summary = report.summarise(run, {"compile": 1.0, "run": 2.0})
    assert summary["claims"]
    for claim in summary["claims"]:
        assert (claim["verdict"], claim["never_moved"]) == ("none", ["sgd"])
    reason = "none       EM over SGD, same base rate (sgd never moved)\n"
    assert reason in report.terminal(summary)
    assert "| none, sgd never moved |" in report.markdown(summary, {})
    assert "**Held**" not in report.markdown(summary, {})


def test_report_fits_a_terminal_and_says_it_all(run):
    text = report.terminal(run.summary)
    assert max(map(len, text.splitlines())) <= 80
    for needed in (*ARMS, "chance 2.079", "≥2x [1, ∞]", "50 (7/8)", "diverged in 1 of"):
        assert needed in text
    markdown = report.markdown(run.summary, {"figures/curves.png": "Read it so."})
    for needed in (
        *(
            "| em |",
            "![curves.png](figures/curves.png)\n\nRead it so.",
            "## Flags",
            "-0.060±0.000",
        ),
        *("## The paper's three observations", "## Frame and precision"),
        "## What each arm did, beside sgd",
    ):
        assert needed in markdown
    assert "Pictures" not in report.markdown(run.summary, {})


def test_the_report_says_what_it_was_trained_with(run):
    versions = run.config["versions"]
    line = (
        f"Trained with jaxattn {versions['jaxattn']}, jax {versions['jax']},"
        f" Python {platform.python_version()}, on cpu"
    )
    assert line in report.terminal(run.summary).splitlines()
    assert f"{line}: other versions round otherwise" in report.markdown(run.summary, {})
    # Of runs before it was written down, what is known.
    older = run.config | {"versions": {"jaxattn": "0.1.0", "jax": "0.10.2"}}
    found = report.trained_with(run._replace(config=older))
    assert found == "jaxattn 0.1.0, jax 0.10.2, on cpu"


def test_a_flag_of_several_arms_is_said_once(run):
    arms = run.summary["arms"]
    for arm in ("sgd", "em"):
        arms[arm]["flags"] = ["not left chance in 8 of 8 seeds"]
    lines = report.flag_lines(run.summary)
    assert lines[0] == "sgd, em: not left chance in 8 of 8 seeds"
    assert [line.split(":")[0] for line in lines[1:]] == ["adam"] * (len(lines) - 1)


def test_a_run_is_drawn_again_from_its_directory(run):
    runs.write_summary(run.path, run.summary)
    before = {p.name: p.read_bytes() for p in run.path.iterdir() if p.is_file()}
    written = launch.redraw(run.path, launch.Output(figures=True, pdf=True, html=True))
    names = {str(path.relative_to(run.path)) for path in written}
    tables = {"report.html", "report.md", "summary.csv", "summary.json"}
    pictures = {f"figures/{name}" for name in PICTURES}
    vector = {name.replace(".png", ".pdf") for name in pictures if "png" in name}
    assert names == pictures | vector | tables
    assert all((run.path / name).stat().st_size > 2000 for name in names)
    after = {p.name: p.read_bytes() for p in run.path.iterdir() if p.is_file()}
    listed = sorted(Path(name).name for name in pictures | vector)
    assert json.loads(after["summary.json"]) == json.loads(before["summary.json"]) | {
        "figures": listed
    }
    assert all(after[n] == b for n, b in before.items() if n != "summary.json")
    page = after["report.html"].decode()
    assert page.count("<img") == page.count('src="data:image/') == len(PICTURES)
    assert "http" not in page
    for needed in ("<h1", "<table>", "Frame and precision", "addEventListener"):
        assert needed in page


def test_tables_of_the_page_scroll_inside_and_hide_no_number(tmp_path):
    """Words wrap; numbers, also bold ones and with | beside them, stay in one piece."""
    words = "mean |cos| at the end, less what it was before training began"
    rows = [
        ["arm", "parameters", "what", "difference"],
        ["em", "1,234,567", words, "**-0.027±0.015**"],
        ["a|b", "158,336", "short", "reversed (0.25 [0.25, 0.333])"],
    ]
    page = html.page(f"# run\n\n{report.markdown_table(rows)}\n", tmp_path)
    table = page[page.index('<div class="table"') : page.index("</table></div>")]
    cells = re.findall(r"<(?:td|th)([^>]*)>(.*?)</t[dh]>", table)
    assert len(cells) == 12
    text = [re.sub("<[^>]*>", "", content) for _, content in cells]
    plain = [cell.strip("*") for row in rows for cell in row]
    assert [t.replace("&nbsp;", " ") for t in text] == plain
    # Of the third column alone, as a whole.
    assert ["words" in style for style, _ in cells] == [False, False, True, False] * 3
    assert "<strong>-0.027±0.015</strong>" in table
    assert "[0.25,&nbsp;0.333]" in table
    assert all("right" in style for style, _ in cells[7::4])
    for rule in ("overflow-x: auto", "position: sticky", "white-space: nowrap"):
        assert rule in page
    assert 'tabindex="0"' in table


def draw_again(run, monkeypatch, *names):
    """Draws pictures of these names; returns what then lies in figures/."""

    def draw(run, folder, *, pdf):
        folder.mkdir()
        for name in names:
            (folder / name).write_bytes(b"new")
        return dict.fromkeys(names, "Loss.")

    monkeypatch.setattr(run_figures, "draw", draw)
    launch.redraw(run.path, launch.Output(figures=True, pdf=False, html=False))
    return {p.name: p.is_dir() or p.read_bytes() for p in figures_of(run).iterdir()}


def figures_of(run):
    return run.path / "figures"


def test_of_the_figures_those_go_that_were_drawn_here_and_are_no_more(run, monkeypatch):
    """And a page that is there is written anew. What a user put there stays."""
    runs.write_summary(run.path, run.summary)
    draw_again(run, monkeypatch, "curves.png", "gap.png")
    (figures_of(run) / "notes.txt").write_bytes(b"mine")
    (figures_of(run) / "mine.png").write_bytes(b"mine")
    (figures_of(run) / "talk").mkdir()
    (run.path / "report.html").write_text("old")
    mine = {"notes.txt": b"mine", "mine.png": b"mine", "talk": True}
    found = draw_again(run, monkeypatch, "curves.png", "final.png")
    assert found == {"curves.png": b"new", "final.png": b"new"} | mine
    assert "data:image/png" in (run.path / "report.html").read_text()
    (figures_of(run) / "gap.png").write_bytes(b"mine")
    with pytest.raises(runs.RunError, match=r"gap.png is not one that was drawn here"):
        draw_again(run, monkeypatch, "curves.png", "gap.png")
    assert (figures_of(run) / "gap.png").read_bytes() == b"mine"
    listed = runs.load_finished(run.path).summary["figures"]
    assert listed == ["curves.png", "final.png"]
    (run.path / "summary.json").unlink()
    with pytest.raises(runs.RunError, match="not finished"):
        launch.redraw(run.path, launch.Output(True, False, False))


def test_of_figures_that_are_not_listed_none_goes(run, monkeypatch):
    """As in a run of before they were: those drawn anew are replaced."""
    runs.write_summary(run.path, run.summary)
    figures_of(run).mkdir()
    for name in ("curves.png", "old.png"):
        (figures_of(run) / name).write_bytes(b"old")
    found = draw_again(run, monkeypatch, "curves.png")
    assert found == {"curves.png": b"new", "old.png": b"old"}
    runs.write_summary(run.path, run.summary | {"figures": ["../config.json"]})
    with pytest.raises(runs.RunError, match="other names than of pictures"):
        draw_again(run, monkeypatch, "curves.png")


def test_a_run_of_before_there_was_so_much_to_see_is_still_drawn(run):
    """Its curves and tables; of what it did not keep nothing."""
    names = (*trajectory.CURVES, *trajectory.TRAITS, *trajectory.SNAPSHOTS)
    metrics = {n: a for n, a in run.metrics.items() if n not in names}
    old = run._replace(metrics=metrics)
    old = old._replace(summary=report.summarise(old, {"compile": 1.0, "run": 2.0}))
    assert old.summary["observations"] is None
    drawn = run_figures.draw(old, run.path / "old")
    assert list(drawn) == ["curves.png", "final.png", "arrival.png"]
    assert "Frame" not in report.markdown(old.summary, drawn)


def test_numbers_do_not_hang_on_drawing(tmp_path, config, result, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(run_figures, "draw", fail)
    wall, output = {"compile": 1.0, "run": 2.0}, launch.Output(True, False, False)
    with pytest.raises(ZeroDivisionError):
        launch._write(config, tmp_path, result, wall, output)
    assert runs.load(tmp_path).summary["complete"]
    assert (tmp_path / "report.md").exists()


def test_a_page_s_title_is_text(tmp_path):
    assert "<title>a&lt;b&gt; &amp; c</title>" in html.page("# a<b> & c\n", tmp_path)


def test_a_page_without_its_picture_is_an_error(tmp_path):
    with pytest.raises(runs.RunError, match=r"figures/a.png.*scripts/figures.py"):
        html.page("# A run\n\n![A.](figures/a.png)", tmp_path)


def test_one_seed_has_no_interval(tmp_path, config, result):
    config.seeds = 1
    kept = sweep._pick(config, result.kept, np.array([0]))
    result = result._replace(kept=kept)
    run = runs.write_metrics(tmp_path, config, result)
    summary = report.summarise(run, {"compile": 1.0, "run": 2.0})
    assert summary["arms"]["sgd"]["train_loss"]["ci95"] is None
    assert "±" not in report.terminal(summary).split("\n\n", 1)[1]
    run_figures.draw(run._replace(summary=summary), tmp_path / "figures")


def test_csv_has_a_row_per_arm(run):
    rows = report.csv_table(run.summary).splitlines()
    assert len(rows) == 1 + len(ARMS)
    assert rows[0].startswith("arm,train_loss_mean,train_loss_std,")
    assert rows[1].startswith("sgd,2.06")


def test_figures_when_every_seed_diverged(tmp_path, config, result):
    for name, curve in result.kept.curves.items():
        if not name.endswith("bayes_nll"):
            curve[:] = np.nan
    result = result_of(config, result.kept.curves, result.kept.snapshots["attention"])
    run = runs.write_metrics(tmp_path, config, result)
    summary = report.summarise(run, {"compile": 1.0, "run": 2.0})
    assert summary["arms"]["adam"]["train_loss"]["mean"] is None
    assert "none" in report.terminal(summary)
    json.dumps(summary, allow_nan=False)
    run_figures.draw(run._replace(summary=summary), tmp_path / "figures")


def test_band_is_student_s_at_each_point():
    curves = np.random.default_rng(0).normal(size=(5, 3))
    curves[4, 1] = np.nan
    band = figures.band(curves)
    for point in range(3):
        estimate = stats.estimate(curves[:4, point])
        assert band.middle[point] == pytest.approx(estimate.mean)
        assert (band.low[point], band.high[point]) == pytest.approx(estimate.ci95)


def test_staged_moves_everything_or_nothing(tmp_path):
    (tmp_path / "kept").write_text("old")
    with runs.staged(tmp_path) as stage:
        (stage / "figures").mkdir()
        (stage / "figures" / "a").write_text("a")
        (stage / "kept").write_text("new")
        assert (tmp_path / "kept").read_text() == "old"
    assert (tmp_path / "kept").read_text() == "new"
    assert (tmp_path / "figures" / "a").read_text() == "a"

    def fail():
        with runs.staged(tmp_path) as stage:
            (stage / "kept").write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (tmp_path / "kept").read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["figures", "kept"]


def tree(folder):
    """Name -> content of all that is in a folder."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in found}


@pytest.mark.parametrize("killed", [False, True])
def test_what_cannot_be_moved_in_leaves_the_run_before(
    tmp_path, config, monkeypatch, killed
):
    """Whichever step fails; and a summary never stands beside files of another run."""
    names = ("summary.json", "metrics.npz", "figures/a.png", "report.md", "a/b/c")
    gone = ("figures/old.png", "weights.msgpack")
    old = dict.fromkeys((*names[:4], *gone), "old") | {"figures/mine.txt": "mine"}
    new = dict.fromkeys(names, "new") | {"figures/mine.txt": "mine"}
    replace, put_back = os.replace, runs._put_back

    def move(workdir, failing):
        """Returns at which step a run was moved in, if it was."""
        steps = []

        def step(*paths):
            if (workdir / "summary.json").exists():
                seen = {n: t for n, t in tree(workdir).items() if ".writing" not in n}
                assert seen in (old, new)
            steps.append(paths)
            if len(steps) == failing:
                raise OSError(errno.EIO, "Input/output error")
            replace(*paths)

        for name, text in old.items():
            (workdir / name).parent.mkdir(parents=True, exist_ok=True)
            (workdir / name).write_text(text)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", step)
            if killed:
                patch.setattr(runs, "_put_back", lambda *_: None)
            else:  # undone with what works again
                patch.setattr(
                    runs,
                    "_put_back",
                    lambda *a: (patch.setattr(os, "replace", replace), put_back(*a)),
                )
            with runs.staged(workdir, instead_of=[*gone, "none.png"]) as stage:
                for name in names:
                    (stage / name).parent.mkdir(parents=True, exist_ok=True)
                    (stage / name).write_text("new")
        return len(steps)

    count = move(tmp_path / "all", 0)
    for failing in range(1, count + 1):
        workdir = tmp_path / str(failing)
        with pytest.raises(runs.RunError, match="Input/output error"):
            move(workdir, failing)
        if killed:
            with runs.claimed(workdir, None):
                pass
        assert tree(workdir) == old
    with runs.claimed(tmp_path / "all", None):
        pass
    assert tree(tmp_path / "all") == new
    assert not list(tmp_path.rglob(".writing*"))


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("config.json", "a file"),
        ("summary.json", "a file"),
        ("report.md", "a file"),
        ("report.txt", "a file"),
        ("weights.msgpack", "a file"),
        ("figures/curves.png", "a file"),
        ("checkpoints/config.json", "a file"),
        ("checkpoints/10.msgpack", "a file"),
        ("figures", "a folder"),
        ("checkpoints", "a folder"),
    ],
)
def test_claim_refuses_what_is_in_the_way(tmp_path, config, name, needs):
    """Else a run would fail when it is finished."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if needs == "a file":
        path.mkdir()
    else:
        path.write_text("mine")
    with pytest.raises(runs.RunError) as error:
        claim(tmp_path, config)
    said = f"{path} is in the way; allowed: {needs}, or nothing; move"
    assert said in str(error.value)
    assert path.exists()


def test_claim_refuses_a_summary_that_is_none(tmp_path, config):
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(runs.RunError, match=r"its summary\.json is not of a run"):
        claim(tmp_path, config)


def test_what_a_user_put_into_a_run_directory_stays(tmp_path, config):
    mine = (".writing-notes", ".writing-abc/d", "checkpoints/foo.msgpack", "a/.1.new")
    for name in (*mine, "checkpoints/10.msgpack", "checkpoints/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "checkpoints" / "config.json").unlink()
    claim(tmp_path, config)
    assert runs._checkpoints(tmp_path) == [tmp_path / "checkpoints" / "10.msgpack"]
    runs.remove_checkpoints(tmp_path)
    assert tree(tmp_path) == dict.fromkeys(mine, "{}")


@pytest.mark.parametrize("seconds", [math.nan, -1.0])
def test_checkpoints_must_come_due(tmp_path, config, seconds):
    way = launch.Way(1, 1, 0.5, seconds, launch.Output(False, False, False))
    with pytest.raises(config_lib.ConfigError, match=r"^checkpoint_seconds=.* inf for"):
        launch.train(config, tmp_path, way)


def claim(workdir, config):
    with runs.claimed(workdir, config):
        pass


def test_claim_refuses_another_config(tmp_path, config, result):
    with runs.claimed(tmp_path, config), runs.staged(tmp_path) as stage:
        runs.write_metrics(stage, config, result)
    claim(tmp_path, config)
    config.arms.em.value_rate = 0.2
    with pytest.raises(runs.RunError, match=r"differs in arms.em.value_rate\)"):
        claim(tmp_path, config)


@pytest.mark.parametrize(
    "name", ["sticky", "sticky:full", "sticky:frame", "rates", "toy"]
)
def test_the_reference_runs_are_of_the_configs_as_they_are(tmp_path, name):
    """Else the README's commands would be refused in a fresh clone."""
    file, _, variant = name.partition(":")
    config = config_lib.load(f"{CONFIG.with_stem(file)}:{variant}")
    reference = CONFIG.parents[1] / "results" / config.name
    (tmp_path / "config.json").write_bytes((reference / "config.json").read_bytes())
    claim(tmp_path, config)
    summary = runs.load(reference).summary
    assert summary["complete"]
    assert summary["seeds"] == config.seeds >= {"sticky:full": 32}.get(name, 8)
    pictures = {path.name for path in (reference / "figures").iterdir()}
    assert set(PICTURES) <= pictures or name == "rates"


@pytest.mark.parametrize("name", ["bijection", "hmm", "hmm:parts"])
def test_the_wind_tunnels_are_of_the_configs_as_they_are(tmp_path, name):
    name, _, variant = name.partition(":")
    config = config_lib.load(f"{CONFIG.with_stem(name)}:{variant}")
    reference = CONFIG.parents[1] / "results" / config.name
    (tmp_path / "config.json").write_bytes((reference / "config.json").read_bytes())
    claim(tmp_path, config)
    found = runs.load(reference)
    assert found.summary["complete"]
    assert found.summary["seeds"] == config.seeds
    if variant:
        return
    assert config.seeds >= 6  # or medians have no interval
    # What is promised of the transformer, and of an MLP of its size.
    kl = {a: e["heldout_kl_bits"]["mean"] for a, e in found.summary["arms"].items()}
    assert kl["transformer"] < {"bijection": 0.005, "hmm": 0.01}[name]
    assert name == "hmm" or kl["mlp"] > 20 * kl["transformer"]


def test_a_metric_is_selected_by_names(run):
    kl = run.metrics["heldout_kl"]
    np.testing.assert_array_equal(run.select("heldout_kl"), kl)
    np.testing.assert_array_equal(
        run.select("heldout_kl", eval=100, arm="em"), kl[1, :, 2]
    )
    assert run.select("diverged_step", arm="adam", seed=3) == 100
    assert run.select("attention", snapshot_step=0).shape == (3, 1, 6, 6)
    assert run.select("attention_allowed", query=2).sum() == 3
    for name, where, message in (
        ("kl", {}, "metric='kl': not in run .*; allowed: step, "),
        ("accuracy", {"step": 100}, "axis='step': not in .*; allowed: arm, seed, eval"),
        ("accuracy", {"eval": 60}, "eval='60': not in run .*; allowed: 0, 50, 100"),
        ("attention", {"query": 6}, "query='6': not in run .*; allowed: 0, 1, 2, 3"),
    ):
        with pytest.raises(runs.RunError, match=message):
            run.select(name, **where)


def test_a_frame_has_every_number_once(run):
    frame = run.to_frame()
    assert list(frame.columns) == ["arm", "seed", "step", "metric", "value"]
    names = (*one_head.METRICS, *trajectory.CURVES)
    assert len(frame) == sum(run.metrics[name].size for name in names)
    row = frame.query(
        "arm == 'em' and seed == 2 and step == 50 and metric == 'accuracy'"
    )
    assert row["value"].item() == run.metrics["accuracy"][1, 2, 1]


def test_a_frame_without_pandas_is_one_line(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(runs.RunError, match="needs pandas, which is not installed"):
        run.to_frame()


def test_runs_side_by_side(run):
    text = report.side_by_side([run, run])
    assert text.count("em_") == 0
    assert sum(line.split()[1:2] == ["adam"] for line in text.splitlines()) == 2
    assert "the same config" in text


def test_claim_leaves_no_folder_of_its_own(tmp_path, config):
    claim(tmp_path / "a" / "b", config)
    assert list(tmp_path.iterdir()) == []


def test_claim_refuses_a_folder_that_cannot_be_written(tmp_path, config, monkeypatch):
    (tmp_path / "file").write_text("")
    for name in ("file", "file/run", "x" * 300):
        with pytest.raises(runs.RunError, match="cannot be written"):
            claim(tmp_path / name, config)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(runs.RunError, match=r"cannot be written \(Permission denied"):
        claim(tmp_path / "run", config)


def test_claim_refuses_a_folder_where_a_run_is_at_work(tmp_path, config):
    with (
        runs.claimed(tmp_path, config),
        pytest.raises(runs.RunError, match="another run is at work"),
    ):
        claim(tmp_path, config)
    claim(tmp_path, config)


def test_claim_refuses_what_it_cannot_read(tmp_path, config):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(runs.RunError, match=r"its config.json is not of a run"):
        claim(tmp_path, config)


def test_claim_clears_away_what_a_killed_run_was_writing(tmp_path, config):
    (tmp_path / ".writing-abc_1234").mkdir()
    (tmp_path / ".writing-abc_1234" / "metrics.npz").write_text("half")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".20.msgpack.new").write_text("half")
    claim(tmp_path, config)
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoints"]


def test_load_refuses_what_is_not_a_run(tmp_path):
    with pytest.raises(runs.RunError, match="not a run directory"):
        runs.load(tmp_path)
    for name in ("config.json", "metrics.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "metrics.npz").write_bytes(b"PK half an archive")
    with pytest.raises(runs.RunError, match="not a run directory"):
        runs.load(tmp_path)


WRONG = ({}, [], None, [1], 3, "x", True)


def read_all(path):
    run = runs.load_finished(path)
    report.side_by_side([run, run])
    launch.redraw(path, launch.Output(figures=False, pdf=False, html=False))


@pytest.mark.parametrize("name", ["config.json", "metrics.json", "summary.json"])
def test_a_damaged_file_of_a_run_is_one_line(run, name):
    """Nothing else is raised, whatever is in it, and at which place."""
    runs.write_summary(run.path, run.summary)
    whole = (run.path / name).read_text()
    content = json.loads(whole)
    said = rf"its {name} is not of a run"
    texts = [*map(json.dumps, WRONG), "", whole[: len(whole) // 2], "[" * 100_000]
    for text in (*texts, "NaN", "\xff"):
        (run.path / name).write_text(text, "latin1")
        with pytest.raises(runs.RunError, match=said) as error:
            read_all(run.path)
        assert "\n" not in str(error.value)
    inner = {"config.json": "config", "metrics.json": "axes", "summary.json": "arms"}
    places = [content, content[inner[name]]]
    for place in places:
        for key in list(place)[:12]:
            kept = place.pop(key)
            for wrong in (None, *WRONG):
                if wrong is not None:
                    place[key] = wrong
                (run.path / name).write_text(json.dumps(content))
                with contextlib.suppress(runs.RunError):  # some fields nobody reads
                    runs.load_finished(run.path)
                    report.side_by_side([runs.load_finished(run.path), run])
            place[key] = kept


def test_a_config_that_no_run_can_have_is_one_line(run):
    runs.write_summary(run.path, run.summary)
    whole = json.loads((run.path / "config.json").read_text())
    for field, value in (
        ("diagnostics_length", "long"),
        ("task", {"name": "toy"}),
        ("task", {"name": "none"}),
    ):
        changed = whole | {"config": whole["config"] | {field: value}}
        (run.path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(runs.RunError, match=rf"cannot be of a run .*{field}"):
            read_all(run.path)


def test_files_of_different_runs_are_not_a_run(run):
    metrics = run.path / "metrics.json"
    axes = json.loads(metrics.read_text())
    for change, said in (
        ({"arm": ["sgd", "adam", "em"]}, "config.json and metrics.json differ in run"),
        ({"seed": [0, 1]}, "metrics.npz and metrics.json differ in "),
        ({"eval": [0, 50, 90]}, "config.json and metrics.json differ in steps"),
    ):
        changed = axes | {"coordinates": axes["coordinates"] | change}
        metrics.write_text(json.dumps(changed))
        with pytest.raises(runs.RunError, match=f"of different runs .{said}"):
            runs.load(run.path)


def test_damaged_metrics_are_one_line(run):
    path = run.path / "metrics.npz"
    content = path.read_bytes()
    size = len(content)
    for length in (0, 1, 4, 21, 22, 100, size // 2, size - 30, size - 1):
        for text in (content[:length], content[:length] + bytes(size - length)):
            path.write_bytes(text)
            if text != content:
                with pytest.raises(runs.RunError, match="not a run directory") as error:
                    runs.load(run.path)
                assert "\n" not in str(error.value)
    np.save(run.path / "one.npy", np.zeros(3))
    os.replace(run.path / "one.npy", path)
    with pytest.raises(runs.RunError, match="not a run directory"):
        runs.load(run.path)


@pytest.fixture(scope="module")
def program():
    config = config_lib.load(f"{CONFIG}:smoke")
    config.update({"seeds": 3, "run_arms": ("em",)})
    plan = sweep.plan(config, jax.devices()[:1], workers=2)
    return sweep.build(config, plan)


def checkpoints(workdir):
    return sorted(path.name for path in (workdir / "checkpoints").iterdir())


def save(workdir, program, carry, seconds=12.5):
    whole = sweep.collect(program, carry)
    runs.save_checkpoint(workdir, program.config, whole, seconds)


def test_checkpoint_comes_back_as_it_was(tmp_path, program):
    assert runs.read_checkpoint(tmp_path) == b""
    assert runs.resumed(program, b"") == (sweep.start(), 0.0)
    carry = sweep.start()
    for _ in range(3):
        carry = sweep.advance(program, carry)
        save(tmp_path, program, carry)
    save(tmp_path, program, carry)
    # 2 seeds after 5 and 10 steps.
    assert checkpoints(tmp_path) == ["10.msgpack", "20.msgpack", "config.json"]
    restored, seconds = runs.resumed(program, runs.read_checkpoint(tmp_path))
    assert seconds == 12.5
    jax.tree.map(np.testing.assert_array_equal, restored, carry)
    assert jax.tree.structure(restored) == jax.tree.structure(carry)


def test_checkpoint_of_a_run_with_finished_seeds(tmp_path, program):
    carry = sweep.start()
    while not carry.done:
        carry = sweep.advance(program, carry)
    save(tmp_path, program, carry)
    restored, _ = runs.resumed(program, runs.read_checkpoint(tmp_path))
    jax.tree.map(np.testing.assert_array_equal, restored, carry)


def test_checkpoint_of_another_config_code_or_version_is_refused(tmp_path, program):
    config = program.config
    save(tmp_path, program, sweep.advance(program, sweep.start()))
    claim(tmp_path, config)
    before = checkpoints(tmp_path)
    other = config.copy_and_resolve_references()
    other.steps = 99
    with pytest.raises(
        runs.RunError, match=r"unfinished .*\(differs in config.steps\)"
    ):
        claim(tmp_path, other)
    described = tmp_path / "checkpoints" / "config.json"
    kept = json.loads(described.read_text())
    for change, refused in (
        ({"code": "0" * 16}, "code"),
        ({"versions": kept["versions"] | {"jax": "9.0"}}, "versions.jax"),
        ({"versions": kept["versions"] | {"python": "2.7"}}, "versions.python"),
        ({"device": kept["device"] | {"kind": "TPU"}}, "device.kind"),
        ({"device": kept["device"] | {"count": 99}, "processes": 8}, None),
        ({"git_commit": "of another README"}, None),
    ):
        described.write_text(json.dumps(kept | change))
        if refused is None:
            claim(tmp_path, config)
        else:
            with pytest.raises(runs.RunError, match=rf"\(differs in {refused}\)"):
                claim(tmp_path, config)
    assert checkpoints(tmp_path) == before


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "gone"])
def test_damaged_checkpoint_is_an_error_that_says_what_to_do(tmp_path, program, damage):
    save(tmp_path, program, sweep.advance(program, sweep.start()))
    (path,) = (tmp_path / "checkpoints").glob("*.msgpack")
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
        path.mkdir()
    else:
        content[len(content) // 2] ^= 1
        size = {"cut": len(content) - 1, "empty": 0, "flipped": len(content)}[damage]
        path.write_bytes(content[:size])
    with pytest.raises(runs.RunError) as error:
        runs.read_checkpoint(tmp_path)
    assert "its checkpoint is damaged" in str(error.value)
    assert f"or to remove {path}, to go on from the one" in str(error.value)
    assert path.exists()


def test_the_checkpoint_before_a_damaged_one_is_there(tmp_path, program):
    carry = sweep.advance(program, sweep.start())
    save(tmp_path, program, carry)
    save(tmp_path, program, sweep.advance(program, carry))
    (tmp_path / "checkpoints" / "10.msgpack").unlink()
    restored, _ = runs.resumed(program, runs.read_checkpoint(tmp_path))
    jax.tree.map(np.testing.assert_array_equal, restored, carry)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, program, monkeypatch):
    carry = sweep.advance(program, sweep.start())
    save(tmp_path, program, carry)
    before = checkpoints(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        runs.RunError, match=r"\(No space left on device\); allowed: to"
    ):
        save(tmp_path, program, sweep.advance(program, carry))
    assert checkpoints(tmp_path) == before
    restored, _ = runs.resumed(program, runs.read_checkpoint(tmp_path))
    jax.tree.map(np.testing.assert_array_equal, restored, carry)


def test_a_full_disk_leaves_the_run_before(tmp_path):
    (tmp_path / "summary.json").write_text("old")

    def fill():
        with runs.staged(tmp_path) as stage:
            (stage / "summary.json").write_text("new")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(runs.RunError, match="No space left on device"):
        fill()
    assert (tmp_path / "summary.json").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_way_to_bayes_where_bayes_is_no_better_than_chance():
    final = {
        "heldout_loss": np.array([0.68, 0.70, 0.68, 0.70, 0.6, 0.5]),
        "heldout_bayes_nll": np.array([0.7, 0.7, 0.693, 0.693, 0.5, 0.5]),
    }
    way = report.way_to_bayes(final, 0.693)
    np.testing.assert_allclose(way[[4, 5]], [0.093 / 0.193, 1.0])
    assert (way[[0, 2]] > 0).all()
    assert (way[[1, 3]] < 0).all()


def test_below_bayes_on_fresh_sequences_is_judged_on_average():
    lucky = np.array([[0.0, 0.1, -0.01, 0.1]])
    assert report.beats_bayes(lucky, fresh=False)[0]
    assert not report.beats_bayes(lucky, fresh=True)[0]
    assert report.beats_bayes(lucky - 0.1, fresh=True)[0]
