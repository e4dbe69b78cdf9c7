"""Evaluations whose batches hand something on: they run one after the other, to the plain values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_hetpipe.errors import SettingError
from tests.evaluation.evaluating import pipeline
from tests.support.models import CLASSES, vectors
from tests.support.trainers import quiet_trainer


class Slots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Items(list[int]):
    """A list of a class of the user's."""


class Carries(L.LightningModule):
    """Predicts with ``act``, which is given the module, the output and whether the module was called already."""

    def __init__(self, act: Callable[[Any, bool], float]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.act = act
        self.last, self.seen, self.slots, self.items = 0.0, [0.0], Slots(), Items()
        self.nested = {"a": [[0] for _ in range(100)]}
        self.order = OrderedDict(a=1, b=2)
        part: Any = nn.Identity()
        part.count = 0
        self.part = part
        self.save_hyperparameters({"factor": 1.0})
        self.register_buffer("total", torch.zeros(()))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        before = self.act(self, False)
        return self.net(batch[0]) * before + self.act(self, True)


def last(task: Any, after: bool) -> float:
    if after:
        task.last += 1.0
    return float(task.last)


def appended(task: Any, after: bool) -> float:
    if after:
        task.seen.append(task.seen[-1] + 1)
    return float(task.seen[-1])


def slots(task: Any, after: bool) -> float:
    task.slots.count += after
    return float(task.slots.count)


def items(task: Any, after: bool) -> float:
    if after:
        task.items.append(1)
    return float(len(task.items))


def nested(task: Any, after: bool) -> float:
    task.nested["a"][70][0] += after
    return float(task.nested["a"][70][0])


def order(task: Any, after: bool) -> float:
    if after:
        task.order.move_to_end(next(iter(task.order)))
    return float(next(iter(task.order)) == "a")


def part(task: Any, after: bool) -> float:
    task.part.count += after
    return float(task.part.count)


def hparams(task: Any, after: bool) -> float:
    if after:
        task.hparams.factor *= 1.5
    return float(task.hparams.factor)


def buffer(task: Any, after: bool) -> float:
    task.total.data += after
    return float(task.total)


KINDS: dict[Callable[[Any, bool], float], str] = {
    last: "last",
    appended: "seen",
    slots: "slots",
    items: "items",
    nested: "nested",
    order: "order",
    part: "part.count",
    hparams: "_hparams",
    buffer: "the buffer 'total'",
}


def predicted(act: Callable[[Any, bool], float], strategy: Any) -> Any:
    torch.manual_seed(3)
    return quiet_trainer(strategy).predict(Carries(act), vectors(24, 4))


@pytest.mark.parametrize("act", KINDS, ids=lambda act: act.__name__)
def test_what_batches_hand_on_is_as_in_a_plain_run(act: Callable[[Any, bool], float]) -> None:
    told = f"the evaluation of 'net' .*: code around it changes .*{KINDS[act]}"
    with pytest.warns(UserWarning, match=told):
        ours = predicted(act, pipeline())
    assert all(map(torch.equal, predicted(act, "auto"), ours))


def counted(task: Any, after: bool) -> float:
    """Reads and sets an attribute before the call, as batches do it in order."""
    if not after:
        task.last += 1
    return float(task.last)


def noted(task: Any, after: bool) -> float:
    if after:
        task.seen.append(1.0)
    return 1.0


@pytest.mark.parametrize("act", [counted, noted])
def test_what_batches_do_in_order_stays_in_the_pipeline(
    act: Callable[[Any, bool], float], recwarn: pytest.WarningsRecorder
) -> None:
    seen: set[int] = set()
    strategy = pipeline()
    strategy._before_pass = lambda stage, work, batch: seen.add(batch)
    ours = predicted(act, strategy)
    assert all(map(torch.equal, predicted(act, "auto"), ours))
    assert seen == set(range(2, 7))
    assert not [each for each in recwarn if "does not run in the pipeline" in str(each.message)]


class Zeroes(L.Callback):
    def on_predict_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        nn.init.zeros_(pl_module.net[0].weight)


def test_a_refusal_names_the_kind_of_evaluation() -> None:
    trainer = quiet_trainer(pipeline(), callbacks=[Zeroes()])
    with pytest.raises(SettingError, match=r"in this prediction, 'net.0.weight' was changed by batch"):
        trainer.predict(Carries(noted), vectors(24, 4))
