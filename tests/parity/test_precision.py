"""Precisions other than the ordinary one: the plain Trainer's with one minibatch in flight, the oracle's with more.

On a CPU Lightning replaces precision="16-mixed" by "bf16-mixed", but takes the plugin itself, whose autocast and
GradScaler torch has there, too. So loss scaling is tested as it is on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader

from tests.exact.pipelines import Pinned, delayed, even
from tests.exact.running import Record, after, assert_equal, assert_same_run, expect, fit
from tests.oracle import Batch, Outputs, Recipe, Run
from tests.support.equality import assert_same, difference
from tests.support.marks import quick
from tests.support.models import (
    ADAMW,
    SGD,
    Learner,
    Pieces,
    Task,
    convnet,
    decay,
    images,
    mlp,
    sentences,
    sgd,
    transformer,
    vectors,
)

LENGTH = 7  # batches of an epoch of 26 samples in fours


def scaler(**settings: Any) -> GradScaler:
    """One that changes its scale often: doubled after two good steps, and by a third where one overflows."""
    return GradScaler("cpu", **{"init_scale": 2.0**10, "growth_interval": 2, "backoff_factor": 0.3, **settings})


def scaling(**settings: Any) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=scaler(**settings))


class Scales(L.Callback):
    """Writes down the scale that each step left."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(trainer.precision_plugin, MixedPrecision)
        assert trainer.precision_plugin.scaler is not None
        self.found.append(trainer.precision_plugin.scaler.get_scale())


class Overflowing(Task):
    """Minibatches whose losses, times a large scale, are too large, and ones whose loss is no number at all.

    Args:
        spikes: what the loss is multiplied by, in minibatches of these numbers in the data.
    """

    def __init__(self, net: nn.Sequential, recipe: Recipe = SGD, spikes: dict[int, float] | None = None) -> None:
        super().__init__(net, recipe)
        self.spikes = spikes or {}

    def compute(self, batch: Batch) -> Outputs:
        x, y, number = batch
        outputs = super().compute((x, y))
        return {**outputs, "loss": outputs["loss"] * self.spikes.get(int(number), 1.0)}


