"""JSON files of a run: written strictly, and read with a check of their shape."""

import math

import pytest

from jaxattn.runs import RunError, json_files


@pytest.mark.parametrize(
    ("value", "shape", "said"),
    [
        (1, int, ""),
        (True, int, "it is a bool"),
        (None, (type(None), int), ""),
        ("x", (type(None), int), "it is a str"),
        ({"a": 1, "b": 2}, {"a": int}, ""),
        ({}, {"a": int}, "it has no 'a'"),
        ([], {"a": int}, "it is a list"),
        ({"a": 1, "b": "x"}, {"a": int, ...: int}, "b is a str"),
        ({"a": 1}, {...: frozenset()}, "a is 1"),
        ([1, 2, 3], [int], ""),
        ([1, "x"], [int], "it[1] is a str"),
        ([1, 2], [int, int], ""),
        ([1], [int, int], "it has 1 entries"),
        ({"a": [{"b": []}]}, {"a": [{"b": [int, str]}]}, "b has 0 entries"),
        (3, range(1, 5), ""),
        (5, range(1, 5), "it is 5"),
        (1.0, range(1, 5), "it is 1.0"),
        ("less", frozenset({"less"}), ""),
        (["less"], frozenset({"less"}), "it is ['less']"),
    ],
)
def test_misfit_names_what_has_another_shape(value, shape, said):
    assert json_files.misfit(value, shape) == said


def test_differing_fields_are_named_by_their_place():
    held = {"a": 1, "b": {"c": 1, "d": 2}, "e": {}}
    wanted = {"a": 1, "b": {"c": 2, "d": 2}, "f": 0}
    assert json_files.differing(held, wanted) == ["b.c", "e", "f"]
    assert json_files.differing(held, held) == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_neither_written_nor_read(tmp_path, value):
    with pytest.raises(ValueError, match="JSON"):
        json_files.as_json({"a": value})
    (tmp_path / "a.json").write_text(f'{{"a": {"NaN" if value != value else value}}}')
    with pytest.raises(RunError, match=r"its a\.json is not of a run"):
        json_files.read_json(tmp_path / "a.json", {"a": float})


def test_what_is_written_is_read_back(tmp_path):
    content = {"a": [1, 0.1, None], "β": {"c": "d\n"}}
    json_files.write_json(tmp_path / "a.json", content)
    assert json_files.read_json(tmp_path / "a.json", {}) == content
    with pytest.raises(RunError, match=r"b\.json .*not a run directory: No such file"):
        json_files.read_json(tmp_path / "b.json", {})
