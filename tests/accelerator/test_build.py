"""Tests that need the test accelerator are skipped where it cannot be built, and say why."""

from __future__ import annotations

import pytest
from torch.utils import cpp_extension

from tests.support.accelerator import build


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    reason = build.missing.__wrapped__()
    assert reason == "there is no C++ compiler (no-such-compiler), with which the test accelerator is built"


def test_without_ninja(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: False)
    monkeypatch.setattr(cpp_extension, "get_cxx_compiler", lambda: "sh")
    assert build.missing.__wrapped__() == (
        "there is no ninja, with which the test accelerator is built: pip install ninja"
    )