def numbered(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Each batch with its number, from 1."""
    batches: Any = [(x, y, torch.tensor(number)) for number, (x, y) in enumerate(loader, start=1)]
    return DataLoader(batches, batch_size=None)


class Case(NamedTuple):
    make: Callable[[], Learner]
    loader: DataLoader[Any]
    cuts: tuple[int, ...]
    options: dict[str, Any]  # the oracle's
    settings: dict[str, Any]  # the Trainer's


def spiky(recipe: Recipe = SGD) -> Learner:
    return Overflowing(mlp().net, recipe, {3: 1e34, 4: 1e33, 5: float("nan"), 6: float("inf")})


NUMBERED = numbered(vectors(30, 4))
CASES = {
    "simple": Case(mlp, vectors(26, 4), (0, 2, 4), {}, {}),
    "transformer": Case(lambda: transformer(ADAMW, dropout=0), sentences(18, 4), (0, 3, 6), {}, {}),
    "pieces": Case(Pieces, vectors(26, 4), (0, 3, 6), {}, {}),
    "schedule": Case(lambda: convnet(Recipe(sgd, decay)), images(26, 4), (0, 3, 6), {}, {}),
    "overflow": Case(partial(spiky, ADAMW), NUMBERED, (0, 2, 4), {}, {}),
    "accumulate": Case(spiky, NUMBERED, (0, 2, 4), {"accumulate": 2}, {"accumulate_grad_batches": 2}),
    "clip": Case(
        spiky,
        NUMBERED,
        (0, 2, 4),
        {"accumulate": 3, "clip_norm": 0.1},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    ),
}


def run(name: str, strategy: Any, **scale: Any) -> tuple[Record, list[float]]:
    case, scales = CASES[name], Scales()
    torch.manual_seed(5)
    plugin = scaling(**scale)
    return fit(case.make(), case.loader, [scales], strategy=strategy, plugins=[plugin], **case.settings), scales.found


@quick("simple", "overflow", "accumulate")
@pytest.mark.parametrize("name", CASES)
def test_loss_scaling_with_one_in_flight_is_the_plain_trainers(name: str) -> None:
    plain, scales = run(name, "auto")
    ours, found = run(name, Pinned(CASES[name].cuts, 1))
    assert scales == found
    assert len(set(scales)) > 2
    assert_same_run(plain, ours)


def oracles(name: str, in_flight: int, **scale: Any) -> Run:
    case = CASES[name]
    torch.manual_seed(5)
    return expect(case.make(), case.loader, in_flight, autocast=torch.half, scaler=scaler(**scale), **case.options)


@quick("simple-4", "schedule-4", "overflow-4")
@pytest.mark.parametrize("in_flight", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", CASES)
def test_a_minibatch_has_the_scale_of_its_version(name: str, in_flight: int) -> None:
    """Its gradients reach the step at the scale by which that divides, exactly, and a step that overflows is skipped.

    Stages dawdle, so that losses are there before and after the scale has changed.
    """
    expected = oracles(name, in_flight)
    record, scales = run(name, delayed(Pinned(CASES[name].cuts, in_flight), seed=1))
    assert scales == expected.scales[1:]
    assert_equal(expected, record)


def test_steps_that_overflow_are_skipped_and_what_was_in_flight_is_passed_on() -> None:
    """Minibatches that were submitted at too large a scale overflow, too, each at its own step."""
    settings = {"init_scale": 2.0**26, "growth_interval": 1000}
    expected = oracles("simple", 3, **settings)
    record, scales = run("simple", Pinned((0, 2, 4), 3), **settings)
    assert_equal(expected, record)
    weights = [state.weights for state in record.states]
    skipped = [p for p in range(1, 15) if difference(weights[p - 1], weights[p]) is None]
    assert skipped[:3] == [1, 2, 3]
    assert len(skipped) < 14
    assert all((scales[p - 1] < scales[p - 2]) == (p in skipped) for p in range(2, 15))


@pytest.mark.parametrize("policy", ["xpipe", "pipeoptim"])
def test_skipped_steps_predict_nothing_and_count_as_updates(policy: str) -> None:
    """The first updates have lower rates."""
    policies: dict[str, Any] = {"weights": policy, "lr_correction": 9}
    task = spiky(ADAMW)
    expected = expect(task, NUMBERED, 4, autocast=torch.half, scaler=scaler(), **policies)
    strategy = Pinned((0, 2, 4), 4, **policies)
    assert_equal(expected, fit(task, NUMBERED, strategy=strategy, plugins=[scaling()]))


def test_hooks_on_parameters_see_gradients_of_the_present_scale() -> None:
    """As in a plain run, a hook may divide by the scaler's scale."""

    def fitted(strategy: Any) -> list[Tensor]:
        torch.manual_seed(5)
        task, plugin = mlp(), scaling()
        seen: list[Tensor] = []

        def hook(gradient: Tensor) -> None:
            assert plugin.scaler is not None
            seen.append(gradient / plugin.scaler.get_scale())

        weight: Any = task.get_parameter("net.0.weight")
        weight.register_hook(hook)
        fit(task, vectors(26, 4), strategy=strategy, plugins=[plugin])
        return seen

    expected = oracles("simple", 3)
    for p, gradient in enumerate(fitted(Pinned((0, 2, 4), 3)), start=1):
        torch.testing.assert_close(gradient, expected.gradients[p]["net.0.weight"])
    assert_same(fitted("auto"), fitted(Pinned((0, 2, 4), 1)))


@pytest.mark.parametrize("in_flight", [1, 3])
def test_an_optimizer_that_divides_by_the_scale_itself(in_flight: int) -> None:
    def make() -> Task:
        return mlp(Recipe(lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True)))

    def fitted(strategy: Any) -> Record:
        torch.manual_seed(5)
        return fit(make(), vectors(26, 4), strategy=strategy, plugins=[scaling()])

    one, other = fitted(Pinned((0,), in_flight)), fitted(Pinned((0, 2, 4), in_flight))
    assert_same_run(one, other)
    if in_flight == 1:
        assert_same_run(fitted("auto"), one)


def test_a_scaler_that_is_off() -> None:
    torch.manual_seed(5)
    task = mlp()
    expected = expect(task, vectors(26, 4), 3, autocast=torch.half)
    assert_equal(expected, fit(task, vectors(26, 4), strategy=even(7, 3, 3), plugins=[scaling(enabled=False)]))


