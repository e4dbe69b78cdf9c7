"""Divided layers that torch.compile has compiled: a backend that keeps torch's own operators changes no bit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn

from tests.exact.pipelines import Pinned
from tests.exact.running import assert_same_run, fit
from tests.split.test_fits import colours, words_task
from tests.support.marks import quick
from tests.support.models import Task, sentences

SPLIT = {0: (2, 1), 1: (1, 2)}


def image_task() -> Task:
    """Few layers, as a region of each operator is compiled: a convolution, a norm, dropout and a linear layer."""
    torch.manual_seed(2)
    first = [nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(inplace=True)]
    return Task(nn.Sequential(*first, nn.Dropout(0.3), nn.Flatten(), nn.Linear(96, 5)))


TASKS: dict[str, Any] = {"images": (image_task, colours), "words": (words_task, sentences)}


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Torch keeps for the whole process what it has compiled."""
    yield
    torch.compiler.reset()


@quick("images-None")
@pytest.mark.parametrize("precision", [None, "bf16-mixed"])
@pytest.mark.parametrize("name", TASKS)
@pytest.mark.filterwarnings("error:torch.compile cannot compile")
def test_bit_identical_to_graphs_as_they_are(name: str, precision: Any) -> None:
    make, load = TASKS[name]
    loader = load(14 if precision else 16, 4)
    plain, compiled = (
        fit(make(), loader, strategy=Pinned([0, 2], 2, split=SPLIT, **settings), precision=precision)
        for settings in ({}, {"compile": "aot_eager"})
    )
    assert_same_run(plain, compiled)


def test_each_members_graph_is_compiled_in_its_thread_and_one_that_cannot_be_runs_as_it_is() -> None:
    compiled: list[str] = []

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        compiled.append(threading.current_thread().name)
        if len(compiled) == 1:
            raise ValueError("not this one")
        return graph.forward

    strategy = Pinned([0], 2, split={0: (2, 1)}, compile={"backend": backend})
    with pytest.warns(UserWarning, match="cannot compile a part of layers net.0 to net.5, .* not this one"):
        record = fit(image_task(), colours(12, 4), strategy=strategy)
    assert_same_run(fit(image_task(), colours(12, 4), strategy=Pinned([0], 2, split={0: (2, 1)})), record)
    assert set(compiled) == {"hetpipe-stage-0", "hetpipe-stage-0-member-1"}
