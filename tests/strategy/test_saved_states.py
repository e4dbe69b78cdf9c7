"""A checkpoint of several virtual workers: each one's state of training, in a file that is plain to all others."""

from __future__ import annotations

import sys
import threading
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe import HetPipeStrategy, WSPCallback
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.launch.servers import FoundServers
from lightning_hetpipe.server.transport.security import Security
from lightning_hetpipe.strategy.checkpoints import ReplacingCheckpointIO
from lightning_hetpipe.strategy.shared_checkpoints import add_states, note, take_in_flight, take_state
from lightning_hetpipe.workers import group as group_module
from lightning_hetpipe.workers.collectives import gather_in_chunks
from lightning_hetpipe.workers.group import Group
from tests.exact.running import fit
from tests.support.equality import assert_same
from tests.support.host_memory import Peak
from tests.support.models import mlp, vectors
from tests.workers.test_group import SECONDS, Pair, group_of

PLUGIN = "MixedPrecision"


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with ExitStack() as exits:
        made = Pair(exits, monkeypatch)
        yield made
        made.close()


class Alone:
    """A virtual worker whose gathers reach nobody: what it gives to ``collect`` is what there is, and what is told."""

    def __init__(self, index: int, size: int, told: dict[int, bytes] | None = None) -> None:
        self.index, self.size, self.told = index, size, dict(told or {})

    def collect(self, content: Callable[[], bytes], what: str, opened: Callable[[], IO[bytes]]) -> dict[int, IO[bytes]]:
        if self.index:
            self.given = bytes(content())
            return {}
        files = {vw: opened() for vw in self.told}
        for vw, file in files.items():
            file.write(self.told[vw])
        return files


