"""The life of a minibatch: which events a run raises, in which order, and in which thread."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.run.driver import Driver
from lightning_hetpipe.run.lifecycle import Extension
from tests.evaluation.evaluating import Evaluates
from tests.exact.pipelines import Pinned
from tests.exact.running import fit
from tests.support.models import mlp, vectors
from tests.support.trainers import quiet_trainer

EVENTS = {name: event for name, event in vars(Extension).items() if not name.startswith("_") and callable(event)}


def is_around(name: str) -> bool:
    return bool(inspect.signature(EVENTS[name]).return_annotation == "Around")


class Notes(Extension):
    """Notes each event, with its numbers: "<" where something opened around closes."""

    def __init__(self, noted: list[tuple[str, str]]) -> None:
        self.noted = noted

    def note(self, text: str) -> None:
        self.noted.append((text, threading.current_thread().name))


def noting(event: str) -> Callable[..., Any]:
    def told(args: tuple[Any, ...]) -> str:
        named = args if event == "doing" else (event, *args)
        shown = [getattr(each, "number", each) for each in named]
        return " ".join(str(each) for each in shown if isinstance(each, int | str))

    def tell(self: Notes, *args: Any) -> None:
        self.note(told(args))

    @contextmanager
    def around(self: Notes, *args: Any) -> Iterator[None]:
        self.note(told(args))
        yield
        self.note(f"<{told(args)}")

    return around if is_around(event) else tell


for each in EVENTS.keys() - {"section"}:
    setattr(Notes, each, noting(each))


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Events that the drivers of the test raise."""
    found: list[tuple[str, str]] = []
    original: Any = Driver.__init__

    def init(self: Any, *args: Any) -> None:
        original(self, *args)
        self.extensions.add(Notes(found))

    monkeypatch.setattr(Driver, "__init__", init)
    return found


def model() -> Any:
    torch.manual_seed(3)
    return mlp()


def events(noted: list[tuple[str, str]], runner: bool = False) -> list[str]:
    return [text for text, thread in noted if thread.startswith("hetpipe-") == runner]


def test_an_epoch_of_a_pipeline(noted: list[tuple[str, str]]) -> None:
    fit(model(), vectors(16, 4), strategy=Pinned((0, 1), 2), max_epochs=1)
    # The first minibatch runs in Lightning's own thread, and its hooks in Lightning's order.
    assert events(noted)[:3] == ["epoch_begins 1", "fetch 1", "<fetch 1"]
    after_first = events(noted)[3:]
    assert after_first[:15] == [
        *("stepped 1", "settled 1", "continues 1", "publish 1", "<publish 1", "published 1"),
        *("fetch 2", "<fetch 2", "look_ahead 2", "transferring 2", "<transferring 2", "<look_ahead 2"),
        *("fetch 3", "<fetch 3", "look_ahead 3"),
    ]
    second = after_first[after_first.index("<look_ahead 3") + 1 :]
    assert second[:10] == [
        *("wait_for_minibatch 2", "<wait_for_minibatch 2", "arrived 2", "finished 2"),
        *("stepped 2", "settled 2", "continues 2", "publish 2", "<publish 2", "published 2"),
    ]
    assert after_first[-3:] == ["discarded", "discarded", "closed"]
    assert "epoch_ends" in after_first
    # The user's steps run in the runners, each from its beginning to its end.
    assert sorted(events(noted, runner=True)) == sorted(
        text for number in (2, 3, 4) for text in (f"user_step {number}", f"<user_step {number}")
    )


def test_a_second_epoch_starts_empty(noted: list[tuple[str, str]]) -> None:
    fit(model(), vectors(8, 4), strategy=Pinned((0, 1), 2), max_epochs=2)
    second = events(noted)[events(noted).index("epoch_begins 3") :]
    assert second[1:6] == ["stepped 2", "settled 2", "publish 2", "<publish 2", "emptied 2"]
    assert second.index("<look_ahead 4") < second.index("wait_for_minibatch 3")


def test_nothing_runs_ahead_where_each_minibatch_uses_what_the_last_one_leaves(noted: list[tuple[str, str]]) -> None:
    fit(model(), vectors(12, 4), strategy=Pinned((0, 1), 2, weights="sync"), max_epochs=1)
    found = events(noted)
    assert [text for text in found if text.startswith("transferring")] == []
    second = found[found.index("stepped 1") :]
    assert second[:9] == [
        *("stepped 1", "fetch 2", "<fetch 2"),  # and now the hooks before the step
        *("settled 1", "continues 1", "publish 1", "<publish 1", "published 1", "wait_for_minibatch 2"),
    ]


def test_a_single_stage_has_no_life_in_flight(noted: list[tuple[str, str]]) -> None:
    fit(model(), vectors(8, 4), strategy=HetPipeStrategy(stages=1, in_flight=1), max_epochs=1)
    assert events(noted) == ["epoch_begins 1", "epoch_ends", "discarded", "discarded", "closed"]


def test_an_evaluation_is_a_run_of_the_same_driver(noted: list[tuple[str, str]]) -> None:
    quiet_trainer(Pinned((0, 1), 2)).predict(Evaluates(model()), vectors(12, 4))
    found = events(noted)
    assert found[:3] == ["fetch 1", "<fetch 1", "stepped 1"]
    assert found.index("wait_for_minibatch 2") < found.index("finished 2") < found.index("stepped 2")
    assert not [text for text in found if text.startswith("emptied")]
    assert found[-1] == "closed"
