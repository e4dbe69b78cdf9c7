"""The oracle at Nm = 1 is Lightning's own Trainer, and at Nm > 1 what it says: a few steps worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests import oracle
from tests.exact.running import assert_equal, expect, fit
from tests.oracle import Recipe
from tests.support.equality import assert_same, difference
from tests.support.marks import quick
from tests.support.models import (
    ADAMW,
    SGD,
    Learner,
    Pieces,
    Task,
    decay,
    images,
    mlp,
    recurring,
    resnet,
    sentences,
    sgd,
    tied_language_model,
    transformer,
    two_groups,
    vectors,
)


@quick(
    *("mlp-sgd", "mlp-adamw", "mlp-two_groups"),
    *("resnet-sgd", "resnet-two_groups", "transformer-adamw", "tied-two_groups", "pieces-adamw"),
)
@pytest.mark.parametrize("recipe", [SGD, ADAMW, Recipe(two_groups)], ids=["sgd", "adamw", "two_groups"])
@pytest.mark.parametrize("name", ["mlp", "resnet", "transformer", "tied", "pieces"])
def test_one_in_flight_is_the_plain_trainer(name: str, recipe: Recipe) -> None:
    cases: dict[str, tuple[Learner, Any]] = {
        "mlp": (mlp(recipe), vectors(22, 4)),
        "resnet": (resnet(recipe), images(14, 4)),
        "transformer": (transformer(recipe, dropout=0), sentences(10, 4)),
        "tied": (tied_language_model(recipe), sentences(10, 4)),
        "pieces": (Pieces(recipe), vectors(22, 4)),
    }
    task, loader = cases[name]
    assert_equal(expect(task, loader, 1), fit(task, loader))


@pytest.mark.parametrize(
    ("options", "settings", "recipe"),
    [
        ({"accumulate": 2}, {"accumulate_grad_batches": 2}, SGD),
        ({"accumulate": 4}, {"accumulate_grad_batches": 4}, ADAMW),
        ({"clip_norm": 0.1}, {"gradient_clip_val": 0.1}, SGD),
        ({"clip_value": 0.01}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, SGD),
        (
            {"clip_norm": 0.2, "accumulate": 3},
            {"gradient_clip_val": 0.2, "accumulate_grad_batches": 3},
            Recipe(two_groups, decay),
        ),
        ({}, {}, Recipe(sgd, decay)),
        ({}, {}, Recipe(two_groups, decay, "epoch")),
        ({"autocast": torch.bfloat16}, {"precision": "bf16-mixed"}, SGD),
    ],
)
def test_options_are_the_plain_trainers(options: dict[str, Any], settings: dict[str, Any], recipe: Recipe) -> None:
    task, loader = mlp(recipe), vectors(22, 4)
    assert_equal(expect(task, loader, 1, **options), fit(task, loader, **settings))


def test_double_precision_is_the_plain_trainers() -> None:
    task = mlp()
    epochs = [[(x.double(), y) for x, y in vectors(22, 4)]] * 2
    expected = expect(mlp_double(task), epochs, 1)
    assert_equal(expected, fit(task, vectors(22, 4), precision="64-true"))


def mlp_double(task: Task) -> Task:
    double = mlp()
    double.load_state_dict(task.state_dict())
    return double.double()


def test_stale_steps_by_hand() -> None:
    # loss = w * x has gradient x whatever w is, and loss = w^2 has gradient 2 w of the version that was used.
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    recipe = Recipe(lambda model: torch.optim.SGD(model.parameters(), lr=0.25))
    run = oracle.train(Square(), lambda model, _: {"loss": model.w.square()}, [[None] * 4, [None] * 2], recipe, 2)
    # p = 1 and 2 use version 0, p = 3 version 1, p = 4 version 2; the second epoch starts empty at version 4.
    versions = [1.0]
    for used in (0, 0, 1, 2, 4, 4):
        versions.append(versions[-1] - 0.25 * 2 * versions[used])
    assert versions[:5] == [1.0, 0.5, 0.0, -0.25, -0.25]
    assert [state.weights["w"].item() for state in run.states] == versions
    assert [loss.item() for loss in run.losses] == [versions[used] ** 2 for used in (0, 0, 1, 2, 4, 4)]


def test_a_restart_empties_the_pipeline() -> None:
    task, loader = mlp(), vectors(24, 4)
    through, restarted = expect(task, loader, 3), expect(task, loader, 3, restarts={2})
    assert_same(through.states[:3], restarted.states[:3])
    # p = 3 would use version 0, and uses 2.
    assert difference(through.losses[2], restarted.losses[2]) is not None


class Number(nn.Module):
    """With the loss (w - x)^2 and the learning rate 1/4, one step halves the distance from w to x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.0, dtype=torch.float64))