@quick("auto-4", "4-4")
@pytest.mark.parametrize(("first", "then"), [("auto", 1), (1, "auto"), (1, 1), ("auto", 4), (4, 4)])
def test_the_scale_is_in_the_checkpoint(tmp_path: Path, first: Any, then: Any) -> None:
    """A run that is resumed goes on at the scale and the count of good steps that the checkpoint holds."""

    def strategy(in_flight: Any) -> Any:
        return in_flight if in_flight == "auto" else even(7, 3, in_flight)

    epochs = [1 if nm == "auto" else nm for nm in (first, then)]
    torch.manual_seed(5)
    expected = expect(mlp(), [list(vectors(26, 4))] * 2, epochs, autocast=torch.half, scaler=scaler())
    torch.manual_seed(5)
    saver = ModelCheckpoint(tmp_path, "saved")
    fit(
        mlp(),
        vectors(26, 4),
        [saver],
        strategy=strategy(first),
        plugins=[scaling()],
        max_epochs=1,
        enable_checkpointing=True,
    )
    scales = Scales()
    record = fit(
        mlp(),
        vectors(26, 4),
        [scales],
        strategy=strategy(then),
        plugins=[scaling(init_scale=2.0)],
        ckpt_path=str(tmp_path / "saved.ckpt"),
    )
    assert_equal(after(expected, LENGTH), record)
    assert scales.found == expected.scales[LENGTH + 1 :]


class Evaluated(L.Callback):
    """Keeps what validation has found."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.found.append(trainer.callback_metrics["val_loss"].clone())


PRECISIONS = ["32-true", "64-true", "bf16-mixed", "bf16-true", "16-true", "16-mixed"]


@quick("simple-32-true", "simple-bf16-mixed", "simple-16-mixed")
@pytest.mark.filterwarnings("ignore:.*AMP with fp16 is not supported on CPU.*")  # bf16-mixed, says Lightning
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "name", ["simple", *(pytest.param(n, marks=pytest.mark.slow) for n in ("transformer", "pieces"))]
)
def test_one_in_flight_is_the_plain_trainers(name: str, precision: Any) -> None:
    case = CASES[name]

    def fitted(strategy: Any) -> tuple[Record, list[Tensor]]:
        torch.manual_seed(5)
        evaluated = Evaluated()
        val_loader = None if name == "pieces" else case.loader
        return fit(
            case.make(),
            case.loader,
            [evaluated],
            val_loader=val_loader,
            strategy=strategy,
            precision=precision,
            val_check_interval=3,
        ), evaluated.found

    (plain, expected), (ours, found) = fitted("auto"), fitted(Pinned(case.cuts, 1))
    assert_same_run(plain, ours)
    assert_same(expected, found)
    dtype = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.half}.get(precision, torch.float32)
    assert {weight.dtype for weight in ours.states[-1].weights.values()} == {dtype}


@quick("3")
@pytest.mark.parametrize("in_flight", [1, 3])
def test_half_precision_throughout(in_flight: int) -> None:
    task, reference = transformer(), transformer()
    reference.load_state_dict(task.state_dict())
    expected = expect(reference.half(), sentences(20, 4), in_flight)
    assert_equal(expected, fit(task, sentences(20, 4), strategy=even(8, 3, in_flight), precision="16-true"))


class Configured(Task):
    """Makes its layers where Lightning says what dtype they have."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(), SGD)
        self.dtypes: set[torch.dtype] = set()

    def configure_model(self) -> None:
        if not len(self.net):
            torch.manual_seed(5)
            self.net = mlp().net
            self.dtypes = {weight.dtype for weight in self.net.parameters()}


@quick("bf16-true", "bf16-mixed")
@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "16-true", "bf16-mixed"])
def test_layers_are_made_in_their_precision(precision: Any) -> None:
    plain, ours = Configured(), Configured()
    one = fit(plain, vectors(26, 4), strategy="auto", precision=precision)
    other = fit(ours, vectors(26, 4), strategy=even(7, 3, 1), precision=precision)
    assert plain.dtypes == ours.dtypes
    assert_same_run(one, other)


@pytest.mark.parametrize("precision", ["transformer-engine", "transformer-engine-float16"])
def test_what_lightning_refuses_is_refused_as_it_does(precision: Any) -> None:
    messages = []
    for strategy in ("auto", even(7, 3, 3)):
        with pytest.raises(Exception, match=r"(?i)transformer.?engine") as refused:
            fit(mlp(), vectors(26, 4), strategy=strategy, precision=precision)
        messages.append((type(refused.value), str(refused.value)))
    assert messages[0] == messages[1]
