"""The engine, driven directly: failures surface where they belong, waits explain themselves, and threads end."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import PipelineStalled, SettingError
from lightning_hetpipe.pipeline import engine as engine_module
from lightning_hetpipe.pipeline.threads import Watchdog
from lightning_hetpipe.pipeline.user.user_section import ProcessSection, ProcessState
from tests.pipeline.driving import Held, Line, X, assert_gradients, mlp, stuck_layer


def failing_layer(where: str) -> nn.Module:
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            raise ArithmeticError("in the layer's backward")

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if where == "forward":
                return self.divide(x)
            apply: Any = Backward.apply
            y: Tensor = apply(x)
            return y

        def divide(self, x: Tensor) -> Tensor:
            raise ArithmeticError("in the layer's forward")

    return Fails()


def frames(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


class Torn(ProcessSection):
    """State that cannot be swapped, the ``last`` time that ``what`` is asked of it."""

    def __init__(self, what: str, last: int, after: threading.Event | None = None) -> None:
        super().__init__(ProcessState.seeded(0, 0, 0))
        self.what, self.left, self.after = what, last, after

    def enter(self) -> None:
        self.count("enter")
        super().enter()

    def leave(self, for_good: bool = False) -> None:
        super().leave(for_good)
        self.count("leave")

    def count(self, what: str) -> None:
        self.left -= what == self.what
        if what == self.what and not self.left:
            assert self.after is None or self.after.wait(10)
            raise ArithmeticError(f"cannot {what}")


@pytest.mark.parametrize(("what", "last"), [("enter", 1), ("enter", 2), ("leave", 1)])
def test_what_fails_around_user_code_fails_the_minibatch(what: str, last: int) -> None:
    """It was a hang: the minibatch never ended, and held the lock over user code."""
    line = Line(mlp(), cuts=(0, 2))
    with line.running() as engine:
        engine.submit(1, line.step(lambda: line.call(X).sum(), section=Torn(what, last)))
        engine.submit(2, line.plain())
        with pytest.raises(ArithmeticError, match=f"cannot {what}"):
            engine.finish(1)
        assert engine.finish(2).gradients


@pytest.mark.parametrize("late", [False, True])
def test_what_fails_after_user_code_holds_nobody_up(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients may be there before, and then they stay."""
    line = Line(mlp(), cuts=(0, 2))
    there = threading.Event()
    with line.running() as engine:
        section = Torn("leave", 2, there if late else None)
        engine.submit(1, line.step(lambda: line.call(X).sum(), section=section))
        engine.submit(2, line.plain())
        end = engine.minibatches[1].end

        def ended(failure: BaseException | None = None) -> None:
            end(failure)
            there.set()

        monkeypatch.setattr(engine.minibatches[1], "end", ended)
        with nullcontext() if late else suppress(ArithmeticError):
            assert engine.finish(1).gradients
        assert engine.finish(2).gradients


@pytest.mark.parametrize("cuts", [(0,), (0, 1, 2)])
def test_a_layers_failure_surfaces_where_the_user_called_it(cuts: tuple[int, ...]) -> None:
    line = Line(nn.Sequential(nn.Linear(4, 4), failing_layer("forward"), nn.Linear(4, 4)), cuts=cuts)

    def the_users_step() -> Tensor:
        y: Tensor = line.call(X)
        return y.sum()

    with line.running() as engine:
        engine.submit(1, line.step(the_users_step))
        with pytest.raises(ArithmeticError, match="in the layer's forward") as caught:
            engine.finish(1)
    names = frames(caught.value)
    assert "the_users_step" in names
    assert names[-2:] == ["forward", "divide"]
    assert line.threads() == []


@pytest.mark.parametrize("cuts", [(0,), (0, 1, 2), (0, 2)])
def test_a_failing_backward_surfaces(cuts: tuple[int, ...]) -> None:
    line = Line(nn.Sequential(nn.Linear(4, 4), failing_layer("backward"), nn.Linear(4, 4)), cuts=cuts)
    with line.running() as engine:
        engine.submit(1, line.plain())
        with pytest.raises(ArithmeticError, match="in the layer's backward") as caught:
            engine.finish(1)
    assert frames(caught.value)[-1] == "backward"
    assert line.threads() == []


