"""Values that minibatches in flight share: a step that changes one is refused by name."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn

from lightning_hetpipe.rules.versions import STASH, SYNC, Versions
from lightning_hetpipe.run.extensions.module_attributes import Attributes
from lightning_hetpipe.run.extensions.shared_values import SharedValues
from lightning_hetpipe.run.lifecycle import Extension, Extensions
from tests.support.small import refused


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Kept:
    """An object of a user's class."""


class Window(list[Any]):
    """A list of a user's class."""


class Counting(nn.Identity):
    """A part without weights that counts its calls."""

    calls = 0

    def forward(self, x: Any) -> Any:
        self.calls = self.calls + 1
        return x


class Module(L.LightningModule):
    """Its step changes ``held`` by ``change``."""

    def __init__(self, held: Any, change: Callable[[Any], object]) -> None:
        super().__init__()
        self.held = held
        self.seen = SimpleNamespace(steps=[])
        self.part = Counting()
        idle: Any = nn.Identity()
        idle.calls = 0
        self.idle = idle
        self.change = change

    def step(self) -> None:
        self.change(self)


def views() -> Any:
    run = torch.zeros(2)
    return SimpleNamespace(run=run, window=run.numpy(), rest=torch.from_numpy(np.zeros(3)[1:]), last=run[1:])


def in_flight(module: Module) -> Extensions:
    extensions = Extensions()
    versions = Versions(STASH, 3)
    extensions.add(SharedValues(module, [], lambda: versions), Attributes(module, lambda: versions))
    return extensions


def sections(module: Module, extensions: Extensions, minibatch: int) -> None:
    section = extensions.section(minibatch)
    section.enter()
    try:
        module.step()
    finally:
        section.leave()


Kinds = dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]

DEEP: Kinds = {
    "an object in a list in a dict": (
        lambda: {"a": [[SimpleNamespace(count=0)]]},
        lambda module: setattr(module.held["a"][0][0], "count", 1),
    ),
    "slots": (Slotted, lambda module: setattr(module.held, "count", 1)),
    "a list of a user's class": (Window, lambda module: module.held.append(1)),
    "the middle of a list": (
        lambda: [[0] for _ in range(50)],
        lambda module: module.held[25].append(1),
    ),
    "a tensor three steps deep": (
        lambda: [[[torch.zeros(2)]]],
        lambda module: module.held[0][0][0].add_(1),
    ),
    "an array three steps deep": (
        lambda: [[deque([np.zeros(2)])]],
        lambda module: module.held[0][0][0].__iadd__(1),
    ),
    "a tensor with a view": (views, lambda module: module.held.run.add_(1)),
    "an array that views a tensor": (views, lambda module: module.held.window.__iadd__(1)),
    "one tensor under two names": (lambda: [torch.zeros(1)] * 2, lambda module: module.held[0].add_(1)),
    "an attribute of a part": (list, lambda module: setattr(module.idle, "calls", module.idle.calls + 1)),
    "a part that counts": (list, lambda module: module.part(1)),
}


@pytest.mark.parametrize("kind", DEEP)
def test_a_step_that_changes_what_lies_deep_is_refused(kind: str) -> None:
    made, change = DEEP[kind]
    module = Module(made(), change)
    with refused("batch 1", "of Module", "set in_flight=1"):
        sections(module, in_flight(module), 1)


def test_a_later_change_of_contents_that_nobody_counts_is_refused() -> None:
    added = [0] * 99 + [1]
    module = Module([[[np.zeros(2)]]], lambda module: module.held[0][0][0].__iadd__(added.pop(0)))
    extensions = in_flight(module)
    for minibatch in range(1, 100):
        sections(module, extensions, minibatch)
    with refused("the step of batch 100 changes held[0][0][0] of Module"):
        sections(module, extensions, 100)


def test_an_error_that_user_code_swallows_comes_again() -> None:
    module = Module(Slotted(), lambda module: setattr(module.held, "count", 1))
    extensions = in_flight(module)
    with refused("changes held.count (it was 0, and is 1)"):
        sections(module, extensions, 1)
    with refused("the step of batch 1"):
        extensions.tell(Extension.arrived, 1)


HARMLESS: Kinds = {
    "a list": (list, lambda module: module.held.append(1)),
    "a list in a dict": (lambda: {"a": []}, lambda module: module.held["a"].append(1)),
    "an attribute": (lambda: 0, lambda module: setattr(module, "held", module.held + 1)),
    "objects that are set anew": (lambda: [[[0]]], lambda module: setattr(module, "held", [[[1]]])),
    "an object": (SimpleNamespace, lambda module: setattr(module.held, "count", 1)),
    "a tensor without views": (views, lambda module: module.held.rest.add_(1)),
    "values that are only read": (lambda: {"a": [[Slotted()]]}, lambda module: module.held["a"][0][0].count),
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_what_each_minibatch_has_of_its_own_is_not_refused(kind: str) -> None:
    made, change = HARMLESS[kind]
    module = Module(made(), change)
    extensions = in_flight(module)
    for minibatch in range(1, 8):
        sections(module, extensions, minibatch)
        extensions.tell(Extension.arrived, minibatch)
        extensions.tell(Extension.continues, minibatch)


def test_nothing_is_refused_while_nothing_runs_ahead() -> None:
    module = Module(Slotted(), lambda module: setattr(module.held, "count", module.held.count + 1))
    extensions = Extensions()
    extensions.add(SharedValues(module, [], lambda: Versions(SYNC, 1)))
    sections(module, extensions, 1)
    assert module.held.count == 1


def test_replaced_values_are_not_kept() -> None:
    module = Module(Kept(), lambda module: module.held)
    extensions = Extensions()
    extensions.add(SharedValues(module, [], lambda: Versions(STASH, 3)))
    sections(module, extensions, 1)
    old = weakref.ref(module.held)
    module.held = Kept()
    sections(module, extensions, 2)
    assert old() is None
