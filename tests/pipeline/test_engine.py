"""The engine, driven directly: minibatches in flight, versions, discarding, threads that end."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import Discarded, SettingError
from lightning_hetpipe.pipeline.user.lock import Precedence, Ticket
from lightning_hetpipe.pipeline.user.minibatch import current
from tests.pipeline.driving import Held, Line, X, assert_gradients, mlp
from tests.support.marks import quick


@pytest.mark.parametrize("cuts", [(0,), (0, 2), (0, 1, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_gradients_are_those_of_the_version_that_the_minibatch_uses(in_flight: int, cuts: tuple[int, ...]) -> None:
    line = Line(mlp(), cuts=cuts, in_flight=in_flight)
    inputs = [X + p for p in range(8)]
    steps = [line.plain(x) for x in inputs]
    with line.running() as engine:
        submitted = 0
        expected: dict[int, list[Tensor]] = {}
        for p in range(1, len(steps) + 1):
            while submitted < min(len(steps), p - 1 + in_flight):  # the live weights are the version p - 1 now
                submitted += 1
                expected[submitted] = line.expected(inputs[submitted - 1])
                engine.submit(submitted, steps[submitted - 1])
            minibatch = engine.finish(p)
            assert minibatch.weights.version == max(0, p - in_flight)
            assert_gradients(line, minibatch.gradients, expected[p])
            line.update(minibatch.gradients)
            engine.publish(p)
    assert line.threads() == []


def test_pieces_with_user_code_between_them() -> None:
    """Two stages share the encoder and the decoder: the cut lies inside one of them."""
    line = Line(mlp(), mlp(), cuts=(0, 5))
    with line.running() as engine:
        engine.submit(1, line.plain())
        assert_gradients(line, engine.finish(1).gradients, line.expected())


def test_the_output_of_a_step_comes_back() -> None:
    line = Line(mlp())
    with line.running() as engine:
        engine.submit(1, line.plain())
        loss = engine.finish(1).output["loss"]
    assert torch.equal(loss, line.pieces[0](X).square().sum())


def test_threads_have_names_and_end() -> None:
    line = Line(mlp(), cuts=(0, 2), in_flight=3)
    assert line.threads() == []
    with line.running():
        names = {"hetpipe-stage-0", "hetpipe-stage-1", "hetpipe-runner-0", "hetpipe-runner-1", "hetpipe-runner-2"}
        assert set(line.threads()) == names
    assert line.threads() == []


def test_closing_twice_or_without_a_start_does_nothing() -> None:
    line = Line(mlp())
    line.engine.close()
    with line.running():
        pass
    line.engine.close()
    assert line.threads() == []


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads take turns as often as they can, so that what is not excluded happens."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_switches")
def test_user_code_is_never_concurrent() -> None:
    """Neither with that of other minibatches, nor with Lightning's own thread between its waits (law L8)."""
    line, inside, overlaps = Line(mlp(), cuts=(0, 2), in_flight=4), threading.Lock(), [0]

    def user_code() -> None:
        if not inside.acquire(blocking=False):
            overlaps[0] += 1
            return
        for _ in range(50):
            pass
        inside.release()

    def run() -> Tensor:
        user_code()
        value: Tensor = line.call(X)
        user_code()
        return value.sum()

    with line.running() as engine:
        for p in range(1, 5):
            engine.submit(p, line.step(run))
        for p in range(1, 60):
            engine.finish(p)
            user_code()  # hooks, the optimizer's closure, callbacks
            engine.publish(p)
            user_code()
            engine.submit(p + 4, line.step(run))
    assert overlaps == [0]


def test_draining_waits_for_everything_and_takes_nothing() -> None:
    line = Line(mlp(), cuts=(0, 2), in_flight=3)
    with line.running() as engine:
        for p in (1, 2, 3):
            engine.submit(p, line.plain(X + p))
        engine.drain()
        assert all(minibatch.ended for minibatch in engine.minibatches.values())
        assert list(engine.minibatches) == [1, 2, 3]
        for p in (1, 2, 3):
            assert_gradients(line, engine.finish(p).gradients, line.expected(X + p))


