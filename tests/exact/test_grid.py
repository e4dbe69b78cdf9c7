"""The pipeline equals the oracle for any number of stages and of minibatches in flight (laws L1, L2, L7)."""

from __future__ import annotations

import itertools

import pytest

from tests.exact.pipelines import even
from tests.exact.running import assert_equal, expect, fit
from tests.support.marks import quick
from tests.support.models import ADAMW, MODELS, SGD

STAGES = range(1, 5)
IN_FLIGHT = range(1, 9)
RECIPES = {"sgd": SGD, "adamw": ADAMW}

FULL = list(itertools.product(STAGES, IN_FLIGHT, MODELS, RECIPES))
# Every k with every Nm; in each row and each column of that table every model with every optimizer.
PAIRWISE = [(k, n, list(MODELS)[(k + n) % 3], list(RECIPES)[(k + n // 3) % 2]) for k in STAGES for n in IN_FLIGHT]


def check(stages: int, in_flight: int, model: str, recipe: str, epochs: int, samples: int) -> None:
    make_task, make_loader = MODELS[model]
    task = make_task(RECIPES[recipe])
    loader = make_loader(samples, 3)  # nine batches, so that the pipeline fills for each Nm
    expected = expect(task, loader, in_flight, max_epochs=epochs, stages=stages)
    layers = len(list(task.net.children()))
    assert_equal(expected, fit(task, loader, strategy=even(layers, stages, in_flight), max_epochs=epochs))


@quick(
    "1-3-resnet-sgd",
    "1-7-transformer-adamw",
    "2-1-mlp-sgd",
    "2-4-mlp-adamw",
    "2-6-transformer-sgd",
    "3-2-transformer-adamw",
    "3-7-resnet-adamw",
    "4-5-mlp-adamw",
    "4-8-mlp-sgd",
)
@pytest.mark.parametrize(("stages", "in_flight", "model", "recipe"), PAIRWISE)
def test_pairwise(stages: int, in_flight: int, model: str, recipe: str) -> None:
    samples = 26 if in_flight == 7 else 27  # a smaller last batch has a graph of its own, most of what a case takes
    check(stages, in_flight, model, recipe, epochs=1, samples=samples)


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "in_flight", "model", "recipe"), FULL)
def test_full(stages: int, in_flight: int, model: str, recipe: str) -> None:
    check(stages, in_flight, model, recipe, epochs=2, samples=26)


def test_pairwise_covers_every_pair() -> None:
    for first, second in itertools.combinations(range(4), 2):
        covered = {(case[first], case[second]) for case in PAIRWISE}
        assert covered == {(case[first], case[second]) for case in FULL}
