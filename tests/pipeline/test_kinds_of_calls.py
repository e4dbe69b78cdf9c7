"""Kinds of calls that a segment remembers, of which there are not too many."""

from __future__ import annotations

import pytest

from lightning_hetpipe.pipeline import compilation
from lightning_hetpipe.pipeline.compilation import KindsOfCalls


def test_one_that_is_known_makes_none_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "REMEMBERED", 2)
    kinds = KindsOfCalls()
    for kind in ("one", "two", "two"):
        kinds.computed(kind)
    assert not kinds.is_new("one")
    kinds.computed("three")
    assert [kinds.is_new(kind) for kind in ("one", "two", "three")] == [True, True, False]