def test_a_failing_backward_between_pieces_surfaces() -> None:
    decoder = nn.Sequential(failing_layer("backward"), nn.Linear(4, 4))
    line = Line(mlp(), decoder, cuts=(0, 2, 5))
    with line.running() as engine:
        engine.submit(1, line.plain())
        with pytest.raises(ArithmeticError, match="in the layer's backward"):
            engine.finish(1)
    assert line.threads() == []


def fail_before(line: Line) -> Tensor:
    raise ZeroDivisionError("before the call")


def fail_after(line: Line) -> Tensor:
    line.call(X)
    raise ZeroDivisionError("after the call")


def fail_in_the_loss(line: Line) -> Tensor:
    output: Any = line.call(X)

    def hook(_: Tensor) -> None:
        raise ZeroDivisionError("in the loss")

    scaled = output * 2
    scaled.register_hook(hook)
    loss: Tensor = scaled.sum()
    return loss


@pytest.mark.parametrize("fail", [fail_before, fail_after, fail_in_the_loss])
def test_failures_of_user_code_surface(fail: Callable[[Line], Tensor]) -> None:
    line = Line(mlp(), cuts=(0, 2), in_flight=3)
    with line.running() as engine:
        engine.submit(1, line.plain())
        engine.submit(2, line.step(lambda: fail(line)))
        engine.submit(3, line.plain())
        assert_gradients(line, engine.finish(1).gradients, line.expected())
        with pytest.raises(ZeroDivisionError):
            engine.finish(2)
        # The others are not harmed.
        assert_gradients(line, engine.finish(3).gradients, line.expected())
    assert line.threads() == []


def test_a_check_of_the_loss_may_refuse_it() -> None:
    line = Line(mlp())

    def check(loss: Tensor, ours: Collection[int]) -> None:
        raise SettingError(f"refused a loss of {loss.item():.0f}")

    with line.running() as engine:
        engine.submit(1, line.step(lambda: line.call(X).sum() * 0, check))
        with pytest.raises(SettingError, match="refused a loss of"):
            engine.finish(1)


def test_a_stages_failure_cannot_be_swallowed() -> None:
    """A training_step that catches everything would go on without its gradients."""
    line, swallowed = Line(nn.Sequential(nn.Linear(4, 4), failing_layer("forward"))), list[Exception]()
    with line.running() as engine:
        engine.submit(1, line.swallowing(swallowed))
        with pytest.raises(ArithmeticError, match="in the layer's forward"):
            engine.finish(1)
    assert [type(error) for error in swallowed] == [ArithmeticError]


# Calls that do not fit.


def twice(line: Line) -> None:
    line.call(X, 0)
    line.call(X, 0)


def out_of_order(line: Line) -> None:
    line.call(X, 1)


def missing(line: Line) -> None:
    line.call(X, 0)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (twice, "the pipelined module 'piece0' was called more often than once; call the"),
        (out_of_order, "the pipelined module 'piece1' was called out of order; call the .* skipped at random"),
        (
            missing,
            "training_step did not call the pipelined module 'piece1' this time; call the same .* skipped at random",
        ),
    ],
)
def test_calls_must_be_those_of_the_first_minibatch(calls: Callable[[Line], None], message: str) -> None:
    line = Line(mlp(), mlp(), cuts=(0, 4))

    def run() -> Tensor:
        calls(line)
        return torch.zeros((), requires_grad=True)

    with line.running() as engine:
        engine.submit(1, line.step(run))
        with pytest.raises(SettingError, match=message):
            engine.finish(1)
        engine.submit(2, line.plain())
        assert_gradients(line, engine.finish(2).gradients, line.expected())
    assert line.threads() == []


def test_a_layer_that_only_later_changes_its_input_is_refused() -> None:
    class Late(nn.Module):
        late = False

        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2.0) if Late.late else x * 2.0

    line = Line(nn.Sequential(Late(), nn.Linear(4, 4), nn.Tanh()), cuts=(0, 2))
    with line.running() as engine:
        engine.submit(1, line.plain())
        engine.finish(1)
        engine.publish(1)
        Late.late = True
        engine.submit(2, line.plain(X.clone()))
        with pytest.raises(SettingError, match=r"layers piece0\.0 to piece0\.1 changed its input in place"):
            engine.finish(2)


# Waits that do not end by themselves.


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "JOIN_SECONDS", 0.1)


