"""Every weight policy equals its plain loop, bit for bit: weights, losses, gradients, at every step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.pipeline.weight_stash import Moves
from lightning_hetpipe.rules.versions import POLICIES, SYNC
from lightning_hetpipe.run.prediction import LastStep, Prediction, prediction_of
from tests.exact.pipelines import even
from tests.exact.running import after, assert_equal, expect, fit
from tests.oracle import Recipe
from tests.support.accelerator import TestAccelerator
from tests.support.marks import slow_except
from tests.support.models import (
    ADAMW,
    Task,
    Through,
    convnet,
    decay,
    images,
    mlp,
    recurring,
    sentences,
    tied_language_model,
    transformer,
    vectors,
)
from tests.support.small import Wraps, assert_refused
from tests.support.trainers import quiet_trainer

MOMENTUM = Recipe(lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.01), decay)
AMSGRAD = Recipe(lambda model: torch.optim.Adam(model.parameters(), 0.01, amsgrad=True, maximize=True))
PREDICTING = ["spectrain", "xpipe", "pipeoptim"]
RECIPES = {"xpipe": ADAMW, "pipeoptim": ADAMW}
GRID = [("stash", 3, 2), ("sync", 3, 1), ("sync", 3, 4), ("2bw", 1, 1), ("2bw", 2, 2), ("2bw", 3, 4)]
GRID += [(name, in_flight, every) for name in PREDICTING for in_flight, every in ((3, 1), (4, 3))]
GRID += [("xpipe", 4, 4)]  # whose minibatches would begin with different weights, were each predicted by itself


def test_every_policy_is_there() -> None:
    assert {name for name, *_ in GRID} == set(POLICIES)


@pytest.mark.parametrize(("policy", "in_flight", "every"), GRID)
def test_against_the_oracle(policy: str, in_flight: int, every: int) -> None:
    task, loader = mlp(RECIPES.get(policy, MOMENTUM)), vectors(44, 4)  # the last window of an epoch is short
    expected = expect(task, loader, in_flight, accumulate=every, weights=policy)
    strategy = even(len(task.net), 2, in_flight, weights=policy)
    assert_equal(expected, fit(task, loader, strategy=strategy, accumulate_grad_batches=every))


Make = tuple[Callable[[Recipe], Task], Callable[[int, int], DataLoader[Any]]]
MODELS: dict[str, Make] = {
    "batch norm": (convnet, images),
    "dropout": (transformer, sentences),
    "tied": (lambda recipe: tied_language_model(recipe, captured=False), sentences),
    "recurring": (recurring, vectors),
    "frozen": (lambda recipe: _frozen(mlp(recipe)), vectors),
    "through": (lambda recipe: mlp(recipe, Through), vectors),
}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "clip": ({"clip_norm": 0.1}, {"gradient_clip_val": 0.1}),
    "bf16": ({"autocast": torch.bfloat16}, {"precision": "bf16-mixed"}),
    "recompute": ({}, {"recompute": True}),
}
ALL = [(policy, model, option) for policy in POLICIES for model in MODELS for option in OPTIONS]
QUICK = [("sync", "batch norm", "plain"), ("2bw", "tied", "clip"), ("spectrain", "batch norm", "recompute")]
QUICK += [("pipeoptim", "frozen", "clip"), ("xpipe", "dropout", "bf16"), ("xpipe", "tied", "plain")]


def _frozen(task: Task) -> Task:
    task.net[2].requires_grad_(False)
    return task


@pytest.mark.parametrize(("policy", "model", "option"), slow_except(ALL, *QUICK))
def test_models_and_options(policy: str, model: str, option: str) -> None:
    make, data = MODELS[model]
    # One without dropout runs without a graph, of which a smaller last batch would have another.
    task, loader = make(RECIPES.get(policy, MOMENTUM)), data(32 if model == "dropout" else 30, 4)
    options, settings = OPTIONS[option]
    every = 3 if policy in ("sync", "2bw") else 1
    expected = expect(task, loader, 3, accumulate=every, weights=policy, **options)
    settings = {**settings, "accumulate_grad_batches": every}
    strategy = even(len(task.net), 3, 3, weights=policy, recompute=settings.pop("recompute", False))
    assert_equal(expected, fit(task, loader, strategy=strategy, **settings))


def test_adams_largest_second_moment_and_ascent() -> None:
    task, loader = mlp(AMSGRAD), vectors(30, 4)
    expected = expect(task, loader, 3, weights="xpipe")
    assert_equal(expected, fit(task, loader, strategy=even(7, 2, 3, weights="xpipe")))


@pytest.mark.parametrize("policy", ["sync", "2bw"])
def test_windows_that_grow_in_the_second_epoch(policy: str) -> None:
    task, loader = mlp(MOMENTUM), vectors(44, 4)
    expected = expect(task, loader, 2, accumulate=[2, 5], weights=policy)
    grows = GradientAccumulationScheduler({0: 2, 1: 5})
    assert_equal(expected, fit(task, loader, [grows], strategy=even(7, 2, 2, weights=policy)))


@pytest.mark.parametrize(("policy", "every"), [("sync", 3), ("spectrain", 1)])
def test_four_devices(policy: str, every: int, accelerator: TestAccelerator) -> None:
    task, loader = mlp(MOMENTUM), vectors(30, 4)
    expected = expect(task, loader, 3, accumulate=every, weights=policy)
    strategy = even(7, 4, 3, weights=policy)
    settings: dict[str, Any] = {"accelerator": accelerator, "devices": 4, "accumulate_grad_batches": every}
    assert_equal(expected, fit(task, loader, strategy=strategy, **settings))


@pytest.mark.parametrize("every", [1, 3])
def test_sync_equals_plain_training(every: int) -> None:
    plain, loader = mlp(MOMENTUM), vectors(44, 4)
    piped = copy.deepcopy(plain)
    expected = fit(plain, loader, accumulate_grad_batches=every)
    found = fit(piped, loader, strategy=even(7, 2, 4, weights=SYNC.name), accumulate_grad_batches=every)
    assert_equal(expected, found)


def test_two_buffers_with_one_in_flight_equal_plain_training() -> None:
    plain, loader = mlp(MOMENTUM), vectors(44, 4)
    piped = copy.deepcopy(plain)
    expected = fit(plain, loader)
    assert_equal(expected, fit(piped, loader, strategy=even(7, 2, 1, weights="2bw")))


@pytest.mark.parametrize(
    ("policy", "every", "buffers"),
    [
        ("stash", 1, 4),
        ("stash", 4, 2),
        ("stash", 2, 3),
        ("sync", 4, 1),
        ("2bw", 4, 2),
        ("spectrain", 1, 4),
        ("spectrain", 3, 2),
        ("pipeoptim", 4, 3),
    ],
)
def test_versions_take_no_more_memory_than_the_policy_says(policy: str, every: int, buffers: int) -> None:
    task, loader = mlp(MOMENTUM), vectors(28, 4)
    strategy = even(7, 2, 4, weights=policy)
    fit(task, loader, strategy=strategy, accumulate_grad_batches=every)
    weights = sum(parameter.nbytes for parameter in task.parameters())
    assert sum(stage.versions_bytes for stage in strategy.last_run.stages) == buffers * weights


@pytest.mark.parametrize(("policy", "every"), [("stash", 1), ("spectrain", 1), ("xpipe", 2), ("pipeoptim", 1)])
def test_rates_that_begin_lower(policy: str, every: int) -> None:
    """Seen by steps and predictions alone: the scheduler multiplies the user's rate."""
    task, loader = mlp(RECIPES.get(policy, MOMENTUM)), vectors(28, 4)
    expected = expect(task, loader, 4, accumulate=every, weights=policy, lr_correction=7)
    strategy = even(7, 2, 4, weights=policy, lr_correction=7)
    assert_equal(expected, fit(task, loader, strategy=strategy, accumulate_grad_batches=every))


