"""Evaluations of models that cannot be captured as a whole: what is in them is pipelined, to the plain values."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from tests.evaluation.evaluating import Evaluates, evaluated, pipeline
from tests.support.equality import assert_same
from tests.support.models import vectors
from tests.support.refused_models import Checked, Checks
from tests.support.trainers import quiet_trainer


def made() -> Evaluates:
    torch.manual_seed(7)
    return Evaluates(Checks(2))


def test_what_is_inside_is_pipelined() -> None:
    with pytest.warns(
        UserWarning, match=r"the evaluation of 'task.model' does not run in the pipeline: .* \(4 of the mod"
    ):
        ours = evaluated(made(), vectors(20, 4), pipeline(2))
    assert_same(evaluated(made(), vectors(20, 4), "auto"), ours)


def test_stages_compute_batches_of_what_is_inside() -> None:
    seen: set[tuple[int, int]] = set()

    def before(stage: int, work: str, batch: int) -> None:
        seen.add((stage, batch))

    strategy = pipeline(2)
    strategy._before_pass = before
    with pytest.warns(UserWarning, match="'task.model' does not run in the pipeline"):
        quiet_trainer(strategy=strategy).validate(made(), vectors(20, 4), verbose=False)
    assert seen == {(stage, batch) for stage in (0, 1) for batch in range(2, 6)}


class Counts(Checked):
    """Counts its samples in a tensor and in a list."""

    def __init__(self) -> None:
        super().__init__(2)
        self.count = torch.zeros(())
        self.sizes: list[int] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        self.count += len(x)
        self.sizes.append(len(x))
        return super().forward(x, labels)


def test_what_it_counts_is_counted_once() -> None:
    """The first batch was counted twice, as the module is run again to look into it."""
    task = Checks(2)
    task.model = Counts()
    with pytest.warns(UserWarning, match="'task.model' does not run in the pipeline"):
        quiet_trainer(strategy=pipeline(2)).validate(Evaluates(task), vectors(20, 4), verbose=False)
    assert task.model.sizes == [4] * 5
    assert task.model.count == 20


class Trains(Checks):
    """Validates, too."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs = self.compute(batch)
        self.log("loss", outputs["loss"])
        self.log("largest", outputs["largest"])


def trained(strategy: Any) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(7)
    module = Trains(2)
    trainer = quiet_trainer(strategy=strategy, max_epochs=1)
    trainer.fit(module, vectors(12, 4), vectors(20, 4))
    return module, dict(trainer.callback_metrics)


def test_validation_in_a_fit() -> None:
    seen: set[str] = set()

    def before(stage: int, work: str, batch: int) -> None:
        seen.add(work)

    strategy = pipeline(2, in_flight=3)
    strategy._before_pass = before
    trained(strategy)
    assert "evaluate" in seen


def test_validation_in_a_fit_gives_the_plain_values() -> None:
    (ours, found), (plain, expected) = trained(pipeline(2, in_flight=1)), trained("auto")
    assert all(map(torch.equal, ours.parameters(), plain.parameters()))
    assert found == expected


class Cache:
    """An object that a module adds to, as those of language models that generate."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []


class Adds(nn.Module):
    """Adds to a cache, and has no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.seen.append(self.first(x))
        result: Tensor = self.second(torch.stack(cache.seen).sum(0))
        return result


class ChangesInput(Adds):
    """Changes what it is given in place, and has no graph."""

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        x.add_(float(self.first(x).detach().numpy().sum()))
        result: Tensor = self.second(x)
        return result


class Generates(L.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        cache, found = Cache(), [batch[0].clone()]
        for _ in range(3):
            found.append(self.model(found[-1], cache))
        return torch.cat(found)


@pytest.mark.parametrize("model", [Adds, ChangesInput])
@pytest.mark.filterwarnings("ignore:the evaluation of 'model' does not run in the pipeline")
def test_what_a_module_changes_is_changed_once(model: type[nn.Module]) -> None:
    """It was run again to find what is inside, on the user's own tensors and cache."""
    torch.manual_seed(7)
    module = Generates(model())
    given = vectors(20, 4)
    expected, found = [quiet_trainer(strategy=each).predict(module, given) for each in ("auto", pipeline(3))]
    assert_same(expected, found)
