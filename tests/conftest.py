"""Fixtures of every test: one torch thread, a fixed seed, rank 0, no thread of ours that outlives it; also a clock."""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.support import forks, marks
from tests.support.namespaces import Machine, Unavailable, network
from tests.wsp.lost_time import summary

# Hundreds of programs take the package's byte code from where the first one leaves it, 0.6 s of each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

FILE = pytest.StashKey[Path]()
"""The file of the last test."""


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """One torch thread for each operation (sums depend on their number), and seeds that no other test has set."""
    import torch  # here, as a process that only hands out tests to others needs neither
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    known: Any = rank_zero_only  # a function, on which Lightning keeps the rank; a virtual worker's strategy sets it
    rank = known.rank
    threads = torch.get_num_threads()
    seed = os.environ.pop("PL_GLOBAL_SEED", None)
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)  # without a GPU the former formats a stack trace: 3 ms for each test
    yield
    known.rank = rank
    torch.set_num_threads(threads)
    os.environ.pop("PL_GLOBAL_SEED", None)
    if seed is not None:
        os.environ["PL_GLOBAL_SEED"] = seed


@pytest.fixture(scope="session", autouse=True)
def packages_looked_up_once() -> Iterator[None]:
    """Saves each Trainer the search for packages that bring callbacks along, most of what making one takes."""
    from lightning.fabric.utilities import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", functools.cache(registry.entry_points))
        yield


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """A run ends with all of its threads, however it ends."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("hetpipe")]
    for thread in left:
        thread.join(timeout=1)  # one that is on its last lines is not left behind
    alive = [thread for thread in left if thread.is_alive()]
    frames = sys._current_frames()
    stacks = ["".join(traceback.format_stack(frames[each.ident])) for each in alive if each.ident in frames]
    assert not alive, f"threads left alive: {', '.join(each.name for each in alive)}\n" + "\n".join(stacks)


@pytest.fixture
def accelerator() -> Iterator[Any]:
    """The test accelerator: four devices over host memory, for ``Trainer(accelerator=accelerator, devices=4)``.

    See tests/support/accelerator. Its limits and its peaks are the test's own.
    """
    from tests.support import accelerator

    if (reason := accelerator.missing()) is not None:
        pytest.skip(reason)
    gc.collect()  # what earlier tests have left on the devices
    accelerator.show()
    yield accelerator.TestAccelerator()
    accelerator.hide()


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    """Two machines to train on, where this one may make them."""
    try:
        with network(2) as made:
            yield made
    except Unavailable as why:
        pytest.skip(str(why))


def pytest_configure(config: pytest.Config) -> None:
    marks.FEW = config.getoption("markexpr") == "not slow"
    hypothesis.settings.register_profile("tests", derandomize=marks.FEW)
    hypothesis.settings.load_profile("tests")
    if config.getoption("dist", "no") == "no" or hasattr(config, "workerinput"):
        forks.serve()


def pytest_unconfigure() -> None:
    forks.end()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what collection makes, which all stays, to no garbage collector: it took a seventh of collection's time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest leaves slow tests out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests may start several programs, each of which may take minutes on a busy machine."""
    # First those that take longest: at the end the other processes of pytest would have nothing left to do.
    items.sort(key=lambda item: item.path.parent.name not in {"wsp", "packaging", "examples", "launch", "workers"})
    missing: dict[tuple[Path, str], set[str]] = {}
    for item in items:
        name, _, case = item.name.partition("[")
        if mark := item.get_closest_marker("quick"):
            missing.setdefault((item.path, name), {*mark.args}).discard(case[:-1])
            if case[:-1] not in mark.args:
                item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))
    if not any("::" in each for each in config.args):  # else not all cases are collected
        wrong = [f"{path}::{name}[{case}]" for (path, name), cases in missing.items() for case in cases]
        if wrong:
            raise pytest.UsageError(f"@quick names cases that are not there: {', '.join(wrong)}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave what stays of earlier files, such as caches, to no garbage collector, as what collection makes.

    Each collection of all went through it: half a second for each where a process had made a thousand fits, of which
    those on an accelerator make one or two.
    """
    if item.config.stash.get(FILE, None) != item.path:
        item.config.stash[FILE] = item.path
        gc.collect()
        gc.freeze()


class Clock:
    """Takes the place of the module ``time``, and stands still except where a test moves it on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which layers are profiled and training time is counted."""
    clock = Clock()
    monkeypatch.setattr("lightning_hetpipe.capture.profiling.time", clock)
    monkeypatch.setattr("lightning_hetpipe.reporting.report.perf_counter", clock.perf_counter)
    return clock


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the table of the mutation check, and what faults of the soak cost, where these ran."""
    told: dict[str, list[Any]] = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties if report.when == "call" else ():
            told.setdefault(name, []).append(value)
    if lost := [(what, seconds) for each in told.get("time lost", ()) for what, seconds in each]:
        terminalreporter.write_line(summary(lost))
    if rows := sorted(map(tuple, told.get("mutation", ()))):
        terminalreporter.section("mutation check: rule, what was broken, which test noticed")
        for row in rows:
            terminalreporter.write_line(" | ".join(row))
