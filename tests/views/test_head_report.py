"""The report of a run of one head."""

import json
import platform

import numpy as np
from fake_runs import write_run
from made_up import ARMS, WALL, path_of

from jaxattn import views
from jaxattn.analysis import entries, head
from jaxattn.measures import trajectory
from jaxattn.views import head_figures, head_report, sections, tables


def test_report_fits_a_terminal_and_says_it_all(run):
    text = head_report.terminal(run.attrs["summary"])
    assert max(map(len, text.splitlines())) <= 80
    for needed in (*ARMS, "chance 2.079", "≥2x [1, ∞]", "50 (7/8)", "diverged in 1 of"):
        assert needed in text
    markdown = head_report.markdown(
        run.attrs["summary"], {"figures/curves.png": "Read it so."}
    )
    for needed in (
        *(
            "| values_fast ",
            "![curves.png](figures/curves.png)\n\nRead it so.",
            "## Flags",
            "-0.060±0.000",
        ),
        *("## The paper's three observations", "## Frame and precision"),
        "## What each arm did, beside sgd",
    ):
        assert needed in markdown
    assert "Pictures" not in head_report.markdown(run.attrs["summary"], {})


def test_the_report_says_what_it_was_trained_with(run):
    versions = run.attrs["record"]["versions"]
    line = (
        f"Trained with jaxattn {versions['jaxattn']}, jax {versions['jax']},"
        f" Python {platform.python_version()}, on cpu"
    )
    assert line in head_report.terminal(run.attrs["summary"]).splitlines()
    assert f"{line}: other versions round otherwise" in head_report.markdown(
        run.attrs["summary"], {}
    )
    # Of runs before it was written down, what is known.
    older = run.attrs["record"] | {"versions": {"jaxattn": "0.1.0", "jax": "0.10.2"}}
    found = entries.trained_with(run.assign_attrs(record=older))
    assert found == "jaxattn 0.1.0, jax 0.10.2, on cpu"


def test_a_flag_of_several_arms_is_said_once(run):
    arms = run.attrs["summary"]["arms"]
    for arm in ("sgd", "values_fast"):
        arms[arm]["flags"] = ["not left chance in 8 of 8 seeds"]
    lines = sections.flag_lines(run.attrs["summary"])
    assert lines[0] == "sgd, values_fast: not left chance in 8 of 8 seeds"
    assert [line.split(":")[0] for line in lines[1:]] == ["adam"] * (len(lines) - 1)


def test_one_seed_has_no_interval(tmp_path, config, made):
    config.seeds = 1
    one = {name: curve[:, :1] for name, curve in made.curves.items()}
    run = write_run(tmp_path, config, one, made.maps)
    summary = head.summarise(run, WALL)
    assert summary["arms"]["sgd"]["train_loss"]["ci95"] is None
    assert "±" not in head_report.terminal(summary).split("\n\n", 1)[1]
    head_figures.draw(run.assign_attrs(summary=summary), tmp_path / "figures")


def test_csv_has_a_row_per_arm(run):
    rows = tables.csv_table(run.attrs["summary"]).splitlines()
    assert len(rows) == 1 + len(ARMS)
    assert rows[0].startswith("arm,train_loss_mean,train_loss_std,")
    assert rows[1].startswith("sgd,2.06")


def test_figures_when_every_seed_diverged(tmp_path, config, made):
    for name, curve in made.curves.items():
        if not name.endswith("bayes_nll"):
            curve[:] = np.nan
    run = write_run(tmp_path, config, *made)
    summary = head.summarise(run, WALL)
    assert summary["arms"]["adam"]["train_loss"]["mean"] is None
    assert "none" in head_report.terminal(summary)
    json.dumps(summary, allow_nan=False)
    head_figures.draw(run.assign_attrs(summary=summary), tmp_path / "figures")


def test_runs_side_by_side(run):
    text = views.side_by_side([run, run])
    assert text.count("em_") == 0
    assert sum(line.split()[1:2] == ["adam"] for line in text.splitlines()) == 2
    assert "the same config" in text


def test_a_run_of_before_there_was_so_much_to_see_is_still_drawn(run):
    """Its curves and tables; of what it did not keep nothing."""
    names = (*trajectory.CURVES, *trajectory.TRAITS, *trajectory.SNAPSHOTS)
    old = run.drop_vars([name for name in run if name in names])
    old = old.assign_attrs(summary=head.summarise(old, WALL))
    assert old.attrs["summary"]["observations"] is None
    drawn = head_figures.draw(old, path_of(run) / "old")
    assert list(drawn) == ["curves.png", "final.png", "arrival.png"]
    assert "Frame" not in head_report.markdown(old.attrs["summary"], drawn)
