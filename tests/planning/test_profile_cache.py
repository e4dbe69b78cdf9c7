"""The cache of profiles: what changes its keys, and what does it no harm."""

from __future__ import annotations

import threading
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times
from lightning_hetpipe.planning.plan.profile_file import ProfileCache, cache_folder, key_of

CONDITIONS: dict[str, Any] = {
    "layers": [("net.0", "linear"), ("net.1", "relu")],
    "parameters": [("net.0.weight", (3, 4), "float32")],
    "inputs": [((8, 4), "float32")],
    "precision": "32-true",
    "torch": "2.13.0",
    "device": "cpu",
    "settings": {"threads": "1"},
}
OTHERS: dict[str, Any] = {
    "layers": [("net.0", "linear"), ("net.1", "gelu")],
    "parameters": [("net.0.weight", (3, 5), "float32")],
    "inputs": [((9, 4), "float32")],
    "precision": "bf16-mixed",
    "torch": "2.13.1",
    "device": "RTX-3090",
    "settings": {"threads": "2"},
}


def profile(samples: int = 1) -> Profile:
    return Profile("m", samples, [LayerBytes("a", 1, 2, 3)] * 50, {"cpu": [Times(1, 2, 3)] * 50}, {})


@pytest.mark.parametrize("name", CONDITIONS)
def test_each_condition_changes_the_key(name: str) -> None:
    assert key_of({**CONDITIONS, name: OTHERS[name]}) != key_of(CONDITIONS)


def test_the_key_is_the_same_in_any_process() -> None:
    """A known one, as hashes of Python's own differ from process to process; how settings are ordered is no matter."""
    assert key_of(CONDITIONS) == "862abeadf45626e6580bb3abd69a2ffb8b0fbaed"
    one, other = {"a": "1", "b": "2"}, {"b": "2", "a": "1"}
    assert key_of({**CONDITIONS, "settings": one}) == key_of({**CONDITIONS, "settings": other})


def test_what_was_put_is_got(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path / "new")
    assert cache.get("key") is None
    cache.put("key", profile())
    assert ProfileCache(tmp_path / "new").get("key") == profile()
    assert cache.get("other") is None


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b"[]", b'{"schema_version": 99}'])
def test_a_damaged_entry_is_ignored_and_replaced(tmp_path: Path, damage: bytes) -> None:
    cache = ProfileCache(tmp_path)
    (tmp_path / "key.json").write_bytes(damage)
    assert cache.get("key") is None
    cache.put("key", profile())
    assert cache.get("key") == profile()


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = ProfileCache(tmp_path / "file")
    cache.put("key", profile())
    assert cache.get("key") is None


def test_writers_at_once_leave_one_whole_entry(tmp_path: Path) -> None:
    """Two threads write each their own, while a third reads: it sees one or the other, never a part."""
    start, seen = threading.Barrier(3, timeout=30), []

    def writes(samples: int) -> None:
        start.wait()
        for _ in range(20):
            ProfileCache(tmp_path).put("key", profile(samples))

    writers = [threading.Thread(target=writes, args=[samples]) for samples in (1, 2)]
    ProfileCache(tmp_path).put("key", profile(1))
    for writer in writers:
        writer.start()
    start.wait()
    while any(writer.is_alive() for writer in writers):
        seen.append(ProfileCache(tmp_path).get("key"))
    for writer in writers:
        writer.join(30)
    assert all(each in (profile(1), profile(2)) for each in seen)
    assert [path.name for path in tmp_path.iterdir()] == ["key.json"]


@pytest.mark.parametrize(
    ("environment", "platform", "folder"),
    [
        ({"HETPIPE_CACHE": "/h", "XDG_CACHE_HOME": "/x"}, "linux", "/h/profiles"),
        ({"XDG_CACHE_HOME": "/x"}, "linux", "/x/lightning_hetpipe/profiles"),
        ({}, "linux", "HOME/.cache/lightning_hetpipe/profiles"),
        ({}, "darwin", "HOME/Library/Caches/lightning_hetpipe/profiles"),
        ({"LOCALAPPDATA": "/local"}, "win32", "/local/lightning_hetpipe/profiles"),
    ],
)
def test_where_it_is(environment: dict[str, str], platform: str, folder: str) -> None:
    assert PurePosixPath(cache_folder(environment, platform)) == PurePosixPath(folder.replace("HOME", str(Path.home())))
