"""Autocast's state at a call of a piece in user code holds in the stages that run it."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.pipeline.dtypes import Autocast
from tests.pipeline.driving import Line, X, assert_gradients

OFF = Autocast((("cpu", None),), True)
bf16 = functools.partial(torch.autocast, "cpu", torch.bfloat16)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="says what holds on a host without a GPU")


def product() -> torch.dtype:
    """The dtype of a matrix product here."""
    return (X @ X.T).dtype


def in_a_thread(autocast: Autocast) -> tuple[torch.dtype, bool, torch.dtype]:
    """A product's dtype and whether casts are kept, with ``autocast`` opened in a new thread; and a product's after."""
    found: list[tuple[torch.dtype, bool, torch.dtype]] = []

    def look() -> None:
        with autocast.opened():
            inside = product(), torch.is_autocast_cache_enabled()
        found.append((*inside, product()))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def test_what_holds_is_taken_down() -> None:
    assert Autocast.current() == OFF
    with bf16():
        assert Autocast.current() == Autocast((("cpu", torch.bfloat16),), True)
        with bf16(enabled=False):
            assert Autocast.current() == OFF
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        assert Autocast.current() == Autocast((("cpu", torch.float16),), False)
    assert Autocast.current() == OFF


def test_it_holds_in_another_thread_as_long_as_it_is_open() -> None:
    with bf16():
        on = Autocast.current()
        assert in_a_thread(OFF) == (torch.float32, True, torch.float32)  # a thread starts without it
    assert in_a_thread(on) == (torch.bfloat16, True, torch.float32)
    with bf16(cache_enabled=False):
        uncached = Autocast.current()
    assert in_a_thread(uncached) == (torch.bfloat16, False, torch.float32)


def test_it_turns_off_what_holds() -> None:
    with bf16():
        with OFF.opened():
            assert product() is torch.float32
        assert product() is torch.bfloat16


def test_it_ends_with_an_error() -> None:
    with bf16():
        on = Autocast.current()
    with pytest.raises(ArithmeticError), on.opened():
        raise ArithmeticError
    assert Autocast.current() == OFF


def cast_step(line: Line, enabled: bool) -> Tensor:
    with bf16(enabled=enabled):
        output: Tensor = line.call(X)
    assert output.dtype is (torch.bfloat16 if enabled else torch.float32)
    return output.float().square().sum()


def plain_gradients(net: nn.Sequential, enabled: bool) -> list[Tensor]:
    with bf16(enabled=enabled):
        output = net(X)
    return list(torch.autograd.grad(output.float().square().sum(), list(net.parameters())))


@pytest.mark.parametrize("cuts", [(0,), (0, 2), (0, 1, 3)])
def test_each_minibatch_runs_with_its_own(cuts: tuple[int, ...]) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    line = Line(net, cuts=cuts, in_flight=4)
    modes = [True, False, True, False]
    with line.running() as engine:
        for p, enabled in enumerate(modes, start=1):
            engine.submit(p, line.step(functools.partial(cast_step, line, enabled)))
        for p, enabled in enumerate(modes, start=1):
            assert_gradients(line, engine.finish(p).gradients, plain_gradients(net, enabled))


def test_pieces_may_differ() -> None:
    """One in bfloat16, the other one not."""
    seen: list[torch.dtype] = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(product())
            return x * 1.0

    line = Line(nn.Sequential(nn.Linear(4, 4), Looks()), nn.Sequential(Looks(), nn.Linear(4, 4)), cuts=(0, 1))

    def run() -> Tensor:
        with bf16():
            z: Tensor = line.call(X, 0)
        y: Tensor = line.call(z.float(), 1)
        return y.sum()

    with line.running() as engine:
        engine.submit(1, line.step(run))
        engine.finish(1)
    assert seen == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_casts_are_kept_only_where_nothing_else_runs(in_flight: int, outside: bool) -> None:
    """Whoever leaves autocast clears the cache of all threads, so what it holds would depend on timing."""
    kept: list[bool] = []

    class Looks(nn.Linear):
        """Opens autocast itself, as training_step may have done."""

        def forward(self, x: Tensor) -> Tensor:
            with bf16():
                kept.append(torch.is_autocast_cache_enabled())
                return super().forward(x).float()

    line = Line(nn.Sequential(Looks(4, 4), Looks(4, 4)), cuts=(0, 1), in_flight=in_flight)

    def run() -> Tensor:
        with bf16(enabled=outside):
            output: Tensor = line.call(X)
        assert torch.is_autocast_cache_enabled()
        return output.sum()

    with line.running() as engine:
        engine.submit(1, line.step(run))
        engine.finish(1)
    assert kept == [in_flight == 1] * 2


@pytest.mark.parametrize("autocast", [OFF, Autocast((("cpu", torch.bfloat16),), True)])
def test_the_thread_keeps_casts_as_before(autocast: Autocast) -> None:
    def fail() -> None:
        with autocast.opened(alone=False):
            assert not torch.is_autocast_cache_enabled()
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert torch.is_autocast_cache_enabled()
    with autocast.opened():
        assert torch.is_autocast_cache_enabled()
