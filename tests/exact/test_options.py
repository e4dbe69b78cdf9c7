"""Options of the Trainer and the model, on a pipeline: equal to the oracle with the same options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from lightning_hetpipe import HetPipeStrategy
from tests.exact.pipelines import Pinned, even
from tests.exact.running import Recorder, assert_equal, expect, finish, fit
from tests.oracle import Recipe
from tests.support.marks import quick, slow_except
from tests.support.models import (
    ADAMW,
    SGD,
    Task,
    Through,
    convnet,
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
from tests.support.strategies import stashing
from tests.support.trainers import quiet_trainer


def one_cycle(optimizer: torch.optim.Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=30)  # changes the momentum, too


@quick(
    "3-accumulate-accumulate_grad_batches-0",
    "3-accumulate-accumulate_grad_batches-3",
    "3-clip_value-gradient_clip_val,gradient_clip_algorithm-",
    "3-clip_norm,accumulate-gradient_clip_val,accumulate_grad_batches-",
    "3---1",
    "3---2",
)
@pytest.mark.parametrize(
    ("options", "settings", "recipe"),
    [
        ({"accumulate": 2}, {"accumulate_grad_batches": 2}, SGD),
        ({"accumulate": 3}, {"accumulate_grad_batches": 3}, ADAMW),
        ({"accumulate": 4}, {"accumulate_grad_batches": 4}, SGD),  # does not divide the epoch
        ({"accumulate": 50}, {"accumulate_grad_batches": 50}, SGD),  # longer than the epoch
        ({"clip_norm": 0.1}, {"gradient_clip_val": 0.1}, ADAMW),
        ({"clip_value": 0.01}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, SGD),
        (
            {"clip_norm": 0.2, "accumulate": 3},
            {"gradient_clip_val": 0.2, "accumulate_grad_batches": 3},
            Recipe(two_groups, decay),
        ),
        ({}, {}, Recipe(sgd, decay)),
        ({}, {}, Recipe(sgd, one_cycle)),
        ({}, {}, Recipe(two_groups, decay, "epoch")),
    ],
    ids=lambda value: ",".join(map(str, value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("in_flight", [1, 3])
def test_optimization(options: dict[str, Any], settings: dict[str, Any], recipe: Recipe, in_flight: int) -> None:
    task, loader = mlp(recipe), vectors(18, 4)
    expected = expect(task, loader, in_flight, **options)
    assert_equal(expected, fit(task, loader, strategy=even(7, 3, in_flight), **settings))


@quick("2")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_batch_norm_while_accumulating_and_clipping(accumulate: int) -> None:
    task, loader = convnet(ADAMW), images(22, 4)
    expected = expect(task, loader, 4, accumulate=accumulate, clip_norm=0.5, max_epochs=3)
    settings: dict[str, Any] = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5, "max_epochs": 3}
    assert_equal(expected, fit(task, loader, strategy=even(9, 3, 4), **settings))


def test_accumulation_that_changes_with_the_epoch() -> None:
    task, loader = mlp(), vectors(28, 4)
    expected = expect(task, loader, 4, accumulate=[1, 3, 3], max_epochs=3)
    callbacks = [GradientAccumulationScheduler({0: 1, 1: 3})]
    assert_equal(expected, fit(task, loader, callbacks, strategy=even(7, 2, 4), max_epochs=3))


@quick("3-bf16-mixed-dtype0")
@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16), ("64-true", torch.float64)]
)
@pytest.mark.parametrize("in_flight", [1, 3])
def test_precision(precision: Any, dtype: torch.dtype, in_flight: int) -> None:
    # The layers that autocast runs in bfloat16 stand in every stage, and so does one that it keeps in float32.
    task, loader = transformer(ADAMW), sentences(20, 4)
    reference = transformer(ADAMW)
    reference.load_state_dict(task.state_dict())
    autocast = torch.bfloat16 if precision == "bf16-mixed" else None
    expected = expect(reference.to(dtype), loader, in_flight, autocast=autocast)
    assert_equal(expected, fit(task, loader, strategy=even(8, 3, in_flight), precision=precision))


@pytest.mark.parametrize("in_flight", slow_except([1, 3], 3))
def test_double_precision_of_inputs(in_flight: int) -> None:
    task = mlp()
    double = mlp()
    double.load_state_dict(task.state_dict())
    epochs = [[(x.double(), y) for x, y in vectors(22, 4)]] * 2
    expected = expect(double.double(), epochs, in_flight)
    assert_equal(expected, fit(task, vectors(22, 4), strategy=even(7, 3, in_flight), precision="64-true"))


@pytest.mark.parametrize("in_flight", slow_except([1, 4], 4))
def test_a_model_called_through_forward(in_flight: int) -> None:
    task, loader = mlp(task=Through), vectors(18, 4)
    assert_equal(expect(task, loader, in_flight), fit(task, loader, strategy=even(7, 3, in_flight)))


@quick("cuts1", "cuts3")
@pytest.mark.parametrize("cuts", [(0,), (0, 1), (0, 6), (0, 3, 6), (0, 1, 2, 6)])
def test_tied_weights(cuts: tuple[int, ...]) -> None:
    task, loader = tied_language_model(ADAMW), sentences(24, 4)
    expected = expect(task, loader, 3, clip_norm=0.5)
    record = fit(task, loader, strategy=Pinned(cuts, 3), gradient_clip_val=0.5)
    assert_equal(expected, record)
    assert task.get_parameter("net.0.weight") is task.get_parameter("net.6.weight")


@quick("cuts1", "cuts3")
@pytest.mark.parametrize("cuts", [(0,), (0, 3), (0, 2, 5), (0, 1, 4, 6), (0, 5, 6)])
def test_one_module_in_two_places(cuts: tuple[int, ...]) -> None:
    task, loader = recurring(), vectors(22, 4)
    assert_equal(expect(task, loader, 3), fit(task, loader, strategy=Pinned(cuts, 3)))


def test_frozen_layers() -> None:
    # The first stage has nothing to learn, and the third has one frozen layer among trained ones.
    task, loader = mlp(ADAMW), vectors(18, 4)
    for index in (0, 4):
        task.net[index].requires_grad_(False)
    assert_equal(expect(task, loader, 3), fit(task, loader, strategy=Pinned((0, 2, 4), 3)))


def test_several_epochs_of_few_batches() -> None:
    # Epochs shorter than the pipeline: it never fills, and starts empty each time.
    task, loader = mlp(ADAMW), vectors(9, 4)
    assert_equal(expect(task, loader, 8, max_epochs=4), fit(task, loader, strategy=even(7, 4, 8), max_epochs=4))


def test_one_batch_per_epoch() -> None:
    task, loader = mlp(), vectors(4, 4)
    assert_equal(expect(task, loader, 3, max_epochs=3), fit(task, loader, strategy=even(7, 2, 3), max_epochs=3))


def test_the_default_partition() -> None:
    task, loader = resnet(), images(20, 4)
    expected = expect(task, loader, 3)
    assert_equal(expected, fit(task, loader, strategy=stashing(stages=2, in_flight=3)))


def test_everything_by_default() -> None:
    task, loader = transformer(ADAMW), sentences(22, 4)
    start = transformer(ADAMW)
    start.load_state_dict(task.state_dict())
    recorder = Recorder()
    trainer = quiet_trainer("hetpipe", callbacks=[recorder], max_epochs=2)
    torch.manual_seed(4)
    trainer.fit(task, loader)
    assert isinstance(trainer.strategy, HetPipeStrategy)
    assert trainer.strategy.last_run.stages
    in_flight = trainer.strategy.last_run.in_flight
    assert in_flight == 1  # on one device, which is a plain run
    assert_equal(expect(start, loader, in_flight, plain=4), finish(recorder, trainer, task))


def test_a_model_of_one_layer() -> None:
    task, loader = Task(nn.Sequential(nn.Linear(6, 5))), vectors(22, 4)
    assert_equal(expect(task, loader, 3), fit(task, loader, strategy=Pinned((0,), 3)))
