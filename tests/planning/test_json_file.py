"""JSON files are read with errors that say where, and written whole or not at all."""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.plan.json_file import plain, read, write
from lightning_hetpipe.settings import Bounds, Key


@dataclass(frozen=True)
class Stage:
    time: Annotated[float, Bounds(0), Key("time_s")]
    name: str = "a"


@dataclass(frozen=True)
class Stages:
    stages: tuple[Stage, ...]


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    stages = Stages((Stage(1.0), Stage(2.5, "b")))
    write(tmp_path / "a.json", {"schema_version": 3, **plain(stages)})
    assert json.loads((tmp_path / "a.json").read_text())["stages"] == [{"time_s": 1.0}, {"time_s": 2.5, "name": "b"}]
    assert read(tmp_path / "a.json", Stages, 3) == stages
    with pytest.raises(SettingError, match=r"a\.json: schema_version=3 must be 2 for this release; make it anew"):
        read(tmp_path / "a.json", Stages, 2)


@pytest.mark.parametrize("version", [True, 1.0, "1", None])
def test_a_version_is_a_whole_number(tmp_path: Path, version: object) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"schema_version": version, "stages": []}))
    with pytest.raises(SettingError, match=rf"schema_version={json.dumps(version)} must be 1"):
        read(tmp_path / "a.json", Stages, 1)


@pytest.mark.parametrize("value", [True, None, "1", float("nan"), float("inf"), -1, "", [1], 10**400])
def test_a_value_knows_where_it_stands(tmp_path: Path, value: object) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"stages": [{"time_s": value}]}))
    with pytest.raises(SettingError, match=r"a\.json: stages\[0\]\.time_s=.* must be a number of at least 0"):
        read(tmp_path / "a.json", Stages)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({}, "a.json: stages is missing, the file needs it"),
        ({"zzz": 3}, "a.json: zzz is not a setting, and the file has stages"),
        ({"stages": [{"time": 1}]}, "a.json: stages[0].time is not a setting; did you mean stages[0].time_s?"),
        ({"stages": 3}, "a.json: stages=3 must be [a mapping of time_s, name, ...]"),
    ],
)
def test_keys_are_those_that_are_declared(tmp_path: Path, value: object, says: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps(value))
    with pytest.raises(SettingError, match=re.escape(says)):
        read(tmp_path / "a.json", Stages)


@pytest.mark.parametrize(
    ("text", "says"),
    [("[1]", r"the file=\[1\] must be a mapping"), ("{", "is no JSON"), ("[" * 100_000, "is no JSON")],
)
def test_what_is_no_object(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(SettingError, match=says):
        read(tmp_path / "a.json", Stages)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"no\.json cannot be read \(No such file or directory\)"):
        read(tmp_path / "no.json", Stages)


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
