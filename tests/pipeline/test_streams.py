"""No stream uses what another one's stream may still compute, or may give away."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from benchmarks.line import Line
from lightning_hetpipe.pipeline import values
from lightning_hetpipe.pipeline.streams import (
    DeviceStream,
    Stream,
    Streams,
    Timed,
    UserStream,
    shared_streams,
)
from lightning_hetpipe.pipeline.user.minibatch import Step
from tests.pipeline.streams import FakeStream, StreamRaces
from tests.support.marks import quick
from tests.support.waits import Waits

MINIBATCHES = 9


def net() -> nn.Sequential:
    """Five layers: buffers, chance, and one that changes its input in place."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(4, 4))


def head() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Tanh(), nn.Linear(4, 2))


def train(
    cuts: tuple[int, ...],
    in_flight: int,
    checker: StreamRaces | None = None,
    pieces: int = 1,
    streams: Streams | None = None,
) -> list[Tensor]:
    """The weights after some steps of SGD; every minibatch's input is user code's."""
    made = [net(), head()][:pieces]
    if checker is not None:
        streams = checker.streams()
    line = Line(*made, cuts=cuts, in_flight=in_flight, streams=streams)
    inputs = torch.randn(MINIBATCHES, 6, 4, generator=torch.Generator().manual_seed(2))
    parameters = [parameter for piece in made for parameter in piece.parameters()]

    def step(number: int) -> Step:
        x = inputs[number - 1]

        def run() -> Tensor:
            value = line.call(x if checker is not None and checker.host_inputs else x.mul(1))
            if pieces > 1:
                value = line.call(value.sigmoid(), piece=1)
            loss: Tensor = value.square().mean()
            return loss

        def watched() -> Tensor:
            if checker is None:
                return run()
            with checker.watched():
                return run()

        return line.step(watched)

    def go() -> Iterator[None]:
        with line.running():
            for minibatch in line.train(MINIBATCHES, step):
                with torch.no_grad():
                    for parameter in parameters:
                        parameter.sub_(minibatch.gradients[parameter], alpha=0.1)
                yield

    if checker is None:
        list(go())
    else:
        with checker.watched():
            list(go())
    return [tensor.detach().clone() for piece in made for tensor in piece.state_dict().values()]


@pytest.mark.parametrize("slow", [False, True])
def test_lightnings_thread_waits_for_the_minibatch_before_only(slow: bool) -> None:
    """And only if a device is behind: it would otherwise run ahead without an end, and memory is reused late."""
    checker = StreamRaces(slow=slow)
    train((0, 2), 3, checker)
    assert checker.races == []
    assert checker.waits == (2 * (MINIBATCHES - 1) if slow else 0)


@quick("cuts0-1-1", "cuts1-1-4", "cuts2-1-2", "cuts3-2-4", "cuts4-2-2")
@pytest.mark.parametrize("in_flight", [1, 2, 4])
@pytest.mark.parametrize(("cuts", "pieces"), [((0,), 1), ((0, 2), 1), ((0, 1, 2, 3), 1), ((0, 2, 5), 2), ((0, 6), 2)])
def test_no_races(cuts: tuple[int, ...], pieces: int, in_flight: int) -> None:
    checker = StreamRaces()
    weights = train(cuts, in_flight, checker, pieces)
    assert checker.races == []
    assert all(map(torch.equal, weights, train(cuts, in_flight, pieces=pieces)))


@pytest.mark.parametrize("cuts", [(0,), (0, 1, 2, 3)])
def test_a_version_is_waited_for_where_inputs_come_from_the_host(cuts: tuple[int, ...]) -> None:
    """With inputs of user code's stream a stage would have waited already for what Lightning's thread did before."""
    checker = StreamRaces(host_inputs=True)
    train(cuts, 3, checker)
    assert checker.races == []


def test_a_computed_weight_that_outsiders_read_is_not_given_away() -> None:
    """A stage has made it, and the next step's takes its place while, on a device, readers may not be through."""
    checker = StreamRaces()
    layers = net()
    for layer in (layers[0], layers[4]):
        prune.random_unstructured(layer, "weight", amount=1)  # type: ignore[no-untyped-call]  # torch has no types here
    line = Line(layers, cuts=(0, 2), in_flight=3, streams=checker.streams())
    with checker.watched(), line.running():
        for minibatch in line.train(6, lambda number: line.step(lambda: line.call(torch.ones(6, 4)).square().mean())):
            computed = [value for layer in layers for value in vars(layer).values() if isinstance(value, Tensor)]
            assert len(computed) == 2
            assert all(value.isfinite().all() for value in computed)
            with torch.no_grad():
                for parameter, gradient in minibatch.gradients.items():
                    parameter.sub_(gradient, alpha=0.1)
    assert checker.races == []


