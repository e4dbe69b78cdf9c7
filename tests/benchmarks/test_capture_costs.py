"""Costs of capture: how memory and time are counted, and how the report shows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks import capture_costs_worker
from benchmarks.capture_costs import fixed_cost, measure, memory_ratio, report
from benchmarks.capture_costs_models import TIMED, Model, few_vectors, vectors
from benchmarks.capture_costs_worker import activations, captured, in_turns, memory, through_graphs, times
from benchmarks.harness import Measurement
from tests.conftest import Clock
from tests.support.captured_models import Whole
from tests.support.models import CLASSES

MACHINE = {"cpu": "a cpu", "cores_used": "CPUs 0 and 1", "load_average": 0.0, "torch": "2", "lightning": "2"}
SECONDS = {"capture_s": 2.0, "again_s": 1.0, "layers": 7.0, "few_eager_s": 0.001, "few_graph_s": 0.0015}
BYTES = {"capture_s": 3.0, "parameters": 4e8, "activations": 6e8, "again": 7e8, "layer_times": 2e9}


def measured(**notes: float) -> Measurement:
    return Measurement("a model", rate=1.0, cores=1.0, threads=1, loss=None, notes=notes)


def timed(eager: float, graph: float) -> Measurement:
    return measured(**SECONDS, eager_s=eager, graph_s=graph, ratio=graph / eager)


class Squares(nn.Module):
    """Keeps for its backward pass what comes out of ``weight``, and nothing else of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (x @ self.weight).square()
        return y


def test_activations_are_what_the_backward_pass_needs_of_the_batch() -> None:
    batch = (torch.randn(10, 6), torch.randint(CLASSES, (10,)))
    # The product; its square, no; log-softmax's output; the weight of the loss, one number. Not the batch, and not the
    # matrix.
    assert activations(Whole(Squares()), batch) == 4 * (10 * CLASSES + 10 * CLASSES + 1)


class Clocks(Clock):
    """One that shows the time of the CPU, too."""

    process_time = Clock.perf_counter


def test_variants_take_turns_and_their_contexts_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clocks()
    monkeypatch.setattr(capture_costs_worker, "time", clock)
    order: list[str] = []

    @contextmanager
    def slow() -> Iterator[None]:
        clock.now += 100
        yield
        clock.now += 100

    def step(name: str, seconds: float) -> None:
        order.append(name)
        clock.now += seconds + 50 * (len(order) <= 6)  # the first ones, which warm up, take longer

    found = in_turns((lambda: step("a", 2), slow), (lambda: step("b", 3), slow), seconds=1)
    assert order == ["a", "b", "b", "a"] * 3
    assert found == [[2] * 3, [3] * 3]


@pytest.mark.slow
def test_what_is_compared_computes_the_same() -> None:
    model = TIMED["ResNet"]
    learner, pieces, seconds = captured(model, model.few())
    batch = model.few()

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(learner.compute(batch)["loss"], list(learner.parameters())))

    expected, calls = gradients(), []
    convolution = next(module for module in learner.modules() if isinstance(module, nn.Conv2d))
    convolution.register_forward_hook(lambda *_: calls.append("hook"))
    with through_graphs(pieces):
        assert all(map(torch.equal, gradients(), expected))
    assert not calls  # the graph has run, not the module
    gradients()
    assert calls
    assert seconds > 0


@pytest.mark.slow
def test_times_of_a_model_that_draws() -> None:
    notes = times(replace(TIMED["GPT, dropout 0.1"], samples=2), seconds=0.01)
    assert notes["layers"] == 7
    assert min(notes.values()) > 0


@pytest.mark.slow
def test_the_watched_step_has_its_activations_in_memory() -> None:
    notes = memory(Model(lambda: Whole(Squares()), vectors, 500_000, few_vectors))
    assert notes["parameters"] == 4 * 6 * CLASSES
    assert notes["activations"] == 4 * (2 * 500_000 * CLASSES + 1)
    assert min(notes[part] for part in ("watched", "capture", "again")) >= notes["activations"]


@pytest.mark.slow
def test_a_process_of_its_own_has_one_thread() -> None:
    found = measure("times", "GPT", seconds=0.01)
    assert found.name == "GPT"
    assert found.threads == 1
    assert found.notes["layers"] == 7


def test_figures() -> None:
    assert fixed_cost(timed(0.02, 0.03)) == pytest.approx(0.0005)
    # The most until the end of capture counts, whichever part it was in; what comes after does not.
    assert memory_ratio(measured(**BYTES, watched=1.3e9, capture=1.1e9)) == pytest.approx(1.3)
    assert memory_ratio(measured(**BYTES, watched=1.0e9, capture=1.1e9)) == pytest.approx(1.1)


def test_the_report_says_which_target_was_met_and_what_failed() -> None:
    times = [
        {"fast": timed(0.100, 0.101), "slow": timed(0.100, 0.103)},
        {"fast": timed(0.200, 0.202), "slow": timed(0.102, 0.1071)},
        {"slow": timed(0.050, 0.0505)},
    ]
    memory = [
        {
            "lean": measured(**BYTES, watched=1.0e9, capture=1.2e9),
            "fat": measured(**BYTES, watched=1.0e9, capture=1.3e9),
        }
    ]
    outcome = report(MACHINE, times, memory, {"broken": "it broke"})
    rows = {line.split()[0]: line.split() for line in outcome.text.splitlines() if line}
    assert rows["fast"][6:] == ["1.010", "1.010", "..", "1.010", "1.02", "met", "500"]
    assert rows["slow"][6:] == ["1.030", "1.010", "..", "1.050", "1.02", "missed", "500"]
    assert rows["lean"][-3:] == ["1.20", "1.20", "met"]
    assert rows["fat"][-3:] == ["1.30", "1.20", "missed"]
    assert "it broke" in outcome.text
    assert not outcome.complete
