"""Pipelined modules that ``training_step`` calls several times: two views of a batch, shared parts, recurrent ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.exact.pipelines import Pinned, delayed
from tests.exact.running import Record, assert_equal, assert_same_run, expect, fit
from tests.oracle import Batch, Outputs, Recipe
from tests.support.captured_models import Backbone, Views
from tests.support.marks import quick, slow_except
from tests.support.models import ADAMW, SGD, Learner, vectors


def sequential() -> nn.Sequential:
    """A backbone whose layers are run as they are."""
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(8, 8)]
    return nn.Sequential(*layers)


def views() -> Views:
    """Two sequential pieces, of which no graph need be made."""
    return Views(sequential(), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)))


CUTS = [(0,), (0, 2), (0, 1, 3), (0, 3, 5)]
"""Split points of two pieces with three to five layers each."""


def check(task: Learner, cuts: Sequence[int], in_flight: int, samples: int = 20, **settings: Any) -> Record:
    loader = vectors(samples, 4)
    expected = expect(task, loader, in_flight, stages=len(cuts))
    record = fit(task, loader, strategy=Pinned(cuts, in_flight, **settings))
    assert_equal(expected, record)
    return record


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("made", [Views, views])
@quick("Views-3-cuts2", "views-3-cuts0", "views-3-cuts3")
def test_two_views(made: Any, cuts: Sequence[int], in_flight: int) -> None:
    """Statistics, masks and sums of gradients are those of a plain loop."""
    torch.manual_seed(0)
    check(made(), cuts, in_flight)


@quick("views")
@pytest.mark.parametrize("made", [Views, views])
def test_with_one_in_flight_it_is_the_plain_trainer(made: Any) -> None:
    """But for masks, which are those of each minibatch."""
    torch.manual_seed(0)
    task = made()
    for module in task.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    plain, loader = copy.deepcopy(task), vectors(18, 4)
    assert_same_run(fit(plain, loader), fit(task, loader, strategy=Pinned((0, 2), 1)))


def test_two_calls_draw_masks_of_their_own() -> None:
    """In the watched minibatch, in the pipeline and in a spread run."""

    class Masks(Learner):
        def __init__(self) -> None:
            super().__init__(SGD)
            self.net = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))

        def compute(self, batch: Batch) -> Outputs:
            x, _ = batch
            one, other = self.net(x), self.net(x)
            return {"loss": (one - other).square().mean() + one.square().mean(), "same": (one == other).all()}

    seen = []
    for cuts, in_flight in (((0, 1), 3), ((0,), 1)):
        torch.manual_seed(1)
        task, loader = Masks(), vectors(18, 4)
        expected = expect(task, loader, in_flight, plain=1 if in_flight == 1 else None)
        torch.manual_seed(1)
        seen.append(fit(task, loader, strategy=Pinned(cuts, in_flight)))
        assert_equal(expected, seen[-1])
    assert not any(outputs["same"] for record in seen for outputs in record.outputs)


class Siamese(Learner):
    """A shared encoder, whose outputs and inputs user code uses in between, too."""

    def __init__(self, recipe: Recipe = SGD) -> None:
        super().__init__(recipe)
        self.lift = nn.Linear(6, 6)
        self.encoder = Backbone()

    def compute(self, batch: Batch) -> Outputs:
        x, _ = batch
        h = self.lift(x)
        one = self.encoder(h)
        h = h + one[:, :6].tanh()
        other = self.encoder(h) * self.encoder.last.weight.mean()
        third = self.encoder(h.flip(0))
        return {"loss": F.triplet_margin_loss(one, other, third) + h.square().mean(), "one": one.detach()}


class Shared(Learner):
    """One LayerNorm after each of two pieces: the last call's stage is not the last one."""

    def __init__(self, recipe: Recipe = SGD) -> None:
        super().__init__(recipe)
        self.one, self.other = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Linear(6, 6))
        self.norm = nn.LayerNorm(6)

    def compute(self, batch: Batch) -> Outputs:
        x, _ = batch
        y = self.norm(self.other(self.norm(self.one(x))))
        return {"loss": F.mse_loss(y, x), "y": y.detach()}


