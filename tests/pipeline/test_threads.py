"""Threads have names, their number of torch threads, and an end; waits end with an explanation."""

from __future__ import annotations

import contextvars
import gc
import queue
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hetpipe.errors import PipelineStalled
from lightning_hetpipe.pipeline import threads
from lightning_hetpipe.pipeline.threads import PerThread, Watchdog, Worker
from tests.support.accelerator import NAME, TestAccelerator


class TestWorker:
    def test_it_handles_its_inbox_in_order_and_ends(self) -> None:
        handled: list[int] = []
        worker = Worker("hetpipe-test", handled.append, torch_threads=1)
        for item in range(20):
            worker.put(item)
        worker.close()
        assert worker.join(10)
        assert handled == list(range(20))

    def test_its_thread_has_its_name_and_does_not_keep_the_process_alive(self) -> None:
        seen: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
        worker = Worker[int]("hetpipe-test-7", lambda _: seen.put(threading.current_thread()), torch_threads=1)
        worker.put(1)
        thread = seen.get(timeout=10)
        assert (thread.name, worker.name, thread.daemon) == ("hetpipe-test-7", "hetpipe-test-7", True)
        worker.close()
        assert worker.join(10)
        assert not thread.is_alive()

    def test_it_sees_the_settings_of_the_thread_that_made_it(self) -> None:
        """A user's ``torch._dynamo.config.recompile_limit = 64`` counts for what stages compile."""
        seen: queue.SimpleQueue[int] = queue.SimpleQueue()
        setting = contextvars.ContextVar("setting", default=8)

        def make() -> Worker[int]:
            setting.set(64)
            return Worker[int]("hetpipe-test", lambda _: seen.put(setting.get()), torch_threads=1)

        worker = contextvars.copy_context().run(make)
        worker.put(1)
        assert (seen.get(timeout=10), setting.get()) == (64, 8)
        worker.close()
        assert worker.join(10)

    @pytest.mark.parametrize("count", [1, 3])
    def test_torch_operations_use_as_many_threads_as_it_says(self, count: int) -> None:
        seen: queue.SimpleQueue[int] = queue.SimpleQueue()
        worker = Worker[int]("hetpipe-test", lambda _: seen.put(torch.get_num_threads()), torch_threads=count)
        worker.put(1)
        assert seen.get(timeout=10) == count
        worker.close()
        assert worker.join(10)

    def test_it_does_not_keep_what_it_has_handled(self) -> None:
        class Item:
            pass

        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        worker = Worker[Item]("hetpipe-test", lambda _: done.put(None), torch_threads=1)
        item = Item()
        gone = threading.Event()
        weakref.finalize(item, gone.set)
        worker.put(item)
        done.get(timeout=10)
        del item
        gc.collect()
        assert gone.wait(10)  # while the thread waits for the next one
        worker.close()
        assert worker.join(10)

    def test_it_says_that_it_has_not_ended_yet(self) -> None:
        release = threading.Event()
        worker = Worker[int]("hetpipe-test", lambda _: (release.wait(30), None)[1], torch_threads=1)
        worker.put(1)
        worker.close()
        assert not worker.join(0.01)
        release.set()
        assert worker.join(10)


class Scene:
    """A wait against a clock of its own: each look at the time of waiting moves it on by that time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self.user_code_until = 0.0
        self.moves_at: list[float] = []
        self.ready_at = float("inf")
        self.watchdog = Watchdog(8.0, lambda: self.now <= self.user_code_until, lambda: "stage 0 is idle")
        monkeypatch.setattr(threads, "time", SimpleNamespace(monotonic=lambda: self.now))

    def ready(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now += seconds
        while self.moves_at and self.moves_at[0] <= self.now:
            self.moves_at.pop(0)
            self.watchdog.moved()
        return self.now >= self.ready_at

    def wait(self) -> float:
        """When the wait ended."""
        self.watchdog.wait(self.ready, "the test")
        return self.now


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


class TestWatchdog:
    def test_it_returns_as_soon_as_it_is_ready(self, scene: Scene) -> None:
        scene.ready_at = 3.0
        assert scene.wait() == 3.0

    def test_what_is_ready_is_not_waited_for(self, scene: Scene) -> None:
        scene.ready_at = 0.0
        scene.wait()
        assert len(scene.waits) == 1

    def test_it_explains_itself_when_nothing_moves(self, scene: Scene) -> None:
        with pytest.raises(PipelineStalled) as caught:
            scene.wait()
        assert str(caught.value) == (
            "the test has waited for 8 s while nothing moved: stage 0 is idle; if that is how long your layers take,"
            " raise HetPipeStrategy(timeout=...)"
        )
        assert 8.0 < scene.now <= 9.0

    def test_every_move_starts_it_anew(self, scene: Scene) -> None:
        scene.moves_at = [6.0, 13.0, 20.0]
        with pytest.raises(PipelineStalled):
            scene.wait()
        assert 28.0 < scene.now <= 29.0

    def test_the_time_of_user_code_does_not_count(self, scene: Scene) -> None:
        """A breakpoint in training_step is no stall."""
        scene.user_code_until = 1000.0
        scene.ready_at = 1005.0
        assert scene.wait() == 1005.0

    def test_it_counts_from_the_end_of_user_code(self, scene: Scene) -> None:
        scene.user_code_until = 1000.0
        with pytest.raises(PipelineStalled):
            scene.wait()
        assert 1008.0 < scene.now <= 1009.0

    def test_it_looks_up_often_enough_for_a_short_timeout(self, scene: Scene) -> None:
        scene.watchdog.seconds = 0.4
        with pytest.raises(PipelineStalled, match=r"waited for 0\.4 s"):
            scene.wait()
        assert max(scene.waits) == pytest.approx(0.1)

    def test_it_looks_up_every_second_at_least(self, scene: Scene) -> None:
        """So that Ctrl-C is noticed on platforms where a wait cannot be interrupted."""
        scene.watchdog.seconds = 1e6
        scene.ready_at = 50.0
        scene.wait()
        assert max(scene.waits) == 1.0


class TestPerThread:
    def test_a_thread_holds_its_own(self) -> None:
        held: PerThread[str] = PerThread()
        seen: list[str | None] = [held.get()]
        with held.holding("outer"):
            thread = threading.Thread(target=lambda: seen.append(held.get()))
            thread.start()
            thread.join(10)
            with held.holding("inner"):
                seen.append(held.get())
            seen.append(held.get())
        assert [*seen, held.get()] == [None, None, "inner", "outer", None]

    def test_hooks_on_an_accelerator_know_it(self, accelerator: TestAccelerator) -> None:
        """Autograd would run them in threads of its own, of which the table that torch carries to them has been a
        crash: torch 2.11 keeps no reference to what it carries, and lets nobody take it out."""
        held: PerThread[str] = PerThread()
        seen: list[tuple[str | None, int]] = []
        weight: Any = torch.ones(2, device=f"{NAME}:0", requires_grad=True)
        weight.register_hook(lambda _: seen.append((held.get(), threading.get_ident())))
        with held.holding("minibatch"):
            (weight * 2).sum().backward()
        assert seen == [("minibatch", threading.get_ident())]
