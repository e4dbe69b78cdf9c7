"""Ctrl-C and failing callbacks end ``fit`` although some ``training_step`` that runs ahead does not come back."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
from torch import Tensor, nn

from lightning_hetpipe import WSPCallback
from lightning_hetpipe.launch.launcher import Launcher
from lightning_hetpipe.launch.ranks import Rank, Role
from lightning_hetpipe.pipeline import engine as engine_module
from lightning_hetpipe.server.protocol.identifiers import PeerFailed
from tests.exact.pipelines import even
from tests.support.small import Learner, assert_clean, batches, layers, plain_step
from tests.support.trainers import quiet_trainer

HANGING = r"could not end all its threads: .*training_step of minibatch {} is running"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And Ctrl-C works afterwards: Lightning ignores it while it shuts down."""
    monkeypatch.setattr(engine_module, "JOIN_SECONDS", 0.3)
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


class Gate:
    """User code that hangs at it, until the test lets it go on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.left = threading.Event()
        self._open = threading.Event()

    def hang(self) -> None:
        self.reached.set()
        self._open.wait(100)
        self.left.set()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.set()
        join_pipeline()


def join_pipeline() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("hetpipe"):
            thread.join(10)


def press_control_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Presser:
    """Presses Ctrl-C once ``gate`` was reached."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        if self._gate.reached.wait(60):
            press_control_c()

    def __enter__(self) -> Presser:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.join()


def hanging_step(gate: Gate, at: int, after_the_call: bool) -> Any:
    def step(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
        if batch_idx == at and not after_the_call:
            gate.hang()
        try:
            return plain_step(module, x, y, batch_idx)
        finally:  # also where the call ends because the minibatch is discarded
            if batch_idx == at and after_the_call:
                gate.hang()

    return step


@pytest.mark.parametrize(
    ("after_the_call", "in_flight"),
    [
        (False, 3),
        (True, 1),
        pytest.param(False, 1, marks=pytest.mark.slow),
        pytest.param(True, 3, marks=pytest.mark.slow),
    ],
)
def test_control_c_while_a_step_hangs(after_the_call: bool, in_flight: int) -> None:
    """Lightning's thread waits for a step that hangs, or for the lock over user code that a later one holds. Another
    run is as if nothing had been."""
    with Gate() as gate:
        module = Learner(hanging_step(gate, 3, after_the_call))
        trainer = quiet_trainer(even(4, 2, in_flight))
        with Presser(gate), pytest.warns(UserWarning, match=HANGING.format(4)), pytest.raises(SystemExit):
            trainer.fit(module, batches(8))
        assert not gate.left.is_set()
        assert trainer.interrupted
        assert trainer.global_step <= 3
        assert_clean(trainer, module)
    module.step = plain_step
    trainer = quiet_trainer(even(4, 2, in_flight))
    trainer.fit(module, batches(8))
    assert trainer.global_step == 8


class Terminated(L.Callback):
    """Somebody tells the program to end, in its second step."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_script_that_was_told_to_end_says_so_by_its_exit_code() -> None:
    """It was 0, as in a plain run: a script that goes by it went on with half a training."""
    module, before = Learner(), signal.getsignal(signal.SIGTERM)
    trainer = quiet_trainer(even(4, 2, 3), callbacks=[Terminated()])
    try:
        with pytest.raises(SystemExit) as ended:
            trainer.fit(module, batches(8))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 143
    assert trainer.global_step == 2


@contextmanager
def every_thread_ends() -> Iterator[None]:
    """Nothing is warned of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*could not end all its threads")
        yield


class Counter:
    """Counts the calls of a layer and of its copies."""

    def __init__(self) -> None:
        self.calls = 0

    def __deepcopy__(self, memo: Any) -> Counter:
        return self


class Pressing(nn.Module):
    """A layer in whose fifth forward somebody presses Ctrl-C."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()

    def forward(self, x: Tensor) -> Tensor:
        self.counter.calls += 1
        if self.counter.calls == 5:
            press_control_c()
        return x * 1.0


@pytest.mark.parametrize("in_flight", [1, 3])
def test_control_c_while_a_layer_runs(in_flight: int) -> None:
    module = Learner(net=nn.Sequential(Pressing(), *layers()))
    trainer = quiet_trainer(even(5, 2, in_flight))
    with every_thread_ends(), pytest.raises(SystemExit):
        trainer.fit(module, batches(200))
    assert trainer.interrupted
    assert trainer.global_step < 200
    assert_clean(trainer, module)


class PressesInHook(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            press_control_c()


@pytest.mark.parametrize("in_flight", [1, 3])
def test_control_c_in_a_callback(in_flight: int) -> None:
    """In Lightning's own thread, which holds the lock over user code."""
    module = Learner()
    trainer = quiet_trainer(even(4, 2, in_flight), callbacks=[PressesInHook()])
    with every_thread_ends(), pytest.raises(SystemExit):
        trainer.fit(module, batches(200))
    assert trainer.global_step == 5
    assert_clean(trainer, module)


class Fails(L.Callback):
    """Fails after the second minibatch, when a stage has the third one in hand."""

    def __init__(self) -> None:
        self.in_hand = threading.Event()
        self.failed = threading.Event()

    def before_pass(self, stage: int, work: str, minibatch: int) -> None:
        if (stage, work, minibatch) == (1, "forward", 3):
            self.in_hand.set()
            assert self.failed.wait(60)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            assert self.in_hand.wait(60)
            self.failed.set()
            raise ArithmeticError("in the callback")


def test_a_callback_fails_while_a_later_step_hangs() -> None:
    callback = Fails()
    strategy = even(4, 2, 3)
    strategy._before_pass = callback.before_pass
    with Gate() as gate:
        module = Learner(hanging_step(gate, 2, after_the_call=True))
        trainer = quiet_trainer(strategy, callbacks=[callback])
        with (
            pytest.warns(UserWarning, match=HANGING.format(3)),
            pytest.raises(ArithmeticError, match="in the callback"),
        ):
            trainer.fit(module, batches(8))
        assert gate.reached.is_set()
        assert not gate.left.is_set()
        assert_clean(trainer, module)


@pytest.mark.parametrize(("failure", "ends"), [("SIGTERMException: ", SystemExit), ("ValueError: 3", PeerFailed)])
def test_all_end_like_the_one_that_was_told_to(failure: str, ends: type[BaseException]) -> None:
    """The others ended with a traceback and 1, as if something had gone wrong."""

    def fit() -> None:
        raise PeerFailed(f"VW 1 failed: {failure}")

    with pytest.raises(ends) as ended:
        Launcher(Rank(0, 2, 0, 0, 1, 2, Role.FIRST), dict, lambda: WSPCallback().settings, int).launch(fit)
    assert getattr(ended.value, "code", 143) == 143
