"""Attributes of the LightningModule: who sees which assignment, while minibatches are in flight."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
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
from tests.support.small import refused


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


def test_a_section_sees_its_own_and_the_same_place_of_earlier_minibatches() -> None:
    module, attributes = begun(x="start")
    with attributes.seen(1, 1):
        module.x = "1, first"
    with attributes.seen(1, 2):
        assert module.x == "1, first"
        module.x = "1, second"
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
    assert len(attributes._own.edits) <= 5


def test_a_new_start_forgets_what_was_discarded() -> None:
    module, attributes = begun(x=0)
    with attributes.seen(1, 1):
        module.x = 1
    attributes.emptied(0)
    with attributes.seen(1, 1):
        assert module.x == 0


# A state that one step hands on to the next.


@pytest.mark.parametrize("sets_first", [False, True])
def test_a_read_of_what_the_last_step_sets_later_is_refused(sets_first: bool) -> None:
    """Refuse it whether or not the value is set by the time of the read."""
    module, attributes = begun(hidden=0)

    def read() -> None:
        with attributes.seen(2, 1):
            assert module.hidden == 0

    def write() -> None:
        with attributes.seen(1, 2):
            module.hidden = 1

    first, second = (write, read) if sets_first else (read, write)
    first()
    with refused("'hidden' of Module is read by the step of batch 2", "batch 1, which", "set in_flight=1"):
        second()
    with refused("'hidden'"):
        attributes.arrived(1)  # also where user code has swallowed the error


def test_a_step_that_sets_before_it_reads_hands_nothing_on() -> None:
    module, attributes = begun(phase="none")
    for minibatch in (1, 2, 3):
        with attributes.seen(minibatch, 1):
            module.phase = "first"
            assert module.phase == "first"
    for minibatch in (1, 2, 3):
        with attributes.seen(minibatch, 2):
            assert module.phase == "first"  # also where the minibatch before has set the same object
            module.phase = "second"
        with attributes.seen(minibatch, 3):
            assert module.phase == "second"


def test_a_container_that_is_read_before_the_last_step_fills_it_is_refused() -> None:
    module, attributes = begun(queue=[])
    with attributes.seen(2, 1):
        assert not module.queue
    with refused("'queue' of Module"), attributes.seen(1, 2):
        module.queue.append(1)


def test_places_that_only_append_read_nothing() -> None:
    module, attributes = begun(calls=[])
    for section in (1, 2):
        for minibatch in (3, 2, 1) if section == 1 else (1, 2, 3):
            with attributes.seen(minibatch, section):
                module.calls.append((minibatch, section))
    for minibatch in (1, 2, 3):
        attributes.arrived(minibatch)
        assert module.calls[-2:] == [(minibatch, 1), (minibatch, 2)]
    assert len(module.calls) == 6


def test_a_minibatch_keeps_its_own_tensors() -> None:
    module, attributes = begun(batch=None)
    given = torch.zeros(2)
    with attributes.seen(1, 1):
        module.batch = given
    with attributes.seen(1, 2):
        assert module.batch is given
        module.batch.add_(1)
    with refused("'batch' of Module is read by the step of batch 2"), attributes.seen(2, 1):
        module.batch.sum()


def test_nobody_watches_afterwards() -> None:
    module, attributes = begun(x=0)
    with attributes.seen(1, 1):
        module.x += 1
    attributes.closed()
    assert "x" not in vars(type(module))
    module.x = 7
    assert vars(module)["x"] == 7


# Contents.


def fill_list(module: Any, minibatch: int) -> None:
    module.kept.append(minibatch)


def fill_dict(module: Any, minibatch: int) -> None:
    module.kept[minibatch] = minibatch


def fill_nested(module: Any, minibatch: int) -> None:
    module.kept["all"].append(minibatch)


def fill_object(module: Any, minibatch: int) -> None:
    module.kept.last = minibatch


def add_to_tensor(module: Any, minibatch: int) -> None:
    module.kept.add_(1)


def add_to_array(module: Any, minibatch: int) -> None:
    module.kept[0] += 1


def add_in_list(module: Any, minibatch: int) -> None:
    module.kept[0].add_(1)


FILLS: dict[str, tuple[Callable[[], Any], Callable[[Any, int], Any], Callable[[Any], Any]]] = {
    "list": (list, fill_list, list),
    "deque": (lambda: deque(maxlen=2), fill_list, list),
    "set": (set, lambda module, minibatch: module.kept.add(minibatch), set),
    "dict": (dict, fill_dict, dict),
    "counter": (Counter, lambda module, minibatch: module.kept.update([minibatch]), dict),
    "nested": (lambda: {"all": []}, fill_nested, lambda kept: list(kept["all"])),
    "object": (SimpleNamespace, fill_object, lambda kept: dict(vars(kept))),
    "tensor": (lambda: torch.zeros(1), add_to_tensor, lambda kept: kept.item()),
    "array": (lambda: np.zeros(1), add_to_array, lambda kept: kept.item()),
    "tensor in a list": (lambda: [torch.zeros(1)], add_in_list, lambda kept: kept[0].item()),
    "window by hand": (lambda: [0, 0], lambda m, p: (m.kept.pop(0), m.kept.append(p)), list),
    "turned window": (
        lambda: deque([0, 1, 0, 1], 4),
        lambda m, p: (m.kept.appendleft(p % 2), m.kept.rotate(1)),
        list,
    ),
    "item that is set": (lambda: [0], lambda m, p: m.kept.__setitem__(0, p), list),
}


@pytest.mark.parametrize("kind", FILLS)
def test_contents_are_those_of_the_reader(kind: str) -> None:
    made, fill, value = FILLS[kind]
    module, attributes = begun(kept=made())
    plain: Any = SimpleNamespace(kept=made())
    after = [value(plain.kept)]
    for minibatch in range(1, 6):
        fill(plain, minibatch)
        after.append(value(plain.kept))
    for minibatch in range(1, 4):
        with attributes.seen(minibatch, 1):
            fill(module, minibatch)
            assert value(module.kept) == after[minibatch]
        assert value(module.kept) == after[0]
    for step in range(1, 6):
        attributes.arrived(step)
        assert value(module.kept) == after[step]
        attributes.continues(step)
        if step + 3 < 6:
            with attributes.seen(step + 3, 1):
                fill(module, step + 3)
                assert value(module.kept) == after[step + 3]


def test_a_list_that_a_callback_clears() -> None:
    module, attributes = begun(in_flight=3, outputs=[])
    held, shown = module.outputs, []
    for step in range(1, 8):
        for minibatch in {1: (1, 2, 3)}.get(step, (step + 2,)):
            with attributes.seen(minibatch, 1):
                module.outputs.append(minibatch)
        attributes.arrived(step)
        shown.append([*held])
        module.outputs.clear()
        attributes.continues(step)
    assert shown == [[step] for step in range(1, 8)]
    assert module.outputs is held


def test_containers_that_nobody_uses_any_more_are_forgotten() -> None:
    module, attributes = begun(in_flight=3, made={})
    for minibatch in range(1, 100):
        with attributes.seen(minibatch, 1):
            module.made = {"x": minibatch}
        with attributes.seen(minibatch, 2):
            module.made["y"] = minibatch
        attributes.arrived(minibatch)
        assert module.made == {"x": minibatch, "y": minibatch}
        attributes.continues(minibatch)
    assert len(attributes._containers) < 20
    assert len(attributes._read) < 20


def test_a_tensor_that_is_changed_later_in_the_run_is_refused() -> None:
    module, attributes = begun(bank=torch.zeros(3))
    bank = module.bank
    for minibatch in (1, 2):
        with attributes.seen(minibatch, 1):
            module.bank.sum()
    assert module.bank is bank
    told = "'bank' of Module holds a tensor that the step of batch 3 has changed in place"
    with refused(told), attributes.seen(3, 1):
        module.bank.add_(1)


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


def test_a_list_whose_append_was_taken_before_a_call_of_a_module() -> None:
    module, attributes = begun(losses=[])
    for minibatch in (1, 2, 3):
        with attributes.seen(minibatch, 1):
            append = module.losses.append
        with attributes.seen(minibatch, 2):
            append(minibatch)
        assert module.losses == []
    for minibatch in (1, 2, 3):
        attributes.arrived(minibatch)
        assert module.losses == [*range(1, minibatch + 1)]
        attributes.continues(minibatch)


def test_a_dict_that_a_step_keeps_over_a_call_of_a_module() -> None:
    module, attributes = begun(kept={})
    with attributes.seen(1, 1):
        kept = module.kept
    with attributes.seen(1, 2):
        kept["last"] = 1
    assert module.kept == {}
    with refused("'kept' of Module is read by the step of batch 2"), attributes.seen(2, 1):
        module.kept.get("last")


def test_a_tensor_that_a_step_keeps_over_a_call_of_a_module() -> None:
    module, attributes = begun(bank=torch.zeros(1))
    with attributes.seen(1, 1):
        bank = module.bank
    with refused("'bank' of Module holds a tensor that the step of batch 1 has got before"), attributes.seen(1, 2):
        bank.add_(1)


@pytest.mark.parametrize("made", [list, lambda: deque(maxlen=2), lambda: deque([0, 0], maxlen=2)])
def test_a_container_that_is_read_after_it_was_filled(made: Callable[[], Any]) -> None:
    module, attributes = begun(queue=made())
    plain = made()
    for minibatch in (1, 2, 3):
        plain.append(minibatch)
        with attributes.seen(minibatch, 1):
            module.queue.append(minibatch)
            assert list(module.queue) == list(plain)
            module.queue.append(0)
        plain.append(0)
    for minibatch in (1, 2, 3):
        attributes.arrived(minibatch)
        attributes.continues(minibatch)
    assert module.queue == plain
