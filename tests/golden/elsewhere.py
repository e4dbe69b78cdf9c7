"""Places that only a longer run reaches, by the test that has the sentence."""

from __future__ import annotations

ELSEWHERE: dict[str, tuple[str, ...]] = {}
