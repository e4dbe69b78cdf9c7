"""Buffers follow the forwards in order of p; outsiders see those of version p, and cannot change them unnoticed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline import buffers
from lightning_hetpipe.pipeline.buffers import Buffers, places
from lightning_hetpipe.pipeline.weight_stash import Live

CPU = torch.device("cpu")


class Counter(nn.Module):
    """Counts its forwards in a buffer: in place, or by a new tensor each time."""

    count: Tensor

    def __init__(self, in_place: bool = True) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("unused", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.count += 1
        else:
            self.count = self.count + 1
        return x * self.count


class Growing(nn.Module):
    """Its buffer has another shape after each forward."""

    history: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("history", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.history = torch.cat([self.history, x.detach().mean().reshape(1)])
        return x


class Segment:
    """A segment with ``slots`` copies of its layers, as a stage has it when minibatch 1 is next."""

    def __init__(self, *live: nn.Module, slots: int) -> None:
        self.live = list(live)
        self.copies = [copy.deepcopy(self.live) for _ in range(slots)]
        self.places = [places(modules) for modules in self.copies]
        self.buffers = Buffers(self.live, slots, CPU)
        self.of_live = Live([self.live])
        self.begin(0)

    def begin(self, minibatch: int) -> None:
        self.buffers.begin(minibatch, self.of_live.version(0, []).buffers[0])

    def publish(self, minibatch: int) -> None:
        live, is_ahead = self.of_live.version(minibatch, []).buffers[0], len(self.copies) > 1
        self.buffers.publish(minibatch, live, ahead=is_ahead)

    def show(self, minibatch: int) -> None:
        self.of_live.show([self.buffers.left(minibatch)])

    def forward(self, minibatch: int, slot: int, x: Tensor | None = None) -> Tensor:
        x = torch.ones(2) if x is None else x
        self.buffers.before_forward(minibatch, self.places[slot])
        for layer in self.copies[slot]:
            x = layer(x)
        self.buffers.after_forward(minibatch, self.places[slot])
        return x


def test_places_are_the_buffers_that_hold_a_tensor() -> None:
    counter, norm = Counter(), nn.BatchNorm1d(2)
    assert places([counter, norm, counter]) == [
        (counter, "count"),
        (norm, "running_mean"),
        (norm, "running_var"),
        (norm, "num_batches_tracked"),
    ]
    assert places([nn.BatchNorm1d(2, track_running_stats=False)]) == []


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_forward_starts_from_what_the_one_before_left(slots: int, in_place: bool) -> None:
    """Whatever copies of the layers they run on: weights' versions choose those."""
    segment = Segment(Counter(in_place), slots=slots)
    for minibatch in range(1, 8):
        slot = (minibatch * 2) % slots  # not in step with the buffers
        assert torch.equal(segment.forward(minibatch, slot), torch.full((2,), float(minibatch)))


@pytest.mark.parametrize("in_place", [True, False])
def test_outsiders_see_those_of_their_minibatch_while_later_forwards_have_run(in_place: bool) -> None:
    counter = Counter(in_place)
    segment = Segment(counter, slots=3)
    for minibatch in (1, 2, 3):
        segment.forward(minibatch, 0)
    assert counter.count.tolist() == [0, 0]
    for minibatch in (1, 2, 3):
        segment.show(minibatch)
        assert counter.count.tolist() == [minibatch, minibatch]


