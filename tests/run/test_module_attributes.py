"""Attributes of the LightningModule: who sees which assignment, while minibatches are in flight."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_hetpipe.rules.versions import STASH, Versions
from lightning_hetpipe.run.extensions.module_attributes import Attributes
from tests.exact.pipelines import delayed, even
from tests.exact.running import fit
from tests.oracle import Batch, Outputs
from tests.support.models import CLASSES, SGD, Learner, vectors


def begun(in_flight: int = 3, **held: Any) -> tuple[Any, Attributes]:
    module: Any = type("Module", (L.LightningModule,), {})()
    for name, value in held.items():
        setattr(module, name, value)
    return module, Attributes(module, lambda: Versions(STASH, in_flight))


def test_lightnings_loop_sees_what_its_step_has_set() -> None:
    module, attributes = begun(x=0)
    for minibatch in (1, 2, 3):
        with attributes.seen(minibatch, 1):
            module.x = minibatch
        assert module.x == 0
    for minibatch in (1, 2, 3):
        attributes.arrived(minibatch)
        assert module.x == minibatch
        attributes.continues(minibatch)


def test_a_stretch_sees_its_own_and_the_same_place_of_earlier_minibatches() -> None:
    module, attributes = begun(x="start")
    with attributes.seen(1, 1):
        module.x = "1, first"
    with attributes.seen(2, 1):
        assert module.x == "1, first"
    with attributes.seen(1, 2):
        assert module.x == "1, first"
        module.x = "1, second"
    with attributes.seen(3, 1):
        assert module.x == "1, first"  # whether or not that second stretch has run by now
    with attributes.seen(2, 2):
        assert module.x == "1, second"
    attributes.arrived(1)
    assert module.x == "1, second"
    attributes.continues(1)
    with attributes.seen(4, 1):
        assert module.x == "1, second"  # as the version of its weights is that after minibatch 1


def test_what_callbacks_set_belongs_to_their_version() -> None:
    module, attributes = begun(in_flight=2, beta=0)
    for version in range(1, 6):
        module.beta = version
        with attributes.seen(version + 1, 1):
            assert module.beta == max(0, version - 1)  # not yet published
        assert module.beta == version
        attributes.continues(version)
        with attributes.seen(version + 1, 2):
            assert module.beta == version - 1
        with attributes.seen(version + 2, 1):
            assert module.beta == version


def test_what_a_callback_sets_comes_before_the_minibatch_that_sees_it() -> None:
    module, attributes = begun(in_flight=2, x=0)
    with attributes.seen(1, 1):
        module.x = 1
    with attributes.seen(2, 1):
        module.x = 2
    attributes.arrived(1)
    module.x = -1
    attributes.continues(1)
    with attributes.seen(2, 2):
        assert module.x == 2
    with attributes.seen(3, 1):
        assert module.x == -1  # as of version 1
        module.x = 3
    attributes.arrived(2)
    assert module.x == 2
    module.x = -2
    attributes.continues(2)
    with attributes.seen(4, 1):
        assert module.x == -2
    attributes.arrived(3)
    assert module.x == 3


def test_a_counter_that_a_callback_resets_starts_anew() -> None:
    module, attributes = begun(in_flight=3, count=0)
    seen = []
    for step in range(1, 13):
        for minibatch in {1: (1, 2, 3)}.get(step, (step + 2,)):
            with attributes.seen(minibatch, 1):
                module.count += 1
                seen.append(module.count)
        attributes.arrived(step)
        if step % 5 == 0:
            module.count = 0
        attributes.continues(step)
    assert seen == [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 1, 2]


def test_new_and_deleted_attributes() -> None:
    module, attributes = begun(old=1)
    with attributes.seen(1, 1):
        module.new = 5
        del module.old
    assert module.old == 1
    assert not hasattr(module, "new")
    with attributes.seen(2, 1):
        assert not hasattr(module, "old")
        assert module.new == 5
    attributes.arrived(1)
    assert not hasattr(module, "old")
    assert module.new == 5
    attributes.continues(1)
    del module.new
    attributes.continues(2)
    with attributes.seen(5, 1):
        assert not hasattr(module, "new")


def test_only_what_somebody_may_still_see_is_kept() -> None:
    module, attributes = begun(in_flight=3, x=0)
    for minibatch in range(1, 200):
        with attributes.seen(minibatch, 1):
            module.x = minibatch
        if minibatch > 2:
            attributes.arrived(minibatch - 2)
            attributes.continues(minibatch - 2)
    assert len(attributes._set["x"]) <= 5


def test_a_new_start_forgets_what_was_discarded() -> None:
    module, attributes = begun(x=0)
    with attributes.seen(1, 1):
        module.x = 1
    attributes.emptied(0)
    with attributes.seen(1, 1):
        assert module.x == 0


# In runs.


class Told(Learner):
    """Keeps its batch on itself, and takes down what others have told it."""

    def __init__(self) -> None:
        super().__init__(SGD)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.seen: dict[int, list[int]] = {}
        self.step = 0

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        self.scale = batch[0][0, 0].item()
        return batch

    def training_step(self, batch: Batch, batch_idx: int) -> Outputs:
        self.batch = batch
        told = [self.step]
        assert self.scale == batch[0][0, 0].item()
        logits = self.net(batch[0])
        told.append(self.step)
        assert self.batch is batch
        self.seen[batch_idx] = told
        self.last = batch_idx
        return {"loss": F.cross_entropy(logits, batch[1])}


class Tells(L.Callback):
    def __init__(self) -> None:
        self.right: list[bool] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.step = batch_idx + 0.5

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.right.append(pl_module.batch is batch and pl_module.last == batch_idx)
        pl_module.step = batch_idx + 1


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_callbacks_and_training_step_see_each_others(in_flight: int, seed: int) -> None:
    torch.manual_seed(0)
    module, tells = Told(), Tells()
    fit(module, vectors(26, 4), [tells], strategy=delayed(even(3, 3, in_flight), seed), max_epochs=1)
    assert tells.right == [True] * 7
    for index in range(1, 7):
        version = index + 1 - in_flight
        # As of its version; the pipeline starts within step 1, after its on_train_batch_start.
        expected = index + 0.5 if in_flight == 1 else version if version > 0 else 0.5
        assert module.seen[index] == [expected, expected]
