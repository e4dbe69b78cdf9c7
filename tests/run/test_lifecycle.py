"""The life of a minibatch: which events a run raises, in which order, and in which thread."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.run import lifecycle
from lightning_hetpipe.run.driver import Driver
from lightning_hetpipe.run.lifecycle import Extension
from tests.evaluation.evaluating import Evaluates
from tests.exact.pipelines import Pinned
from tests.exact.running import fit
from tests.support.models import mlp, vectors
from tests.support.trainers import quiet_trainer

EVENTS = {name: event for name, event in vars(Extension).items() if not name.startswith("_")}


def is_around(name: str) -> bool:
    return bool(inspect.signature(EVENTS[name]).return_annotation == "Around")


class Notes(Extension):
    """Notes each event, with its numbers: "<" where something opened around closes."""

    def __init__(self, noted: list[tuple[str, str]]) -> None:
        self.noted = noted

    def note(self, text: str) -> None:
        self.noted.append((text, threading.current_thread().name))


def noting(name: str) -> Callable[..., Any]:
    def numbers(args: tuple[Any, ...]) -> str:
        shown = [getattr(arg, "number", arg) for arg in args]
        return " ".join([name, *(str(each) for each in shown if isinstance(each, int))])

    def event(self: Notes, *args: Any) -> None:
        self.note(numbers(args))

    @contextmanager
    def around(self: Notes, *args: Any) -> Iterator[None]:
        self.note(numbers(args))
        yield
        self.note(f"<{name} {args[0]}")

    return around if is_around(name) else event


for each in EVENTS.keys() - {"section"}:
    setattr(Notes, each, noting(each))


def test_an_extension_takes_the_place_of_another() -> None:
    heard: list[tuple[str, str]] = []
    extensions, first, second = lifecycle.Extensions(), Notes(heard), Notes([])
    extensions.add(first, second)
    with extensions.around(Extension.inline_backward, 1):
        extensions.replace([first], Notes([]))
        extensions.tell(Extension.stepped, 1)
    assert [text for text, _ in heard] == ["inline_backward 1", "<inline_backward 1"]
    assert second.noted == [("inline_backward 1", ANY), ("stepped 1", ANY), ("<inline_backward 1", ANY)]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Events that the drivers of the test raise."""
    found: list[tuple[str, str]] = []
    original = Driver.__init__

    def init(self: Any, loop: Any) -> None:
        original(self, loop)
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
    assert events(noted)[:3] == ["epoch_begins 1", "fetching 1", "<fetching 1"]
    # It runs in Lightning's own thread, and its hooks in Lightning's order.
    assert events(noted)[3:7] == ["inline_step 1", "<inline_step 1", "inline_output 1", "inline_backward 1"]
    placed, *after_first = events(noted)[events(noted).index("<inline_backward 1") + 1 :]
    assert placed == "placed"
    assert after_first[:15] == [
        *("stepped 1", "settled 1", "continues 1", "publishing 1", "<publishing 1", "published 1"),
        *("fetching 2", "<fetching 2", "transferring 2", "<transferring 2", "submitting 2", "submitted 2 0"),
        *("fetching 3", "<fetching 3", "transferring 3"),
    ]
    second = after_first[after_first.index("submitted 3 1") + 1 :]
    assert second[:10] == [
        *("waiting 2", "<waiting 2", "arrived 2", "finished 2"),
        *("stepped 2", "settled 2", "continues 2", "publishing 2", "<publishing 2", "published 2"),
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
    assert second[1:6] == ["stepped 2", "settled 2", "publishing 2", "<publishing 2", "emptied 2"]
    assert "submitted 3 2" in second
    assert "submitted 4 2" in second


def test_nothing_runs_ahead_where_each_minibatch_uses_what_the_last_one_leaves(noted: list[tuple[str, str]]) -> None:
    fit(model(), vectors(12, 4), strategy=Pinned((0, 1), 2, weights="sync"), max_epochs=1)
    found = events(noted)
    assert [text for text in found if text.startswith("transferring")] == []
    second = found[found.index("stepped 1") :]
    assert second[:9] == [
        *("stepped 1", "fetching 2", "<fetching 2"),  # and now the hooks before the step
        *("settled 1", "continues 1", "publishing 1", "<publishing 1", "published 1", "submitting 2"),
    ]


def test_a_single_stage_has_no_life_in_flight(noted: list[tuple[str, str]]) -> None:
    fit(model(), vectors(8, 4), strategy=HetPipeStrategy(stages=1, in_flight=1), max_epochs=1)
    inline = [
        text
        for p in (1, 2)
        for text in (
            *(f"inline_step {p}", f"<inline_step {p}", *([f"computed {p}"] if p > 1 else []), f"inline_output {p}"),
            *(f"inline_backward {p}", f"<inline_backward {p}", f"computed {p}"),
        )
    ]
    assert events(noted) == ["epoch_begins 1", *inline, "epoch_ends", "discarded", "discarded", "closed"]


def test_an_evaluation_is_a_run_of_the_same_driver(noted: list[tuple[str, str]]) -> None:
    quiet_trainer(Pinned((0, 1), 2)).predict(Evaluates(model()), vectors(12, 4))
    found = events(noted)
    assert found[:3] == ["fetching 1", "<fetching 1", "inline_step 1"]
    assert found.index("stepped 1") < found.index("waiting 2") < found.index("finished 2") < found.index("stepped 2")
    assert not [text for text in found if text.startswith("emptied")]
    assert found[-1] == "closed"


def test_the_table_says_all_events() -> None:
    table = str(lifecycle.__doc__)
    rows = dict(re.findall(r"^(\w+)\([^)]*\) +(\*around\*)?", table, re.MULTILINE))
    assert rows.keys() == EVENTS.keys()
    assert {name for name, around in rows.items() if around} == {name for name in EVENTS if is_around(name)} | {
        "section"
    }
