"""Validate, test and predict give in a pipeline what they give in a plain run, bit for bit, in the same order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.evaluation.evaluating import Evaluates, Model, evaluated, pipeline
from tests.exact.running import fit
from tests.exact.test_captured import CASES, made
from tests.support import models
from tests.support.captured_models import Whole, Words
from tests.support.equality import assert_same, difference
from tests.support.marks import quick, slow_except
from tests.support.models import Learner, vectors
from tests.support.trainers import quiet_trainer

RANDOM = {"vae", "noise between"}  # they draw in evaluation, too: see test_chance


def evaluates(name: str) -> tuple[Learner, DataLoader[Any]]:
    if name in CASES:
        return Evaluates(made(name)), CASES[name][1]
    torch.manual_seed(7)
    make, loader = {
        "mlp": (models.mlp, models.vectors(22, 4)),
        "sequential resnet": (models.resnet, models.images(14, 4)),
        "transformer": (models.transformer, models.sentences(16, 4)),
    }[name]
    return Evaluates(make()), loader


NAMES = [*sorted(CASES.keys() - RANDOM), "mlp", "sequential resnet", "transformer"]


@quick("pieces", "transformer")
@pytest.mark.parametrize("name", slow_except(NAMES, "clip", "pieces", "resnet", "transformer"))
def test_all_that_evaluation_shows(name: str) -> None:
    expected = evaluated(*evaluates(name), "auto")
    found = evaluated(*evaluates(name), pipeline(3 if name != "clip" else 2, 4))
    assert_same(expected, found)


@pytest.mark.parametrize("inference_mode", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", slow_except(["bf16-mixed", "64-true", "bf16-true"], "bf16-mixed"))
@pytest.mark.parametrize("name", slow_except(["resnet", "pieces"], "pieces"))
def test_precision(name: str, precision: str, inference_mode: bool) -> None:
    settings: dict[str, Any] = {"precision": precision, "inference_mode": inference_mode}
    expected = evaluated(*evaluates(name), "auto", **settings)
    assert_same(expected, evaluated(*evaluates(name), pipeline(3, 4), **settings))


@pytest.mark.slow
def test_torchs_transformer_takes_its_fast_path_in_both() -> None:
    class Encodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 3)
            self.head = nn.Linear(8, models.CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.head(self.encoder(x.reshape(-1, 2, 8)).mean(1))
            return y

    def run(strategy: Any) -> list[Any]:
        torch.manual_seed(7)
        loader = DataLoader(
            torch.utils.data.TensorDataset(torch.randn(22, 16), torch.randint(models.CLASSES, (22,))), 4
        )
        return evaluated(Evaluates(Whole(Encodes())), loader, strategy)

    assert_same(run("auto"), run(pipeline(2, 3)))


def test_several_dataloaders() -> None:
    module, loader = evaluates("mlp")
    loaders = [loader, models.vectors(5, 2, seed=9), loader]
    assert_same(evaluated(module, loaders, "auto"), evaluated(evaluates("mlp")[0], loaders, pipeline()))


@pytest.mark.parametrize("limit", slow_except([1, 2, 3], 2))
def test_few_batches(limit: int) -> None:
    settings: dict[str, Any] = {f"limit_{stage}_batches": limit for stage in ("val", "test", "predict")}
    module, loader = evaluates("mlp")
    expected = evaluated(module, loader, "auto", **settings)
    assert_same(expected, evaluated(evaluates("mlp")[0], loader, pipeline(in_flight=5), **settings))


def test_a_dataset_without_length_and_workers() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            data: Any = models.vectors(22, 1).dataset
            return iter([data[index] for index in range(len(data))])

    loader = DataLoader(Stream(), 4, num_workers=1)
    module, _ = evaluates("mlp")
    assert_same(evaluated(module, loader, "auto"), evaluated(evaluates("mlp")[0], loader, pipeline()))


class Sums(nn.Module):
    """Each word's logits depend on the words before it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(models.WORDS, 8), nn.Linear(8, models.WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.words(ids).cumsum(-2))
        return y


def test_lengths_that_vary() -> None:
    torch.manual_seed(3)
    words: Any = [(torch.randint(models.WORDS, (4, length)),) for length in (7, 5, 9, 2)]
    loader: DataLoader[Any] = DataLoader(words, batch_size=None)

    def run(strategy: Any) -> list[Any]:
        torch.manual_seed(7)
        return evaluated(Evaluates(Words(Sums())), loader, strategy)

    assert_same(run("auto"), run(pipeline()))


@quick("mlp")
@pytest.mark.parametrize("name", slow_except(["mlp", "resnet", "gpt", "transformer"], "mlp", "transformer"))
def test_validation_in_the_middle_of_training(name: str) -> None:
    """Its results are right, and training does not notice."""

    def run(strategy: Any, **settings: Any) -> Any:
        module, loader = evaluates(name)
        record = fit(module, loader, val_loader=loader, strategy=strategy, **settings)
        assert record.trainer is not None
        return record, dict(record.trainer.callback_metrics), module

    record, metrics, module = run(pipeline(2, 3), val_check_interval=2)
    plain, _, _ = run(pipeline(2, 3), limit_val_batches=0)
    assert [difference(a, b, "") for a, b in zip(record.states, plain.states, strict=True)] == [None] * len(
        plain.states
    )
    expected = quiet_trainer("auto").validate(module, evaluates(name)[1], verbose=False)[0]
    assert {key: float(value) for key, value in metrics.items() if key in expected} == expected


def test_attributes_and_lists_are_there_in_order() -> None:
    module, loader = evaluates("mlp")
    assert isinstance(module, Evaluates)
    quiet_trainer(pipeline(in_flight=4)).validate(module, loader, verbose=False)
    assert module.count == 6
    assert module.seen == [0, 1, 2, 3, 4, 5]


class Writer(BasePredictionWriter):
    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.written: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, *rest: Any) -> None:
        self.written.append((prediction, list(batch_indices)))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.written.append((predictions, batch_indices))


@pytest.mark.parametrize("returned", [True, False])
def test_prediction_writers(returned: bool) -> None:
    def run(strategy: Any) -> list[Any]:
        writer = Writer("batch_and_epoch")
        trainer = quiet_trainer(strategy, callbacks=[writer])
        return [trainer.predict(Model(), vectors(23, 4), return_predictions=returned), writer.written]

    assert_same(run("auto"), run(pipeline()))


def test_a_checkpoint_is_tested(tmp_path: Path) -> None:
    module, loader = evaluates("mlp")
    trainer = quiet_trainer(pipeline(), default_root_dir=tmp_path)
    trainer.fit(module, loader)
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    expected = trainer.test(module, loader, verbose=False)
    other = quiet_trainer("auto").test(evaluates("mlp")[0], loader, tmp_path / "it.ckpt", verbose=False)
    assert expected == other


def test_weights_that_a_callback_swaps_in() -> None:
    """As WeightAveraging does around evaluation."""

    class Swaps(L.Callback):
        def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.kept = [p.detach().clone() for p in pl_module.parameters()]
            for parameter in pl_module.parameters():
                parameter.data.mul_(0.5)

        def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            for parameter, kept in zip(pl_module.parameters(), self.kept, strict=True):
                parameter.data.copy_(kept)

    def run(strategy: Any) -> Any:
        module, loader = evaluates("mlp")
        trainer = quiet_trainer(strategy, callbacks=[Swaps()])
        return trainer.validate(module, loader, verbose=False)

    assert run("auto") == run(pipeline())
