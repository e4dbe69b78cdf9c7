"""Sentences for the person at the terminal, from any process of a launch."""

from __future__ import annotations

import contextlib
import sys

NOTICE_AFTER = 15.0
"""Seconds after which a person is told of a wait for other processes."""


def say(sentence: str) -> None:
    """Print a sentence for the person at the terminal."""
    with contextlib.suppress(OSError):
        print(f"hetpipe: {sentence}.", file=sys.stderr, flush=True)
