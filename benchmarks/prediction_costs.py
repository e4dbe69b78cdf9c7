"""Cost of predicted weights: the two-stage MLP with each predicting policy and with stashed weights, by turns."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.training_task import Task
from benchmarks.turns import Pair, Turns
from benchmarks.two_stages import NAME, TASKS

STASHED = replace(TASKS[NAME], variant="strategy", weights="stash", warmup=10, steps=20, tail=6, turns=8)


def pair(label: str, weights: str, stashed: Task) -> Pair:
    """Stashed and predicted weights; ``weights`` names the policy that predicts."""
    return Pair(label, stashed, replace(stashed, weights=weights))


PREDICTION_COSTS = Turns(
    "prediction_costs",
    "two stages of an MLP with predicted weights against weights='stash'",
    [
        pair("a spectrain, SGD with momentum", "spectrain", STASHED),
        pair("b pipeoptim, SGD with momentum", "pipeoptim", STASHED),
        pair("c xpipe, AdamW", "xpipe", replace(STASHED, optimizer="adamw")),
    ],
    "speed with predicted weights over stashed ones",
    0.95,
)