@pytest.mark.parametrize("where", [(0, "forward", 2), (1, "forward", 2), (1, "backward", 2), (0, "backward", 2)])
def test_discarding_in_the_middle(where: tuple[int, str, int]) -> None:
    """User code unwinds, stages forget, and the same minibatches run again as if nothing had been."""
    held = Held(*where)
    line = Line(mlp(), cuts=(0, 2), in_flight=3, before_pass=held)
    unwound: list[str] = []

    def run() -> Tensor:
        try:
            return line.call(X).square().sum()  # type: ignore[no-any-return]
        except Discarded:
            unwound.append("discarded")
            raise

    with line.running() as engine:
        for p in (1, 2, 3):
            engine.submit(p, line.step(run))
        with engine.main.unlocked():
            assert held.reached.wait(30)
        held.release.set()
        engine.discard()
        assert engine.minibatches == {}
        engine.begin(7)
        for p in (8, 9, 10):
            engine.submit(p, line.plain())
        for p in (8, 9, 10):
            assert_gradients(line, engine.finish(p).gradients, line.expected())
    assert all(how == "discarded" for how in unwound)
    assert line.threads() == []


def test_closing_discards_what_is_in_flight() -> None:
    line = Line(mlp(), cuts=(0, 2), in_flight=3)
    with line.running() as engine:
        for p in (1, 2, 3):
            engine.submit(p, line.plain())
    assert line.threads() == []
    assert line.engine.minibatches == {}


def test_code_that_catches_every_exception_cannot_keep_a_discarded_minibatch() -> None:
    held, swallowed = Held(0, "forward", 1), list[Exception]()
    line = Line(mlp(), in_flight=2, before_pass=held)
    with line.running() as engine:
        engine.submit(1, line.swallowing(swallowed))
        engine.submit(2, line.swallowing(swallowed))
        with engine.main.unlocked():
            assert held.reached.wait(30)  # minibatch 1 is inside its call
        held.release.set()
        engine.discard()
    assert swallowed == []
    assert line.threads() == []


def test_a_module_with_buffers_on_both_sides_of_a_cut_is_refused() -> None:
    norm = nn.BatchNorm1d(4)
    net = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm)
    message = "layers piece0.1 and piece0.3 share a module that has buffers, .* a module of its own"
    with pytest.raises(SettingError, match=message):
        Line(net, cuts=(0, 2))
    Line(net, cuts=(0,)).engine.close()


def test_no_minibatch_is_current_outside_of_one() -> None:
    line, seen = Line(mlp()), []

    def run() -> Tensor:
        seen.append(current())
        loss: Tensor = line.call(X).sum()
        return loss

    with line.running() as engine:
        engine.submit(1, line.step(run))
        minibatch = engine.finish(1)
        assert current() is None
    assert seen == [minibatch]


def test_unlocking_twice_releases_once() -> None:
    """A wait within a wait gave a lock away that somebody else held by then."""
    line = Line(mlp(2))
    with line.running() as engine, engine.main.unlocked():
        other = Ticket(Precedence.START, 1)
        engine.lock.request(other)
        assert other.wait(20)
        with engine.main.unlocked():
            assert engine.lock.held
        assert engine.lock.held, "the other one's"
        engine.lock.release()


@quick("2")
@pytest.mark.parametrize("pieces", [1, 2])
def test_a_finished_minibatch_leaves_no_tensors_to_the_garbage_collector(pieces: int) -> None:
    """A piece's call and its place in autograd's graph held each other, and with them the batch and its gradients."""
    line = Line(*(mlp() for _ in range(pieces)), cuts=(0, 3), in_flight=2)
    left: list[int] = []
    with line.running() as engine:
        gc.collect()
        gc.disable()
        try:
            for p in range(1, 41):
                engine.submit(p, line.plain(torch.randn(3, 4)))
                line.update(engine.finish(p).gradients)
                engine.publish(p)
                if p in (5, 40):  # to look takes long where much is imported
                    left.append(sum(isinstance(thing, Tensor) for thing in gc.get_objects()))
        finally:
            gc.enable()
    assert left[1] < left[0] + 30, left  # three or more of each minibatch would stay; a thread may be letting go
