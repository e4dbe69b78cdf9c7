"""Taking apart what torch.export refuses as a whole: the outermost calls that can be captured are the pieces."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.capture import piece_search
from lightning_hetpipe.capture.observation import WatchedCall
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.capture.watch import TrainingWatch
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from tests.capture.test_watch import Watched, X, run_net
from tests.support.traces import shape_of


class Leaf(nn.Module):
    """Can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


class Decides(nn.Module):
    """Decides by the values of its data; draws Python's random numbers, and counts, before it does."""

    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        random.random(), np.random.rand(), torch.rand(1)
        for part in self.parts:
            if x.abs().max().item() > 1e9:
                raise ArithmeticError("too large")
            x = part(x)
        return x


class DecidesOtherwise(Decides):
    """Another class."""


class Outer(nn.Module):
    """Calls modules of its own."""

    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*children)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        y: Tensor = self.head(x)
        return y


def searched(net: nn.Module, names: list[str] | None = None, timeout: float = 60.0) -> TrainingWatch:
    module = Watched(run_net, net=net)
    watch = TrainingWatch(module, names, RandomGenerators(0), 1, capture_timeout=timeout)
    with watch.watching():
        loss = module.training_step(X)
    watch.check(loss)
    return watch


def found(watch: TrainingWatch) -> list[str]:
    return [piece.name for piece in watch.pieces]


def test_the_outermost_calls_that_can_be_captured() -> None:
    watch = searched(Outer(Leaf(), Decides(Leaf(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))))
    inner = "net.parts.1.parts"
    assert found(watch) == ["net.parts.0", f"{inner}.0", f"{inner}.1", f"{inner}.2", "net.head"]
    assert [len(piece.layers) for piece in watch.pieces] == [1, 1, 2, 1, 1]
    assert [len(piece.inputs[0]) for piece in watch.pieces] == [1, 1, 2, 1, 1]
    assert watch.called == [0, 1, 2, 3, 4]
    assert watch.apart
    assert list(watch.apart.modules) == ["net"]
    assert 0 < watch.apart.share <= 1
    told = watch.apart.explanation()
    assert told.startswith("HetPipe: 'net' cannot be pipelined as a whole, so that it was taken apart: pipelined are")
    assert "'net.parts.0', " in told
    assert "1 more, 'net.head', which take" in told
    assert "decides by the values of its data what to compute at test_piece_search.py" in told


def test_a_model_that_is_captured_whole_is_not_taken_apart() -> None:
    watch = searched(Outer(Leaf(), Leaf()))
    assert found(watch) == ["net"]
    assert not watch.apart


def test_a_step_with_failed_attempts_is_as_it_would_be_without_them() -> None:
    net, plain = Decides(Leaf(), Leaf()), Decides(Leaf(), Leaf())
    plain.load_state_dict(net.state_dict())
    states = []
    for run in (lambda: Watched(run_net, net=plain).training_step(X), lambda: searched(net)):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        run()
        states.append((random.getstate(), str(np.random.get_state())))
    assert states[0] == states[1]
    assert net.calls == plain.calls == 1


def test_no_trace_of_failed_attempts_remains() -> None:
    net = Decides(Leaf(), nn.BatchNorm1d(4), Leaf())
    module = Watched(run_net, net=net)
    net.calls = 1
    before = shape_of(module)
    net.calls = 0
    watch = TrainingWatch(module, None, RandomGenerators(0), 1)
    with watch.watching():
        loss = module.training_step(X)
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    watch.check(loss)
    assert shape_of(module) == before
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in net.named_buffers())


def test_a_class_that_was_refused_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = attempts(monkeypatch)
    watch = searched(Decides(Decides(Leaf()), Decides(Leaf()), DecidesOtherwise(Leaf())))
    assert tried == ["net", "net.parts.0.parts.0", "net.parts.1.parts.0", "net.parts.2", "net.parts.2.parts.0"]
    assert found(watch) == [f"net.parts.{number}.parts.0" for number in range(3)]


def test_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole is tried however long it takes; what comes next counts."""
    now = [0.0]
    tried = attempts(monkeypatch, lambda: now.append(now[-1] + 20.0))
    monkeypatch.setattr("lightning_hetpipe.capture.piece_search.time.perf_counter", lambda: now[-1])
    watch = searched(Decides(*[Leaf() for _ in range(6)]), timeout=30.0)
    assert tried == ["net", "net.parts.0", "net.parts.1"]
    assert found(watch) == ["net.parts.0", "net.parts.1"]
    assert watch.apart
    assert watch.apart.timed_out
    assert watch.apart.timeout_warning(30.0).startswith("taking 'net' apart took more than capture_timeout=30 seconds")


def attempts(monkeypatch: pytest.MonkeyPatch, each: Any = lambda: None) -> list[str]:
    """Names of the modules that are tried; those that decide are refused, without torch.export."""
    tried: list[str] = []

    def capture(piece: Piece, calls: Sequence[WatchedCall], *_: Any) -> None:
        tried.append(piece.name)
        each()
        if isinstance(piece.module, Decides):
            raise SettingError(f"'{piece.name}' decides")

    monkeypatch.setattr(piece_search, "capture", capture)
    return tried


def test_an_unforeseen_error_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the capture's own does not end the run, and is not taken for a property of the model."""

    def capture(piece: Piece, calls: Sequence[WatchedCall], *_: Any) -> None:
        if isinstance(piece.module, Outer):
            raise TypeError("no\nlayers")

    monkeypatch.setattr(piece_search, "capture", capture)
    watch = searched(Outer(Leaf()))
    assert watch.apart.reasons == {
        "net": "an unforeseen TypeError (no layers) occurred; please report it with the model"
    }
    assert found(watch) == ["net.parts.0", "net.head"]


def test_nothing_that_can_be_captured() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight if x.sum().item() > 0 else x

    with pytest.raises(SettingError, match="'net' decides by the values of its data"):
        searched(Alone())


def test_a_named_module_is_not_taken_apart() -> None:
    with pytest.raises(SettingError, match="'net' decides by the values of its data"):
        searched(Decides(Leaf()), ["net"])


def test_a_module_that_is_called_twice_in_another_runs_as_user_code() -> None:
    shared = Leaf()
    assert found(searched(Decides(shared, nn.Linear(4, 4), shared))) == ["net.parts.1"]


def test_a_hook_inside_runs_as_user_code() -> None:
    leaf, seen = Leaf(), list[int]()
    leaf.linear.register_forward_hook(lambda *_: seen.append(1))
    watch = searched(Outer(leaf, Leaf()))
    assert found(watch) == ["net.parts.1", "net.head"]
    assert seen == [1]


class Adds(nn.Module):
    """Changes in place what its parts have given, and what they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Leaf(), Leaf()

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max().item() > 1e9:
            raise ArithmeticError("too large")
        x = self.first(x)
        x += self.second(x)
        return x


def test_parts_whose_outputs_and_inputs_are_changed_in_place_later() -> None:
    assert found(searched(Adds())) == ["net.first", "net.second"]


def test_a_leaf_that_a_module_makes_inside() -> None:
    """As Wav2Vec2 does, for gradient checkpointing: nobody wants its gradient."""

    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = Leaf()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.leaf(x[:, :].requires_grad_())
            return y

    assert found(searched(Makes())) == ["net.leaf"]
