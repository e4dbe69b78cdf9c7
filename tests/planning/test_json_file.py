"""JSON files are read with errors that say where, and written whole or not at all."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.plan.json_file import Document, write


def test_a_value_knows_where_it_stands(tmp_path: Path) -> None:
    write(tmp_path / "a.json", {"stages": [{"time_s": -1}]})
    document = Document.read(tmp_path / "a.json")
    with pytest.raises(SettingError, match=r"a\.json: stages\[0\]\.time_s is -1 and must be a number, 0 or more"):
        document["stages"].entries()[0]["time_s"].number()
    with pytest.raises(SettingError, match=r"a\.json: the file has no 'stage'"):
        document["stage"]


@pytest.mark.parametrize(
    ("text", "says"),
    [("[1]", r"the file is \[1\] and must be an object"), ("{", "is no JSON"), ("[" * 100_000, "is no JSON")],
)
def test_what_is_no_object(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(SettingError, match=says):
        Document.read(tmp_path / "a.json")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"no\.json cannot be read \(No such file or directory\)"):
        Document.read(tmp_path / "no.json")


@pytest.mark.parametrize("value", [True, None, "1", float("nan"), float("inf"), -1, "", [1]])
def test_numbers_are_numbers(value: object) -> None:
    for read in (Document("f", value).number, Document("f", value).whole):
        with pytest.raises(SettingError, match="f: the file is "):
            read()


def test_a_number_that_is_too_large_for_one() -> None:
    with pytest.raises(SettingError, match=r"f: the file is 1000.* and must be a number, 0 or more"):
        Document("f", 10**400).number()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write(path, {"old": 1})
    with pytest.raises(ValueError, match="Out of range float"):
        write(path, {"new": float("nan")})
    assert json.loads(path.read_text()) == {"old": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_others_may_read_the_file_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "a.json", {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o640
