"""Host cost of a run with one minibatch in flight over a plain Trainer's, by turns in one process."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.training_task import Task
from benchmarks.turns import Pair, Turns

PLAIN = Task("plain", model="gpt", layers=8, width=16, batch=1, adam=True, warmup=30, steps=120, tail=5, turns=8)
"""A GPT whose kernels are short, so that Python is what a minibatch costs."""


def pair(label: str, stages: int) -> Pair:
    """A plain run and a run with so many ``stages``, with one minibatch in flight."""
    return Pair(label, PLAIN, replace(PLAIN, variant="strategy", stages=stages, in_flight=1))


ONE_IN_FLIGHT = Turns(
    "one_in_flight",
    "a GPT of 8 blocks of width 16 with in_flight=1 against a plain Trainer",
    [pair("a one stage", 1), pair("b two stages on one device", 2)],
    "CPU time per minibatch over a plain Trainer's",
    1.05,
    of_cpu=True,
)