def together(data: Any, **options: Any) -> list[list[float]]:
    """The versions of each worker."""
    recipe = Recipe(lambda model: torch.optim.SGD(model.parameters(), lr=0.25))
    options = {"in_flight": 1, "wave": 2, **options}
    runs = oracle.train_together(Number(), lambda model, x: {"loss": (model.w - x).square()}, data, recipe, **options)
    return [[state.weights["w"].item() for state in run.states] for run in runs]


def test_two_workers_by_hand() -> None:
    # Worker 0 goes 0, 8, 12 with x = 16, worker 1 goes 0, -8, -12: the sum of both updates is 0. Then 8, 12 and -16,
    # -24: the sum is 12 - 24 = -12.
    assert together([[[16.0] * 4], [[-16.0] * 2 + [-32.0] * 2]]) == [[0, 8, 0, 8, -12], [0, -8, 0, -16, -12]]
    assert together([[[16.0] * 2], [[-8.0] * 2]], mean=True) == [[0, 8, 3], [0, -4, 3]]


def test_a_worker_with_less_data_waits_at_the_cut() -> None:
    # Worker 1's only wave is a short one, to -4. Then it waits, and takes what the others have at the epoch's end.
    assert together([[[16.0] * 3, [0.0]], [[-8.0], [0.0]]]) == [[0, 8, 8, 12, 0], [0, 12, 0]]


def test_a_cut_within_the_epoch_ends_a_wave_early() -> None:
    # After the first minibatch both hold 8; then comes a wave of two, to 14 and to 2.
    assert together([[[16.0] * 3], [[0.0] * 3]], cuts=[1]) == [[0, 8, 12, 8], [0, 8, 4, 8]]


def test_a_wave_longer_than_the_pipeline_and_stale_gradients() -> None:
    # Nm = 2, W = 3: p = 1 and 2 use version 0, p = 3 version 1, p = 4 version 2, p = 5 version 3, which is merged.
    (alone,) = together([[[16.0] * 5]], in_flight=2, wave=3)
    versions = [0.0]
    for used in (0, 0, 1, 2, 3):
        versions.append(versions[-1] + (16 - versions[used]) / 2)
    assert alone == versions


def test_one_worker_alone_is_the_oracle_but_for_rounding() -> None:
    task, loader = mlp(), vectors(24, 4)
    epochs = [list(loader)] * 2
    alone = expect(task, epochs, 2)
    (run,) = oracle.train_together(task, lambda model, batch: model.compute(batch), [epochs], SGD, 2, 2)
    for a, b in zip(alone.losses, run.losses, strict=True):
        assert torch.allclose(a, b, rtol=1e-4)


def test_dropout_belongs_to_the_minibatch() -> None:
    task, loader = recurring(), vectors(24, 4)
    first, second = expect(task, loader, 3), expect(task, loader, 3)
    assert_same(vars(first), vars(second))
    torch.manual_seed(1)
    assert difference(first.losses, expect(task, loader, 3).losses) is not None


def test_difference_names_the_place() -> None:
    assert_same({"a": [torch.ones(2)]}, {"a": [torch.ones(2)]})
    assert difference({"a": [torch.ones(2)]}, {"a": [torch.zeros(2)]}, "run") == "run['a'][0] differs by up to 1"
    assert difference([1], [2], "run") == "run[0] is 2 instead of 1"