def test_gradients_of_a_tied_weight_are_added_in_order() -> None:
    """Found in three stages and, before and after them, by user code: each adds what streams before it may still
    compute, and lets go of it, so that its memory would be given away."""
    checker = StreamRaces()
    torch.manual_seed(0)
    tied = nn.Linear(4, 4)
    layers = nn.Sequential(tied, nn.Tanh(), tied, nn.Tanh(), tied)
    line = Line(layers, cuts=(0, 1, 3), in_flight=3, streams=checker.streams())

    def run() -> Tensor:
        with checker.watched():
            before = torch.ones(6, 4) @ tied.weight
            after = tied.weight.square().sum()
            loss: Tensor = (line.call(before) @ tied.weight).square().mean() + after
            return loss

    with checker.watched(), line.running():
        for minibatch in line.train(6, lambda number: line.step(run)):
            with torch.no_grad():
                for parameter, gradient in minibatch.gradients.items():
                    parameter.sub_(gradient, alpha=0.1)
    assert checker.races == []


BROKEN: dict[str, Callable[[str, FakeStream], bool]] = {
    "a stage does not wait for what it is given": lambda what, stream: what == "events" and stream.number > 0,
    "user code does not wait for what stages give": lambda what, stream: what == "events" and stream.number == 0,
    "a stage does not say what it uses": lambda what, stream: what == "tensors" and stream.number > 0,
    "user code does not say what it uses": lambda what, stream: what == "tensors" and stream.number == 0,
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_left_out_is_a_race(what: str) -> None:
    """Each of the marks, waits and names is needed, and this would see that it is missing."""
    checker = StreamRaces(BROKEN[what])
    train((0, 2), 3, checker)
    assert checker.races


def test_a_stage_on_the_host_waits_for_what_it_is_given() -> None:
    class Counts:
        waits = 0

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            self.waits += 1

    mark, stream = Counts(), Stream()
    stream.join(mark)
    stream.join(None)
    assert mark.waits == 1


def test_a_version_is_compared_with_the_one_before_by_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here nothing steps: of each stage all weights, and all buffers if it has any, are compared at once."""
    monkeypatch.setattr(values, "_waits", lambda tensor: True)
    line = Line(net(), cuts=(0, 2), in_flight=2)
    with line.running(), Waits() as waits:
        for _ in line.train(3, lambda number: line.step(lambda: line.call(torch.ones(6, 4)).square().mean())):
            assert waits.count % 3 == 0
        assert waits.count == 3 * 3


class FakeTorchStream:
    """Stands in for one of torch's, and notes what it waits for."""

    made: list[FakeTorchStream]
    current: dict[torch.device, FakeTorchStream]

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waited: list[object] = []
        self.synchronized = 0
        FakeTorchStream.made.append(self)

    def record_event(self) -> tuple[str, FakeTorchStream]:
        return ("event", self)

    def wait_event(self, event: object) -> None:
        self.waited.append(event)

    def synchronize(self) -> None:
        self.synchronized += 1


class OnDevice:
    """Stands in for a tensor there."""

    layout = torch.strided

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.used: list[FakeTorchStream] = []

    def record_stream(self, stream: FakeTorchStream) -> None:
        self.used.append(stream)


class Event:
    """Stands in for one of torch's that measure time; the device is at ``done``."""

    count = 0
    done = 0

    def __init__(self, device: torch.device, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self, stream: FakeTorchStream) -> None:
        Event.count += 1
        self.number, self.stream = Event.count, stream

    def query(self) -> bool:
        return self.number <= Event.done

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query()
        return 1000.0 * (end.number - self.number)


@pytest.fixture
def torch_streams(monkeypatch: pytest.MonkeyPatch) -> type[FakeTorchStream]:
    """Torch's streams, as a machine without a GPU can see them."""
    FakeTorchStream.made, FakeTorchStream.current = [], {}

    def set_stream(stream: FakeTorchStream) -> None:
        FakeTorchStream.current[stream.device] = stream
        FakeTorchStream.current[torch.device("cuda")] = stream  # this thread's device follows

    Event.count = Event.done = 0
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch, "Stream", FakeTorchStream)
    monkeypatch.setattr(torch.accelerator, "set_stream", set_stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: FakeTorchStream.current[device])
    return FakeTorchStream


def test_what_comes_from_another_gpu_is_copied_in_a_stream_there(torch_streams: type[FakeTorchStream]) -> None:
    """Torch's copy runs in this thread's stream of the device that it copies from: that must have waited, too."""
    here, there = torch.device("cuda:1"), torch.device("cuda:0")
    stream, giver = DeviceStream(here), DeviceStream(there)
    own, theirs = torch_streams.made
    stream.enter()
    given: list[Any] = [OnDevice("cuda:0"), OnDevice("cuda:0"), OnDevice("cuda:1"), OnDevice("cpu")]
    mark: Any = giver.record()
    stream.join(mark, given)
    side = torch_streams.made[-1]
    assert (side.device, torch_streams.made) == (there, [own, theirs, side])
    assert torch_streams.current == {there: side, here: own, torch.device("cuda"): own}
    assert own.waited == side.waited == mark.events == [("event", theirs)]
    assert [tensor.used for tensor in given] == [[side], [side], [own], []]
    stream.join(None, given[:1])
    assert (len(torch_streams.made), own.waited) == (3, mark.events), "nothing to wait for, and no further stream"


