"""TorchScript in a LightningModule: ignored where no stage would run it, refused in one sentence where one would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetpipe import HetPipeStrategy
from tests.oracle import Batch, Outputs, Recipe
from tests.support.equality import assert_same
from tests.support.marks import quick
from tests.support.models import Learner, vectors
from tests.support.small import assert_refused
from tests.support.trainers import quiet_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

LOADER = vectors(16, 4)
WIDTH = 6

Made = Callable[[nn.Module], nn.Module]


def as_written() -> AbstractContextManager[None]:
    """In this thread, operators are neither profiled nor fused: a script would compute other last bits from its second
    run on."""
    optimized: Any = getattr(torch.jit, "optimized_execution")  # noqa: B009  # which torch does not export
    context: AbstractContextManager[None] = optimized(False)
    return context


@pytest.fixture(autouse=True)
def _all_as_written() -> Iterator[None]:
    """In the thread of the test, also the backward pass of a script; pipelines have threads of their own."""
    with as_written():
        yield


def traced(module: nn.Module) -> nn.Module:
    trace: Any = torch.jit.trace  # torch has no types here
    made: nn.Module = trace(module, torch.zeros(4, WIDTH))
    return made


def scripted(module: nn.Module) -> nn.Module:
    made: nn.Module = torch.jit.script(module)
    return made


def as_it_is(module: nn.Module) -> nn.Module:
    return module


KINDS = pytest.mark.parametrize("made", [scripted, traced])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


class Inner(nn.Module):
    """A weight, a buffer, and a batch norm, whose statistics change unless it evaluates."""

    if TYPE_CHECKING:  # torch.jit would read it, and find no name "Tensor"
        offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("offset", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.norm(self.linear(x)))
        return y + self.offset


class Holder(nn.Module):
    """Not an ``nn.Sequential``, so that torch.export would capture it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(self.first(x))
        return y


class Beside(Learner):
    """``side`` is called before or after the pipelined ``net``, or never."""

    def __init__(self, made: Made, where: str, frozen: bool = True) -> None:
        super().__init__(Recipe(sgd))
        torch.manual_seed(3)
        self.where = where
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        side = Inner().eval() if frozen else Inner()
        for parameter in side.parameters():
            parameter.requires_grad_(not frozen)
        self.side = made(side)

    def forward(self, x: Tensor) -> Tensor:
        x = self.sides(x) if self.where == "before" else x
        x = self.net(x)
        return self.sides(x) if self.where == "after" else x

    def sides(self, x: Tensor) -> Tensor:
        with as_written():
            y: Tensor = self.side(x)
        return y

    def compute(self, batch: Batch) -> Outputs:
        found = self.forward(batch[0])
        return {"loss": F.mse_loss(found, batch[0]), "found": found.detach()}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.compute(batch)["loss"])

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.forward(batch[0])


def weights(task: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in task.parameters()]


@quick("2-3-never-scripted", "2-3-before-traced")
@KINDS
@pytest.mark.parametrize("where", ["before", pytest.param("after", marks=pytest.mark.slow), "never"])
@pytest.mark.parametrize(
    ("stages", "in_flight"),
    [pytest.param(1, 1, marks=pytest.mark.slow), pytest.param(2, 1, marks=pytest.mark.slow), (2, 3)],
)
def test_beside_the_pipeline_it_is_what_the_module_is(
    made: Made, where: str, stages: int, in_flight: int, tmp_path: Path
) -> None:
    """Training ended with an AttributeError, also where TorchScript was never called."""
    ends = []
    for make in (made, as_it_is):
        task = Beside(make, where)
        trainer = quiet_trainer(HetPipeStrategy(stages=stages, in_flight=in_flight))
        trainer.fit(task, LOADER)
        trainer.save_checkpoint(tmp_path / "half.ckpt")
        trainer = quiet_trainer(HetPipeStrategy(stages=stages, in_flight=in_flight), max_epochs=2)
        trainer.fit(task := Beside(make, where), LOADER, ckpt_path=tmp_path / "half.ckpt", weights_only=False)
        (scores,) = trainer.validate(task, LOADER, verbose=False)
        predictions: Any = trainer.predict(task, LOADER)
        ends.append([*weights(task), torch.tensor(scores["val_loss"]), *predictions])
    assert_same(ends[0], ends[1])


@KINDS
@pytest.mark.parametrize("where", ["before", "never", "inside"])
def test_without_a_pipeline_it_is_trained(made: Made, where: str) -> None:
    ends = []
    for strategy in (HetPipeStrategy(stages=1, in_flight=1), "auto"):
        task = Beside(made, where, frozen=False)
        if where == "inside":
            task.net.append(task.side)
        quiet_trainer(strategy, max_epochs=2).fit(task, LOADER, LOADER)
        ends.append(weights(task))
    assert_same(ends[0], ends[1])


@KINDS
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("holder", [Holder, lambda inner: nn.Sequential(nn.Linear(WIDTH, WIDTH), inner)])
def test_inside_a_pipelined_module_it_is_refused(made: Made, frozen: bool, holder: Made) -> None:
    task = Beside(made, "never", frozen)
    task.net = holder(task.side)  # type: ignore[assignment]
    del task.side
    name = "net.inner" if holder is Holder else "net.1"
    said = f"'{name}' is a TorchScript module (of torch.jit) inside the pipelined module 'net'"
    assert_refused(task, said, "use the nn.Module that it was made from", strategy=pipeline(), loader=LOADER)


@KINDS
@pytest.mark.parametrize("module", [None, "net"])
def test_beside_the_pipeline_it_is_refused_where_it_is_trained(made: Made, module: str | None) -> None:
    """Its parameters are used where no version of them can be put in their place."""
    task = Beside(made, "before", frozen=False)
    said = "' is a TorchScript module (of torch.jit) that is trained", "with its parameters frozen"
    strategy = HetPipeStrategy(stages=2, in_flight=1, recompute=True, module=module)
    assert_refused(task, *said, strategy=strategy, loader=LOADER)


@KINDS
@pytest.mark.parametrize("holder", [Holder, lambda inner: nn.Sequential(nn.Linear(WIDTH, WIDTH), inner)])
@pytest.mark.filterwarnings("ignore:evaluation")
def test_evaluation_leaves_a_module_that_holds_it_to_the_module(made: Made, holder: Made) -> None:
    found = []
    for strategy in (pipeline(), "auto"):
        task = Beside(made, "never")
        task.net = holder(task.side)  # type: ignore[assignment]
        del task.side
        predictions: Any = quiet_trainer(strategy).predict(task, LOADER)
        found.append(predictions)
    assert_same(*found)


def pipeline(**settings: Any) -> HetPipeStrategy:
    return HetPipeStrategy(stages=2, in_flight=3, **settings)
