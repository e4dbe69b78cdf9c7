"""What a console script is called, and what it reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """A console script.

    Attributes:
        name: As it is called.
        read: What stands at the top of its configuration and is read there.
        plain: Of that, what is a value, not a group of files to choose from.
    """

    name: str
    read: tuple[str, ...]
    plain: frozenset[str]


TRAIN = Program(
    "hetpipe-train",
    ("model", "data", "trainer", "strategy", "cluster", "seed", "test", "ckpt_path", "output_dir"),
    frozenset({"seed", "test", "ckpt_path", "output_dir"}),
)

_PLANS = ("profile", "devices", "link", "optimizer", "ordered", "synchronise", "precision", "seed", "output_dir")

PLAN = Program("hetpipe-plan", (*_PLANS, "cluster", "model", "data", "trainer", "strategy"), frozenset(_PLANS))
