"""The test accelerator refuses, each time, what a GPU would compute too early, or in memory that was given away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetpipe.pipeline import streams
from tests.exact.pipelines import even
from tests.exact.running import fit
from tests.exact.test_captured import CASES, made
from tests.support.accelerator import NAME, TestAccelerator

pytestmark = pytest.mark.usefixtures("accelerator")


def place(index: int) -> torch.device:
    return torch.device(NAME, index)


class On:
    """Within it, this thread computes on ``stream``."""

    def __init__(self, stream: torch.Stream) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before = torch.accelerator.current_stream(self.stream.device)
        torch.accelerator.set_stream(self.stream)

    def __exit__(self, *exception: object) -> None:
        torch.accelerator.set_stream(self.before)


def test_a_stream_waits_for_what_it_reads() -> None:
    """By an event, and by one that was recorded on a third stream after that."""
    main, side, third = (torch.Stream(place(1)) for _ in range(3))
    with On(main):
        a = torch.ones(4, device=place(1))
    with (
        On(side),
        pytest.raises(RuntimeError, match=r"a wait is missing: aten::add on stream \d+ of testacc:1 reads memory that"),
    ):
        a + 1
    third.wait_event(main.record_event())
    side.wait_event(third.record_event())
    with On(side):
        assert (a + 1).tolist() == [2] * 4


def test_a_stream_waits_before_it_overwrites_what_another_reads() -> None:
    main, side = torch.Stream(place(0)), torch.Stream(place(0))
    with On(main):
        a = torch.ones(4, device=place(0))
    side.wait_event(main.record_event())
    with On(side):
        b = a + 1
    with On(main):
        with pytest.raises(RuntimeError, match=r"aten::fill_ on .* writes memory that aten::add on .* reads"):
            a.fill_(2)
        main.wait_event(side.record_event())
        a.fill_(2)
    assert b.device == place(0)


def test_the_host_waits_for_whoever_comes_after() -> None:
    """Events, streams, devices and copies to the host have it wait; a question whether something is over does not."""
    waits: list[Callable[[torch.Stream, torch.Event, Tensor], object]] = [
        lambda stream, event, tensor: event.synchronize(),
        lambda stream, event, tensor: stream.synchronize(),
        lambda stream, event, tensor: torch.accelerator.synchronize(2),
        lambda stream, event, tensor: tensor.cpu(),
        lambda stream, event, tensor: tensor[0].item(),
    ]
    for wait in waits:
        main, side = torch.Stream(place(2)), torch.Stream(place(2))
        with On(main):
            a = torch.ones(4, device=place(2))
            event = main.record_event()
            assert event.query()
            with On(side), pytest.raises(RuntimeError, match="a wait is missing"):
                a + 1
            wait(main, event, a)
        with On(side):
            a + 1


def test_pinned_memory_has_the_values_once_the_host_has_waited() -> None:
    a = torch.arange(4.0, device=place(1))
    pinned = torch.zeros(4, pin_memory=True)
    pinned.copy_(a, non_blocking=True)
    a.fill_(5)  # behind the copy
    assert pinned.isnan().all()
    torch.accelerator.current_stream(place(1)).synchronize()
    assert pinned.tolist() == [0, 1, 2, 3]
    assert streams.move(a, torch.device("cpu")).tolist() == [5] * 4


def test_a_copy_orders_the_streams_of_both_devices() -> None:
    """As CUDA's: it runs on the first one's stream once the second one's is there, and that waits for it."""
    a = torch.ones(4, device=place(0))
    b = a.to(place(1))
    assert torch.equal((b + 1).cpu(), torch.full((4,), 2.0))
    a.fill_(3)
    with On(torch.Stream(place(0))), pytest.raises(RuntimeError, match=r"aten::copy_ .* reads memory that aten::fill_"):
        a.to(place(1), non_blocking=True)


def test_memory_is_not_given_away_while_another_stream_uses_it() -> None:
    for recorded in (False, True):
        side = torch.Stream(place(3))
        a = torch.ones(4, device=place(3))
        side.wait_event(torch.accelerator.current_stream(place(3)).record_event())
        with On(side):
            b = a + 1
        if recorded:
            a.record_stream(side)
        del a
        if recorded:
            torch.empty(4, device=place(3))
        else:
            with pytest.raises(
                RuntimeError, match=r"record_stream is missing: stream 0 of testacc:3 .* aten::add used"
            ):
                torch.empty(4, device=place(3))
        assert b.shape == (4,)


def test_autograd_orders_its_streams() -> None:
    """A backward runs on the streams of its forward, and whoever called it goes on after it."""
    side = torch.Stream(place(1))
    x = torch.ones(4, device=place(1), requires_grad=True)
    side.wait_event(torch.accelerator.current_stream(place(1)).record_event())
    with On(side):
        y = x * 2
    torch.accelerator.current_stream(place(1)).wait_event(side.record_event())
    (y * 3).sum().backward()  # type: ignore[no-untyped-call]  # torch has no types here
    assert x.grad is not None
    assert (x.grad + 0).tolist() == [6] * 4


def without_wait(join: Callable[..., None]) -> Callable[..., None]:
    """A stream's ``join`` that says what it uses, but waits for no event."""
    return lambda self, event, tensors=(): join(self, None, tensors)


BROKEN: dict[str, tuple[Any, str, Any, str]] = {
    "a stage does not wait": (
        streams.DeviceStream,
        "join",
        without_wait(streams.DeviceStream.join),
        "a wait is missing",
    ),
    "user code does not wait": (
        streams.UserStream,
        "join",
        without_wait(streams.UserStream.join),
        "a wait is missing",
    ),
    "nobody says what it uses": (streams, "_used", lambda tensor, stream: None, "record_stream is missing"),
}


@pytest.mark.parametrize("name", ["dropout", "resnet"])
@pytest.mark.parametrize("what", BROKEN)
def test_a_fit_needs_its_waits(
    accelerator: TestAccelerator, monkeypatch: pytest.MonkeyPatch, what: str, name: str
) -> None:
    holder, attribute, broken, said = BROKEN[what]
    monkeypatch.setattr(holder, attribute, broken)
    _, loader, layers = CASES[name]
    with pytest.raises(RuntimeError, match=said):
        fit(made(name), loader, strategy=even(layers, 4, 2), accelerator=accelerator, devices=4)