@pytest.mark.usefixtures("short_waits")
def test_a_stuck_layer_is_named() -> None:
    entered, release = threading.Event(), threading.Event()
    net = nn.Sequential(nn.Linear(4, 4), stuck_layer(entered, release), nn.Tanh(), nn.Linear(4, 4))
    line = Line(net, cuts=(0, 1, 3), in_flight=1, timeout=0.2)
    with line.stuck(release) as engine:
        engine.submit(1, line.plain())
        with pytest.raises(PipelineStalled) as caught:
            engine.finish(1)
        message = str(caught.value)
        assert "stage 0 is idle" in message
        assert "stage 1 has run the forward of minibatch 1 (layers piece0.1 to piece0.2) for" in message
        assert "minibatches in flight: 1" in message
        assert message.endswith("if that is how long your layers take, raise HetPipeStrategy(timeout=...)")
        with pytest.warns(UserWarning, match=r"could not end all its threads: .*stage 1 has run the forward"):
            engine.close()
        assert "hetpipe-stage-1" in line.threads()


def give_up_first_in_lightnings_thread(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its waits run out at once, and those of all others late: otherwise it is chance whose do first."""
    watchdog = line.engine.watchdog
    original, hasty = watchdog.wait, Watchdog(0.2, lambda: False, line.engine.describe)

    def wait(ready: Callable[[float], bool], who: str) -> None:
        (hasty.wait if who.startswith("Lightning's step") else original)(ready, who)

    monkeypatch.setattr(watchdog, "wait", wait)


@pytest.mark.usefixtures("short_waits")
def test_threads_end_when_a_layer_goes_on_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout that was too short: whatever was in flight unwinds, although nobody waits for it any more."""
    entered, release = threading.Event(), threading.Event()
    line = Line(nn.Sequential(nn.Linear(4, 4), stuck_layer(entered, release)), cuts=(0, 1), in_flight=2)
    give_up_first_in_lightnings_thread(line, monkeypatch)
    with line.stuck(release) as engine:
        engine.submit(1, line.plain())
        engine.submit(2, line.plain())
        with pytest.raises(PipelineStalled, match=r"Lightning's step for minibatch 1 .*; minibatches in flight: 1, 2;"):
            engine.finish(1)
        with pytest.warns(UserWarning, match="could not end all its threads"), suppress(PipelineStalled):
            engine.close()


@pytest.mark.usefixtures("short_waits")
def test_closing_over_a_stuck_layer_warns() -> None:
    """Without a failure before: the program just ends."""
    entered, release = threading.Event(), threading.Event()
    line = Line(nn.Sequential(stuck_layer(entered, release), nn.Linear(4, 4)), timeout=0.2)
    with line.stuck(release) as engine:
        engine.submit(1, line.plain())
        with engine.main.unlocked():
            assert entered.wait(30)
        # It is chance which of two waits runs out first: that for the minibatch, or the minibatch's own.
        with pytest.warns(UserWarning, match="could not end all its threads"), suppress(PipelineStalled):
            engine.close()


def test_user_code_may_take_as_long_as_it_likes() -> None:
    """A breakpoint in training_step: the lock is held, so that no wait runs out."""
    line, release = Line(mlp(), in_flight=2, timeout=0.05), threading.Event()
    timer = threading.Timer(0.4, release.set)

    def run() -> Tensor:
        timer.start()
        assert release.wait(30)
        loss: Tensor = line.call(X).square().sum()
        return loss

    with line.running() as engine:
        engine.submit(1, line.step(run))
        engine.submit(2, line.plain())
        engine.finish(1)
        engine.finish(2)


def test_control_c_ends_at_once() -> None:
    """Whatever is in flight: the step that waited is interrupted, and no thread is left."""
    main = threading.main_thread().ident
    assert main is not None
    held = Held(1, "forward", 1)
    line = Line(mlp(), cuts=(0, 2), in_flight=2, before_pass=held)

    def interrupt() -> None:
        held.reached.wait(30)
        signal.pthread_kill(main, signal.SIGINT)
        held.release.set()

    presser = threading.Thread(target=interrupt)
    with line.running() as engine:
        engine.submit(1, line.plain())
        engine.submit(2, line.plain())
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            engine.finish(1)
    presser.join()
    assert line.threads() == []


def test_a_second_control_c_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minibatches waited for the lock over user code, which Lightning's thread held while it waited for them."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    line = Line(mlp(), cuts=(0, 2), in_flight=2)
    with line.running() as engine:
        engine.submit(1, line.plain())
        engine.submit(2, line.plain())
        monkeypatch.setattr(engine.main, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.close()
        assert line.threads() == []