class Recurrent(Learner):
    """A cell that is given its own output."""

    def __init__(self, recipe: Recipe = SGD) -> None:
        super().__init__(recipe)
        self.cell = nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 6))
        self.head = nn.Linear(6, 6)

    def compute(self, batch: Batch) -> Outputs:
        x, _ = batch
        h = torch.zeros_like(x)
        for _ in range(3):
            h = self.cell(torch.cat([x, h], -1))
        y = self.head(h)
        return {"loss": F.mse_loss(y, x) + h.square().mean(), "y": y.detach()}


class Shapes(Learner):
    """Calls with inputs of different shapes."""

    def __init__(self, recipe: Recipe = SGD) -> None:
        super().__init__(recipe)
        self.encoder = Backbone()

    def compute(self, batch: Batch) -> Outputs:
        x, _ = batch
        one = self.encoder(x)
        other = self.encoder(torch.cat([x, 2 * x, 3 * x]))
        return {"loss": one.square().mean() + other.square().mean(), "one": one.detach()}


class BYOL(Learner):
    """An online network with two views, and a target that follows it, called without gradients."""

    def __init__(self, recipe: Recipe = SGD) -> None:
        super().__init__(recipe)
        self.online = Backbone()
        self.predictor = nn.Linear(8, 8)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def compute(self, batch: Batch) -> Outputs:
        x, _ = batch
        views = x + 0.1, 1.1 * x
        with torch.no_grad():
            targets = [self.target(view) for view in views]
        found = [self.predictor(self.online(view)) for view in views]
        loss = -sum(F.cosine_similarity(p, z).mean() for p, z in zip(found, reversed(targets), strict=True))
        return {"loss": loss + found[0].new_zeros(()), "found": found[0].detach()}

    def follow(self) -> None:
        with torch.no_grad():
            for mine, its in zip(self.target.parameters(), self.online.parameters(), strict=True):
                mine.lerp_(its, 0.1)


class Momentum(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.follow()


@pytest.mark.parametrize("task", [Siamese, Shared, Recurrent])
@pytest.mark.parametrize(("cuts", "in_flight"), slow_except([((0,), 1), ((0, 1), 3), ((0, 1, 3), 3)], ((0, 1, 3), 3)))
def test_ways_of_calling_again(task: type[Learner], cuts: Sequence[int], in_flight: int) -> None:
    torch.manual_seed(0)
    check(task(ADAMW), cuts, in_flight)


@pytest.mark.parametrize("in_flight", slow_except([1, 3], 3))
def test_calls_with_inputs_of_different_shapes(in_flight: int) -> None:
    torch.manual_seed(0)
    check(Shapes(), (0, 1), in_flight, samples=18)


@pytest.mark.parametrize("cuts", slow_except([((0, 4),), ((0, 2, 5),)], ((0, 2, 5),)))
def test_a_target_that_follows(cuts: Sequence[int]) -> None:
    """Both networks are named, so that stages have versions of the target, too."""
    torch.manual_seed(0)
    task, loader = BYOL(), vectors(20, 4)
    expected = expect(task, loader, 3, edit=lambda p, model: model.follow())
    strategy = Pinned(cuts, 3, module=["online", "predictor", "target"])
    assert_equal(expected, fit(task, loader, [Momentum()], strategy=strategy))


@quick("views", "Recurrent")
@pytest.mark.parametrize("task", [views, Recurrent, Siamese])
def test_forwards_that_are_computed_again(task: Any) -> None:
    """Each from the buffers that its call started from, and with its call's masks."""
    torch.manual_seed(0)
    check(task(), (0, 1, 3), 3, recompute=True)


def test_accumulation_and_clipping() -> None:
    torch.manual_seed(0)
    task, loader = views(), vectors(18, 4)
    expected = expect(task, loader, 3, accumulate=2, clip_norm=0.1)
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    assert_equal(expected, fit(task, loader, strategy=Pinned((0, 2), 3), **settings))


@quick("1")
@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_timing(seed: int) -> None:
    """Stages that dawdle change nothing: statistics neither."""
    torch.manual_seed(0)
    task, loader = views(), vectors(18, 4)
    expected = expect(task, loader, 4)
    assert_equal(expected, fit(task, loader, strategy=delayed(Pinned((0, 3, 5), 4), seed)))