def dumped(worker: int) -> dict[str, Any]:
    """State that Lightning would save on ``worker`` after its steps, of which the second one has taken one more."""
    torch.manual_seed(worker)
    weight = nn.Parameter(torch.ones(3))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    groups: list[dict[str, Any]] = [{"params": [weight]}, {"params": [frozen], "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(1 + worker):
        weight.grad = torch.randn(3)
        optimizer.step()
        scheduler.step()
    return {
        "state_dict": {"weight": torch.ones(3)},
        "hyper_parameters": {"of": worker},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [scheduler.state_dict()],
        "loops": {"fit_loop": {"state_dict": {"combined_loader": [{"given": worker}]}}},
        "callbacks": {"EarlyStopping": {"wait_count": worker, "best_score": torch.tensor(float(worker))}},
        "global_step": 1 + worker,
        PLUGIN: {"scale": 2.0**worker},
    }


def saved(checkpoints: list[dict[str, Any]], folder: Path, rounded: Any = ((), ())) -> Path:
    """The file of virtual worker 0, where the others were there to give what they had."""
    told: dict[int, bytes] = {}
    for index in reversed(range(len(checkpoints))):
        group = Alone(index, len(checkpoints), told if index == 0 else None)
        add_states(checkpoints[index], cast(Group, group), PLUGIN, rounded[index], folder)
        if index:
            told[index] = group.given
    torch.save(checkpoints[0], folder / "saved.ckpt")
    return folder / "saved.ckpt"


def loaded(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def test_each_takes_what_it_gave(pair: Pair, tmp_path: Path) -> None:
    checkpoints = [dumped(0), dumped(1)]
    note(checkpoints[0], "in_flight", 3)
    rounded = [[torch.tensor([0.25, 0.5])], [torch.tensor([0.125, 1.0])]]
    for added in [
        pair.threads.submit(add_states, checkpoint, group, PLUGIN, lost, None)
        for checkpoint, group, lost in zip(checkpoints, pair.groups, rounded, strict=True)
    ]:
        added.result(SECONDS)
    torch.save(checkpoints[0], tmp_path / "saved.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for worker in (0, 1):
            checkpoint = loaded(tmp_path / "saved.ckpt")
            assert_same(rounded[worker], take_state(checkpoint, "saved.ckpt", worker, 2))
            assert take_in_flight(checkpoint) == 3
            # Its own, but for what the program says of itself, and what users' hooks put there.
            expected = {**dumped(worker), "hyper_parameters": {"of": 0}}
            assert_same(expected, checkpoint, f"VW {worker}")


class Exchange:
    """The servers' gather among threads, which keeps nothing."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.given: dict[int, bytes] = {}

    def member(self, index: int) -> Any:
        def gather(chunk: bytes) -> dict[int, bytes]:
            self.given[index] = chunk
            self.barrier.wait(SECONDS)
            found = dict(self.given)
            self.barrier.wait(SECONDS)
            return found

        return SimpleNamespace(gather=gather)


def test_no_process_holds_the_states_of_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They come one after the other, of which one is in memory then, and wait in files that have no name any more."""
    monkeypatch.setattr(group_module, "gather_in_chunks", partial(gather_in_chunks, chunk=1 << 18))
    workers, size = 5, 8 << 20
    exchange, groups = Exchange(workers), []
    for index in range(workers):
        groups.append(group_of(index, workers, FoundServers("", (), Security()), WSPCallback().settings))
        groups[-1]._launch = exchange.member(index)
    checkpoints = [dumped(index) for index in range(workers)]
    for index, checkpoint in enumerate(checkpoints):
        checkpoint["callbacks"]["large"] = torch.full((size,), index, dtype=torch.uint8)
    with ThreadPoolExecutor(workers) as threads:
        tracemalloc.start()  # of Python's memory, such as bytes, and not of torch's
        for added in [
            threads.submit(add_states, checkpoint, group, PLUGIN, (), tmp_path)
            for checkpoint, group in zip(checkpoints, groups, strict=True)
        ]:
            added.result(SECONDS)
        left, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert size < most < 3 * size  # a buffer that grows is copied
    assert left < size // 2
    assert list(tmp_path.iterdir()) == []
    torch.save(checkpoints[0], tmp_path / "saved.ckpt")
    for worker in range(workers):
        checkpoint = loaded(tmp_path / "saved.ckpt")
        take_state(checkpoint, "saved.ckpt", worker, workers)
        assert_same(torch.full((size,), worker, dtype=torch.uint8), checkpoint["callbacks"]["large"])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_each_reads_its_own_once(tmp_path: Path) -> None:
    """The others' states stay on the disk, and its own is read from there."""
    size = 40 << 20  # more than glibc would keep
    checkpoints = [dumped(index) for index in range(3)]
    for checkpoint in checkpoints:
        checkpoint["optimizer_states"][0]["state"]["large"] = torch.ones(size, dtype=torch.uint8)
    path = saved(checkpoints, tmp_path, rounded=[()] * 3)
    del checkpoints, checkpoint
    with Peak() as peak:
        checkpoint = ReplacingCheckpointIO().load_checkpoint(path)
        take_state(checkpoint, path, 2, 3)
    assert checkpoint["global_step"] == 3
    assert size < peak.bytes < 1.5 * size


@pytest.mark.parametrize(("before", "now"), [(2, 3), (2, 1), (1, 2)])
def test_another_number_of_virtual_workers_is_said(tmp_path: Path, before: int, now: int) -> None:
    checkpoints = [dumped(index) for index in range(before)]
    path = saved(checkpoints, tmp_path) if before > 1 else tmp_path / "saved.ckpt"
    torch.save(checkpoints[0], path)
    said = f"was saved by {before} and is resumed by {now} virtual workers?: each goes on from virtual worker 0's optim"
    for worker in range(now):
        checkpoint = loaded(path)
        with pytest.warns(UserWarning, match=said):
            assert take_state(checkpoint, path, worker, now) == []
        assert take_in_flight(checkpoint) is None
        assert_same(dumped(0), checkpoint)


def test_a_state_that_is_missing_is_said(tmp_path: Path) -> None:
    """A virtual worker that was lost before has none; virtual worker 0's takes its place."""
    path = tmp_path / "saved.ckpt"
    first = dumped(0)
    add_states(dumped(2), cast(Group, third := Alone(2, 3)), PLUGIN, (), None)
    add_states(first, cast(Group, Alone(0, 3, {2: third.given})), PLUGIN, (), None)
    torch.save(first, path)
    for worker, steps in ((0, 1), (1, 1), (2, 3)):
        checkpoint = loaded(path)
        with pytest.warns(UserWarning, match="holds no state of virtual worker 1, which had ended or was elsewhere"):
            take_state(checkpoint, path, worker, 3)
        assert checkpoint["global_step"] == steps


class Strange:
    """Something of a user's."""


@pytest.mark.parametrize("value", [Strange(), timedelta(seconds=1), lambda: None])
def test_what_does_not_travel_is_left_out_and_said(tmp_path: Path, value: Any) -> None:
    """A callback's state may be anything, and the checkpoint is written nevertheless."""
    checkpoints = [dumped(0), dumped(1)]
    checkpoints[1]["callbacks"] = {"Mine": value}
    with pytest.warns(UserWarning, match="callbacks of virtual worker 1 hold something that does not travel"):
        path = saved(checkpoints, tmp_path)
    checkpoint = loaded(path)
    with pytest.warns(UserWarning, match="holds no callbacks of virtual worker 1, which takes virtual worker 0's"):
        take_state(checkpoint, path, 1, 2)
    assert take_in_flight(checkpoint) is None
    expected = {**dumped(1), "callbacks": dumped(0)["callbacks"], "hyper_parameters": {"of": 0}}
    assert_same(expected, checkpoint)


def test_a_state_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = saved([dumped(0), dumped(1)], tmp_path)
    checkpoint = loaded(path)
    state: Tensor = checkpoint["hetpipe"]["states"][1]
    checkpoint["hetpipe"]["states"][1] = state[: len(state) // 2].clone()
    with pytest.raises(
        SettingError, match=r"ckpt_path='.*saved.ckpt' holds a state of virtual worker 1 that cannot be"
    ):
        take_state(checkpoint, path, 1, 2)


def test_evaluation_is_told_nothing(tmp_path: Path) -> None:
    path = saved([dumped(0), dumped(1)], tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert take_state(loaded(path), path, 0, 3, resuming=False) == []


@pytest.mark.parametrize("strategy", ["auto", "hetpipe"])
def test_others_resume_and_load_it(tmp_path: Path, strategy: str) -> None:
    """A plain Trainer, and a single virtual worker, go on from virtual worker 0's state."""
    task = mlp()
    record = fit(task, vectors(8, 4), max_epochs=1)
    assert record.trainer is not None
    record.trainer.save_checkpoint(tmp_path / "alone.ckpt")
    first = torch.load(tmp_path / "alone.ckpt", weights_only=True)
    path = saved([first, dumped(1)], tmp_path)
    chosen: Any = HetPipeStrategy(stages=2, in_flight=1) if strategy == "hetpipe" else strategy
    expected = fit(mlp(), vectors(8, 4), ckpt_path=str(tmp_path / "alone.ckpt"))
    found = fit(mlp(), vectors(8, 4), ckpt_path=str(path), strategy=chosen)
    assert len(found.outputs) == 2
    assert_same(expected.end, found.end)
