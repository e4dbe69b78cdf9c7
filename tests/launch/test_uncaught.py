"""Which exceptions count as the end of a program, and so are told to the other virtual workers."""

from __future__ import annotations

import sys

import pytest

from lightning_hetpipe.launch.ends import LostWorkers


def test_an_earlier_error_and_one_at_a_prompt_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook, another cell's error was told to the others as what ends this virtual worker."""
    earlier, later = ValueError("of another cell"), ValueError("at the end")
    monkeypatch.setattr(sys, "last_value", earlier, raising=False)
    monkeypatch.delattr(sys, "ps1", raising=False)
    lost_workers = LostWorkers()
    lost_workers.watch()
    seen = [lost_workers.uncaught]
    monkeypatch.setattr(sys, "last_value", later)
    seen.append(lost_workers.uncaught)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    seen.append(lost_workers.uncaught)
    assert seen == [None, later, None]