def test_a_buffer_is_shared_as_long_as_no_forward_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minibatches in flight keep what their forwards left, if a later graph changes it."""
    segment = Segment(Counter(), slots=3)
    with monkeypatch.context() as constant:
        constant.setattr(buffers, "may_change", lambda module, name: False)
        for minibatch in (1, 2, 3, 4):
            segment.buffers.before_forward(minibatch, segment.places[0])
        assert len({id(segment.buffers.left(minibatch)[0]) for minibatch in (2, 3, 4)}) == 1
    for minibatch in (5, 6):
        segment.forward(minibatch, 0)
    assert [segment.buffers.left(minibatch)[0].tolist() for minibatch in (4, 5, 6)] == [[0, 0], [1, 1], [2, 2]]


def test_a_backward_finds_the_buffers_of_its_forward() -> None:
    """Later forwards must not change in place what an earlier one has saved."""

    class Scales(Counter):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.count += 1
            return x * self.count

    segment = Segment(Scales(), slots=3)
    x = torch.ones(2, requires_grad=True)
    outputs = [segment.forward(minibatch, 0, x) for minibatch in (1, 2, 3)]
    found = [torch.autograd.grad(output.sum(), x)[0].tolist() for output in outputs]
    assert found == [[1, 1], [2, 2], [3, 3]]


def test_the_live_buffers_stay_the_same_tensors() -> None:
    """Others may hold them (an optimizer, an average of weights): they are filled, not replaced."""
    norm = nn.BatchNorm1d(2)
    before = list(norm.buffers())
    segment = Segment(norm, slots=2)
    segment.forward(1, 0, torch.randn(4, 2))
    segment.show(1)
    assert all(one is other for one, other in zip(norm.buffers(), before, strict=True))
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.item() == 1


def test_buffers_whose_shape_changes() -> None:
    layer = Growing()
    segment = Segment(layer, slots=2)
    for minibatch in range(1, 5):
        segment.forward(minibatch, minibatch % 2, torch.full((3,), float(minibatch)))
        segment.show(minibatch)
        assert layer.history.tolist() == [float(p) for p in range(1, minibatch + 1)]
        segment.publish(minibatch)


def test_beginning_takes_the_live_buffers() -> None:
    counter = Counter()
    segment = Segment(counter, slots=3)
    for minibatch in (1, 2, 3):
        segment.forward(minibatch, 0)
    counter.count.fill_(100)  # at the end of an epoch, or by loading a checkpoint
    segment.begin(3)
    assert segment.forward(4, 1).tolist() == [101, 101]


def test_a_discarded_forward_leaves_no_trace() -> None:
    counter = Counter()
    segment = Segment(counter, slots=3)
    segment.forward(1, 0)
    segment.show(1)
    segment.forward(2, 1)
    segment.forward(3, 2)
    segment.begin(1)
    assert segment.forward(2, 1).tolist() == [2, 2]


def changed(how: str, forwards: int) -> Segment:
    """A callback has changed the buffers after minibatch 1, when as many forwards had run."""
    counter = Counter()
    segment = Segment(counter, slots=forwards)
    for minibatch in range(1, forwards + 1):
        segment.forward(minibatch, 0)
    segment.show(1)
    if how == "in place":
        counter.count.add_(10)
    elif how == "through data":
        counter.count.data.add_(10)
    else:
        counter.count = counter.count + 10
    return segment


CHANGES = ["in place", "through data", "replaced"]


@pytest.mark.parametrize("how", CHANGES)
def test_a_callbacks_change_is_taken_over_where_nothing_has_run_ahead(how: str) -> None:
    segment = changed(how, forwards=1)
    segment.publish(1)
    assert segment.forward(2, 0).tolist() == [12, 12]


@pytest.mark.parametrize("how", CHANGES)
def test_a_callbacks_change_is_refused_where_later_forwards_have_run(how: str) -> None:
    segment = changed(how, forwards=2)
    with pytest.raises(SettingError, match=r"the buffer 'count' of a pipelined Counter .* minibatch 1.*in_flight=1"):
        segment.publish(1)


@pytest.mark.parametrize("slots", [1, 3])
def test_publishing_without_a_change_does_nothing(slots: int) -> None:
    counter = Counter()
    counter.count.fill_(float("nan"))  # equal to itself, for this
    segment = Segment(counter, slots=slots)
    for minibatch in (1, 2):
        segment.forward(minibatch, 0)
        segment.show(minibatch)
        segment.publish(minibatch)
    assert counter.count.isnan().all()


def test_nothing_is_allocated_for_buffers_that_keep_their_shape() -> None:
    segment = Segment(nn.BatchNorm1d(2), slots=2)
    seen: set[tuple[int, ...]] = set()
    for minibatch in range(1, 9):
        segment.forward(minibatch, 0, torch.randn(4, 2))
        norm: Any = segment.copies[0][0]
        seen.add(tuple(tensor.data_ptr() for tensor in norm.buffers()))
    assert len(seen) == 2


def test_a_segment_without_buffers() -> None:
    segment = Segment(nn.Tanh(), nn.Linear(2, 2), slots=2)
    segment.forward(1, 1)
    segment.show(1)
    segment.publish(1)
