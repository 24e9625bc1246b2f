"""Tables, figures and page in a run directory."""

import json
import re
from pathlib import Path

import pytest
from made_up import path_of

from jaxattn import runs
from jaxattn.runs import directory, write
from jaxattn.views import head_figures, html, publish, tables

PICTURES = [
    *("curves.png", "final.png", "arrival.png", "frame.png", "diagnostics.png"),
    *("gate.png", "attention.png", "advantage.png", "values.png", "usage.png"),
    "motion.gif",
]


def test_a_run_is_drawn_again_from_its_directory(run):
    write.write_summary(path_of(run), run.attrs["summary"])
    before = {p.name: p.read_bytes() for p in path_of(run).iterdir() if p.is_file()}
    written = publish.draw(
        path_of(run), publish.Output(figures=True, pdf=True, html=True)
    )
    names = {str(path.relative_to(path_of(run))) for path in written}
    tables = {"report.html", "report.md", "summary.csv", "summary.json"}
    pictures = {f"figures/{name}" for name in PICTURES}
    vector = {name.replace(".png", ".pdf") for name in pictures if "png" in name}
    assert names == pictures | vector | tables
    assert all((path_of(run) / name).stat().st_size > 2000 for name in names)
    after = {p.name: p.read_bytes() for p in path_of(run).iterdir() if p.is_file()}
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
        ["values_fast", "1,234,567", words, "**-0.027±0.015**"],
        ["a|b", "158,336", "short", "reversed (0.25 [0.25, 0.333])"],
    ]
    page = html.page(f"# run\n\n{tables.markdown_table(rows)}\n", tmp_path)
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

    monkeypatch.setattr(head_figures, "draw", draw)
    publish.draw(path_of(run), publish.Output())
    return {p.name: p.is_dir() or p.read_bytes() for p in figures_of(run).iterdir()}


def figures_of(run):
    return path_of(run) / "figures"


def test_of_the_figures_those_go_that_were_drawn_here_and_are_no_more(run, monkeypatch):
    """And a page that is there is written anew. What a user put there stays."""
    write.write_summary(path_of(run), run.attrs["summary"])
    draw_again(run, monkeypatch, "curves.png", "gap.png")
    (figures_of(run) / "notes.txt").write_bytes(b"mine")
    (figures_of(run) / "mine.png").write_bytes(b"mine")
    (figures_of(run) / "talk").mkdir()
    (path_of(run) / "report.html").write_text("old")
    mine = {"notes.txt": b"mine", "mine.png": b"mine", "talk": True}
    found = draw_again(run, monkeypatch, "curves.png", "final.png")
    assert found == {"curves.png": b"new", "final.png": b"new"} | mine
    assert "data:image/png" in (path_of(run) / "report.html").read_text()
    (figures_of(run) / "gap.png").write_bytes(b"mine")
    with pytest.raises(runs.RunError, match=r"gap.png is not one that was drawn here"):
        draw_again(run, monkeypatch, "curves.png", "gap.png")
    assert (figures_of(run) / "gap.png").read_bytes() == b"mine"
    listed = runs.load_finished(path_of(run)).attrs["summary"]["figures"]
    assert listed == ["curves.png", "final.png"]
    (path_of(run) / "summary.json").unlink()
    with pytest.raises(runs.RunError, match="not finished"):
        publish.draw(path_of(run), publish.Output())


def test_of_figures_that_are_not_listed_none_goes(run, monkeypatch):
    """As in a run of before they were: those drawn anew are replaced."""
    write.write_summary(path_of(run), run.attrs["summary"])
    figures_of(run).mkdir()
    for name in ("curves.png", "old.png"):
        (figures_of(run) / name).write_bytes(b"old")
    found = draw_again(run, monkeypatch, "curves.png")
    assert found == {"curves.png": b"new", "old.png": b"old"}
    write.write_summary(
        path_of(run), run.attrs["summary"] | {"figures": ["../config.json"]}
    )
    with pytest.raises(runs.RunError, match="other names than of pictures"):
        draw_again(run, monkeypatch, "curves.png")


def test_a_run_that_cannot_be_drawn_keeps_its_tables(run, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(head_figures, "draw", fail)
    with directory.staged(path_of(run)) as stage:
        publish.tables(stage, run)
    with pytest.raises(ZeroDivisionError):
        publish.draw(path_of(run))
    assert runs.load(path_of(run)).attrs["summary"]["complete"]
    assert (path_of(run) / "report.md").exists()


def test_a_page_s_title_is_text(tmp_path):
    assert "<title>a&lt;b&gt; &amp; c</title>" in html.page("# a<b> & c\n", tmp_path)


def test_a_page_without_its_picture_is_an_error(tmp_path):
    with pytest.raises(runs.RunError, match=r"figures/a.png.*scripts/figures.py"):
        html.page("# A run\n\n![A.](figures/a.png)", tmp_path)
