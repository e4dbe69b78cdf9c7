"""Nothing grows over 2,000 steps: what is alive at step 2,000 is what was alive at step 200."""

from __future__ import annotations

import contextvars
import gc
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.pipeline.engine import Engine
from lightning_hetpipe.pipeline.stage_messages import Parcel
from tests.support.ahead import Memory
from tests.support.captured_models import GPT, Words
from tests.support.models import ADAMW, CLASSES, Learner, Pieces, Task, vectors, words
from tests.support.trainers import quiet_trainer

EARLY, LATE = 200, 2000

RESIDENT = 16 * 2**20
"""Bytes by which the process may grow: the allocator's, and what Lightning keeps of 1,800 steps. A tensor of 1,000
floats that each minibatch left behind would be 7 MiB; the models here have up to 30 of that kind."""

PAGE = os.sysconf("SC_PAGE_SIZE")


class Looks(L.Callback):
    """Counts what is alive after steps EARLY and LATE, while nothing moves."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.resident: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step not in (EARLY, LATE):
            return
        assert isinstance(trainer.strategy, HetPipeStrategy)
        engine: Any = trainer.strategy._run.pipeline
        engine.drain()
        let_go(engine)
        gc.collect()
        alive = [thing for thing in gc.get_objects() if isinstance(thing, Tensor)]
        memories = [stage.memory for stage in engine.stages]
        self.seen.append(
            {
                "tensors": Counter(str(tensor.shape) for tensor in alive),
                "threads": sorted(thread.name for thread in threading.enumerate()),
                "objects": kinds(),
                "bytes": [(m.versions.now, m.activations.now, m.gradients.now, m.minibatches.now) for m in memories],
                "most": [(m.versions.most, m.activations.most) for m in memories[-1:]],
            }
        )
        del alive
        self.resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * PAGE)


class Nothing:
    """A batch in flight that comes to nothing: who handles it has let go of what it handled before."""

    def __init__(self) -> None:
        self.context = contextvars.copy_context()
        self.handled = threading.Event()

    def run(self) -> None:
        self.handled.set()


class Unknown:
    """A message that comes to nothing: a stage that asks whose it is has let go of what it handled before."""

    def __init__(self) -> None:
        self.handled = threading.Event()

    @property
    def minibatch(self) -> int:
        self.handled.set()
        return 0


def let_go(engine: Engine) -> None:
    """Waits until no thread holds the end of its last minibatch, which may be complete a moment before."""
    for runner in engine._runners:
        nothing = Nothing()
        runner.put(nothing)  # type: ignore[arg-type]
        assert nothing.handled.wait(60)
    for stage in engine.stages:
        unknown = Unknown()
        stage.put(Parcel(unknown))  # type: ignore[arg-type]
        assert unknown.handled.wait(60)


def kinds() -> Counter[str]:
    """Number of objects of each of our own classes, but for tickets: a thread keeps its last for a while."""
    modules = ((type(thing), getattr(type(thing), "__module__", "")) for thing in gc.get_objects())
    return Counter(
        kind.__qualname__
        for kind, module in modules
        if str(module).startswith("lightning_hetpipe") and kind.__name__ != "Ticket"
    )


def normed() -> Learner:
    layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(16, CLASSES)]
    return Task(nn.Sequential(*layers))


MODELS: dict[str, tuple[Callable[[], Learner], Callable[[int, int], DataLoader[Any]]]] = {
    "normed": (normed, vectors),
    "pieces": (Pieces, vectors),
    "captured": (lambda: Words(GPT(blocks=1, dropout=0.1), ADAMW), words),
}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the memory of a process is read from Linux's /proc")
@pytest.mark.parametrize(
    ("model", "epochs", "recompute"),
    [
        ("normed", 1, False),
        ("normed", 20, True),
        ("pieces", 1, True),
        ("pieces", 20, False),
        ("captured", 1, False),
        ("captured", 20, True),
    ],
)
def test_nothing_grows(model: str, epochs: int, recompute: bool) -> None:
    make, load = MODELS[model]
    looks, logger = Looks(), Memory()
    strategy = HetPipeStrategy(stages=2, in_flight=3, recompute=recompute)
    settings: dict[str, Any] = {"logger": logger, "log_every_n_steps": 500, "callbacks": [looks]}
    trainer = quiet_trainer(strategy, max_epochs=epochs, **settings)
    trainer.fit(make(), load(2 * ((LATE + 100) // epochs), 2))
    early, late = looks.seen
    for what, before in early.items():
        assert late[what] == before, what
    assert looks.resident[1] - looks.resident[0] < RESIDENT
