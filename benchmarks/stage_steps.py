"""Optimizer steps by stages against whole steps, for two stages of a GPT of width 192, by turns in one process."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.training_task import OptimizerName, Task
from benchmarks.turns import Pair, Turns

PERIOD = 10
"""Steps between two preconditionings of SOAP. Windows are whole periods."""

WHOLE = Task(
    "strategy",
    model="gpt",
    layers=4,
    width=192,
    batch=4,
    in_flight=3,
    weights="stash",
    stage_steps=False,
    warmup=PERIOD,
    steps=2 * PERIOD,
    tail=4,
    turns=4,
)


def pair(label: str, optimizer: OptimizerName) -> Pair:
    """Whole steps of ``optimizer``, and steps by stages."""
    whole = replace(WHOLE, optimizer=optimizer)
    return Pair(label, whole, replace(whole, stage_steps=True))


ONE_THREAD = replace(WHOLE, variant="plain", optimizer="soap", stage_steps=None)

STAGE_STEPS = Turns(
    "stage_steps",
    "two stages that step their own weights against whole steps",
    [
        pair("a SOAP", "soap"),
        pair("b Muon", "muon"),
        pair("c AdamW", "adamw"),
        Pair("d SOAP, over a plain Trainer's one thread", ONE_THREAD, pair("", "soap").on, 1.55),
    ],
    "speed of steps by stages over whole steps",
    1.1,
)