def test_a_rate_that_is_a_tensor() -> None:
    """A scheduler changes it in place, a correction must not."""
    recipe = Recipe(lambda model: torch.optim.AdamW(model.parameters(), torch.tensor(0.01), foreach=False), decay)
    task, loader = mlp(recipe), vectors(30, 4)
    expected = expect(task, loader, 3, weights="xpipe", lr_correction=7)
    strategy = even(7, 2, 3, weights="xpipe", lr_correction=7)
    assert_equal(expected, fit(task, loader, strategy=strategy))


@pytest.mark.parametrize("p", [3, 6])
@pytest.mark.parametrize("policy", ["sync", "2bw", *PREDICTING])
def test_a_run_that_is_resumed(policy: str, p: int, tmp_path: Path) -> None:
    """In mid-epoch, and where one begins: as if the pipeline had started empty there, after as many updates."""
    correction = 8 if policy in PREDICTING else None
    task, batches = mlp(RECIPES.get(policy, MOMENTUM)), list(vectors(24, 4))
    every = 3 if policy in ("sync", "2bw") else 1
    epochs = [batches, batches]
    epochs[p // 6] = [*batches[: p % 6], *batches[: 6 - p % 6]]  # Lightning begins with the loader's first again
    expected = expect(task, epochs, 3, accumulate=every, weights=policy, lr_correction=correction, restarts={p})
    when: dict[str, Any] = {"every_n_epochs": 1} if p == 6 else {"every_n_train_steps": p // every}
    saver = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, **when)
    settings: dict[str, Any] = {"accumulate_grad_batches": every, "enable_checkpointing": True}
    strategy = even(7, 2, 3, weights=policy, lr_correction=correction)
    fit(task, vectors(24, 4), [saver], strategy=strategy, max_epochs=1, **settings)
    fresh, path = mlp(task.recipe), tmp_path / f"step={p // every}.ckpt"
    strategy = even(7, 3, 3, weights=policy, lr_correction=correction)
    found = fit(fresh, vectors(24, 4), strategy=strategy, ckpt_path=str(path), **settings)
    assert_equal(after(expected, p), found)


# Predictions by themselves.


def after_steps(prediction: Prediction, weight: nn.Parameter, steps: int) -> torch.Tensor:
    """``weight`` after so many steps, as expected."""
    after = torch.empty_like(weight, requires_grad=False)
    with torch.no_grad():
        prediction.moves()[weight].write(weight, steps, after)
    return after


def test_on_a_linear_loss_the_momentum_buffer_predicts_exactly() -> None:
    """Each gradient is g, so that a buffer at g / (1 - mu) stays there, and each step is the same."""
    weight, g = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64)), torch.tensor([0.5, 0.25]).double()
    optimizer = torch.optim.SGD([weight], 0.125, momentum=0.5)
    optimizer.state[weight]["momentum_buffer"] = g / 0.5
    predicted = after_steps(prediction_of("spectrain", optimizer), weight, 3)
    for _ in range(3):
        weight.grad = g.clone()
        optimizer.step()
    assert torch.equal(weight.detach(), predicted)