def test_what_a_stage_has_spent_is_counted_though_nobody_asks(torch_streams: type[FakeTorchStream]) -> None:
    """A fit without loggers asks at its end, after millions of events."""
    stream = DeviceStream(torch.device("cuda:0"))
    stream.enter()
    for _ in range(4):
        stream.spent(stream.now())
    assert len(stream._pending) == 4
    Event.done = 7  # the fourth has begun
    assert (stream.busy_seconds(), len(stream._pending)) == (3.0, 1)
    Event.done = 10
    stream.spent(stream.now())
    assert stream._pending == deque(), "those that are over are let go of"
    assert stream.busy_seconds() == 5.0


def test_a_loss_takes_as_long_as_on_the_device(torch_streams: type[FakeTorchStream]) -> None:
    """Its thread is through long before; what it computes lies in the streams of user code."""
    stream = DeviceStream(torch.device("cuda:0"))
    mine = FakeTorchStream(torch.device("cuda:0"))
    torch.accelerator.set_stream(mine)  # type: ignore[arg-type]

    last: Any = SimpleNamespace(index=0, stream=stream)
    Timed(last, None, "loss", 1).end(None)
    began, ended = stream._pending[0]
    assert vars(began)["stream"] is vars(ended)["stream"] is mine
    assert stream.busy_seconds() == 0.0
    Event.done = 2
    assert stream.busy_seconds() == 1.0


def test_who_looks_at_a_clock_waits_for_the_loss() -> None:
    """In a timeline it is as long as it takes on the device, and not as its thread takes to give it there."""
    happened: list[str] = []

    last: Any = SimpleNamespace(index=0, stream=Stream())

    class Computed(Stream):
        def synchronize(self) -> None:
            happened.append("it is computed")

    Timed(last, lambda stage, work, minibatch: lambda: happened.append("it ends"), "loss", 1).end(Computed())
    assert happened == ["it is computed", "it ends"]
    Timed(last, None, "loss", 1).end(Computed())
    assert len(happened) == 2, "nobody looks"


def test_user_code_waits_in_the_streams_that_are_its_own(torch_streams: type[FakeTorchStream]) -> None:
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    giver, outside = DeviceStream(second), UserStream()
    mine = FakeTorchStream(second)
    torch.accelerator.set_stream(mine)  # type: ignore[arg-type]
    given: list[Any] = [OnDevice("cuda:1"), OnDevice("cpu")]
    mark: Any = giver.record()
    outside.join(mark, given)
    assert mine.waited == mark.events
    assert given[0].used == [mine]
    marked: Any = outside.record([second, torch.device("cpu")])
    assert marked is not None
    assert [*marked.events] == [("event", mine)]
    assert outside.record([torch.device("cpu")]) is None
    assert first not in torch_streams.current, "no stream is asked for on a device that is not used"


def test_user_code_computes_in_the_stream_in_which_fit_was_called(torch_streams: type[FakeTorchStream]) -> None:
    """``with torch.cuda.stream(mine): trainer.fit(...)``: batches are moved there, and versions published."""
    gpu = torch.device("cuda:0")
    mine, default = FakeTorchStream(gpu), FakeTorchStream(gpu)
    torch.accelerator.set_stream(mine)  # type: ignore[arg-type]
    enter = shared_streams([gpu, torch.device("cpu")])
    torch.accelerator.set_stream(default)  # type: ignore[arg-type]  # what another thread has
    enter()
    assert FakeTorchStream.current[gpu] is mine


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, which looks for waits itself")
def test_no_pass_waits_for_its_gpu() -> None:
    """Copies to the host and the like would be refused; several stages share the device."""
    gpu = torch.device("cuda:0")
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(gpu)
    line = Line(layers, cuts=(0, 1, 2, 3), in_flight=5, device=gpu)
    x = torch.randn(32, 64, device=gpu)

    def run() -> Tensor:
        loss: Tensor = line.call(x).square().mean()
        return loss

    with line.running():  # which waits once, as it begins
        torch.cuda.set_sync_debug_mode("error")
        try:
            for minibatch in line.train(12, lambda number: line.step(run)):
                assert len(minibatch.gradients) == 8
                with torch.no_grad():
                    for parameter, gradient in minibatch.gradients.items():
                        parameter.sub_(gradient, alpha=0.1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