def test_on_a_quadratic_the_prediction_has_its_closed_form() -> None:
    """With w' = w - lr u and u' = mu u + h w, after one step from u = 0 the next is expected to be - lr h w."""
    weight = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
    last = prediction_of("pipeoptim", optimizer)
    for prediction in (last, prediction_of("spectrain", optimizer)):
        assert not prediction.moves()
    weight.grad = 3.0 * weight.detach()
    with last.stepping():
        optimizer.step()
    for prediction in (last, prediction_of("spectrain", optimizer)):
        changed = after_steps(prediction, weight, 1) - weight.detach()
        assert changed.item() == pytest.approx(-0.1 * 3.0 * 2.0, rel=1e-14)
    with last.asked():  # and skipped
        pass
    assert not last.moves()


def test_at_a_constant_rate_momentum_and_the_last_step_predict_the_same() -> None:
    """The buffer has weight decay in it, as the step has."""
    weight = nn.Parameter(torch.tensor([2.0, -3.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9, weight_decay=0.3)
    last, momentum = prediction_of("pipeoptim", optimizer), prediction_of("spectrain", optimizer)
    for gradient in ([0.5, 1.0], [-2.0, 0.25], [1.5, -1.0]):
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        with last.asked(), last.stepping():
            optimizer.step()
        torch.testing.assert_close(after_steps(last, weight, 3), after_steps(momentum, weight, 3), rtol=1e-14, atol=0)


@pytest.mark.parametrize("policy", ["xpipe", "pipeoptim"])
def test_complex_weights_are_predicted_by_their_parts(policy: str) -> None:
    """On a linear loss Adam's bias-corrected moments are g and its square, part by part: each step is the same."""
    weight = nn.Parameter(torch.tensor([1.0 - 2.0j, 3.0 + 4.0j], dtype=torch.complex128))
    optimizer = torch.optim.Adam([weight], 0.125)
    prediction = prediction_of(policy, optimizer)
    for taken in range(5):
        if taken == 2:
            predicted = after_steps(prediction, weight, 3)
        weight.grad = torch.tensor([0.5 - 0.25j, -2.0 + 1.0j], dtype=torch.complex128)
        with prediction.asked(), prediction.stepping():
            optimizer.step()
    torch.testing.assert_close(predicted, weight.detach())


def test_the_change_of_each_step_lies_in_the_same_memory() -> None:
    """Unless the weight has another type since, as a checkpoint's change may have."""
    weight = nn.Parameter(torch.tensor([2.0, 3.0]))
    optimizer = torch.optim.SGD([weight], 0.1)
    last, addresses = LastStep(optimizer), []
    last.restore([torch.ones(2, dtype=torch.float64)])
    assert after_steps(last, weight, 2).tolist() == [4.0, 5.0]
    for _ in range(3):
        weight.grad = before = weight.detach().clone()
        with last.asked(), last.stepping():
            optimizer.step()
        change = last.moves()[weight].first
        assert torch.equal(change, weight.detach() - before)
        addresses.append(change.data_ptr())
    assert len(set(addresses)) == 1


def test_a_step_that_fails_predicts_nothing() -> None:
    weight = nn.Parameter(torch.ones(2))
    last = LastStep(torch.optim.SGD([weight], 0.1))
    last.restore([torch.ones(2)])
    with pytest.raises(ZeroDivisionError), last.asked(), last.stepping():
        raise ZeroDivisionError
    assert not last.moves()
    assert last.saved() == [None]


def test_nothing_is_predicted_where_no_step_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two in flight, four to a step: the fifth and the ninth minibatch miss one."""
    asked, moves = [], Prediction.moves

    def counted(prediction: Prediction) -> Moves:
        asked.append(prediction)
        return moves(prediction)

    monkeypatch.setattr(Prediction, "moves", counted)
    strategy = even(7, 2, 2, weights="spectrain")
    fit(mlp(MOMENTUM), vectors(40, 4), strategy=strategy, max_epochs=1, accumulate_grad_batches=4)
    assert len(asked) == 2


# Refusals.


class Optimized(Task):
    def __init__(self, optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        super().__init__(mlp().net, Recipe(optimizer))


@pytest.mark.parametrize(
    ("policy", "optimizer", "fragments"),
    [
        ("spectrain", lambda m: torch.optim.SGD(m.parameters(), 0.1), ["momentum=0", "weights='pipeoptim'"]),
        ("spectrain", lambda m: torch.optim.SGD(m.parameters(), 0.1, 0.9, nesterov=True), ["nesterov=True"]),
        ("spectrain", lambda m: torch.optim.SGD(m.parameters(), 0.1, 0.9, 0.5), ["dampening=0.5"]),
        ("spectrain", lambda m: torch.optim.Adam(m.parameters()), ["torch.optim.SGD", "the optimizer is Adam"]),
        ("xpipe", lambda m: torch.optim.SGD(m.parameters(), 0.1, 0.9), ["Adam or torch.optim.AdamW", "is SGD"]),
    ],
)
def test_optimizers_that_a_policy_has_no_rule_for(policy: str, optimizer: Any, fragments: list[str]) -> None:
    strategy = HetPipeStrategy(stages=2, in_flight=3, weights=policy)
    assert_refused(Optimized(optimizer), f"weights='{policy}'", *fragments, strategy=strategy, loader=vectors(12, 4))


@pytest.mark.parametrize("setting", [{"weights": "pipeoptim"}, {"lr_correction": 7}])
def test_optimizers_that_do_not_say_when_they_step(setting: dict[str, Any]) -> None:
    ((name, value),) = setting.items()
    strategy = HetPipeStrategy(stages=2, in_flight=3, **setting)
    task = Optimized(lambda model: Wraps(torch.optim.SGD(model.parameters(), 0.1)))
    assert_refused(task, f"{name}={value!r}", "Wraps takes no hooks", strategy=strategy, loader=vectors(12, 4))


def test_two_buffers_need_a_minibatch_in_each_step_for_each_in_flight() -> None:
    strategy = HetPipeStrategy(stages=2, in_flight=3, weights="2bw")
    fragments = ["weights='2bw'", "accumulate_grad_batches=1", "set accumulate_grad_batches=3 or more, or in_flight=1"]
    assert_refused(mlp(MOMENTUM), *fragments, strategy=strategy, loader=vectors(12, 4))


def test_what_is_said_of_staleness(caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder) -> None:
    def said(policy: str, every: int) -> str:
        caplog.clear()
        recwarn.clear()
        trainer = quiet_trainer(HetPipeStrategy(stages=2, in_flight=3, weights=policy), accumulate_grad_batches=every)
        trainer.fit(mlp(MOMENTUM), vectors(24, 4))
        return "; ".join([*caplog.messages, *(str(each.message) for each in recwarn)])

    stashed = said("stash", 1)
    assert "3 minibatches in flight, so gradients up to 2 minibatches stale" in stashed
    assert "stale gradients may keep this model from learning" in stashed
    synchronous = said("sync", 3)
    assert "3 minibatches in flight, and none across an optimizer step, so that no gradient is stale" in synchronous
    assert "stale gradients may" not in synchronous
    assert "3 minibatches in flight, so gradients one optimizer step stale" in said("2bw", 3)
    assert "3 minibatches in flight, weights predicted 2 minibatches ahead" in said("spectrain", 1)
