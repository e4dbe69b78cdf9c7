"""Checkpoint files are written from and read into where tensors lie, without a copy of all of them in memory."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor, nn

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.strategy.checkpoints import ReplacingCheckpointIO
from tests.support.equality import assert_same
from tests.support.host_memory import Peak, is_mapped
from tests.support.models import labelled
from tests.support.small import Learner, batches, pipeline
from tests.support.trainers import quiet_trainer

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

CONTENT: dict[str, Any] = {
    "state_dict": {"weight": torch.arange(5000.0)},
    "optimizer_states": [{"state": {0: {"step": torch.tensor(1.0), "moment": torch.arange(5000.0)}}}],
    "callbacks": {"mine": {"kept": torch.arange(5000.0), "seen": [1, 2]}},
    "epoch": 3,
}


def test_what_is_written_is_what_lightning_would_write(tmp_path: Path) -> None:
    """Byte for byte."""
    ReplacingCheckpointIO().save_checkpoint(CONTENT, tmp_path / "new" / "it.ckpt")
    TorchCheckpointIO().save_checkpoint(CONTENT, tmp_path / "lightnings.ckpt")
    assert (tmp_path / "new" / "it.ckpt").read_bytes() == (tmp_path / "lightnings.ckpt").read_bytes()


def test_a_file_may_be_replaced_and_deleted_while_it_is_loaded(tmp_path: Path) -> None:
    path, plugin = tmp_path / "it.ckpt", ReplacingCheckpointIO()
    plugin.save_checkpoint(CONTENT, path)
    loaded = plugin.load_checkpoint(path)
    plugin.save_checkpoint({"epoch": 4}, path)
    assert_same(CONTENT, loaded)
    loaded = plugin.load_checkpoint(path)
    plugin.remove_checkpoint(path)
    assert loaded == {"epoch": 4}


@linux
def test_only_what_the_strategy_copies_lies_in_the_file(tmp_path: Path) -> None:
    """Callbacks may keep what they are given, and the file may be cut off by then."""
    path, plugin = tmp_path / "it.ckpt", ReplacingCheckpointIO()
    plugin.save_checkpoint(CONTENT, path)
    loaded = plugin.load_checkpoint(path)
    assert is_mapped(path)
    kept = loaded["callbacks"]
    del loaded
    gc.collect()
    assert not is_mapped(path)
    path.write_bytes(b"")
    assert_same(CONTENT["callbacks"], kept)


def old_format(path: Path) -> None:
    torch.save(CONTENT, path, _use_new_zipfile_serialization=False)


def compressed(path: Path) -> None:
    """As a tool that packs archives again leaves it."""
    torch.save(CONTENT, path)
    with zipfile.ZipFile(path) as archive:
        entries = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries:
            archive.writestr(name, content)
        archive.writestr("it/more", bytes(1 << 20), zipfile.ZIP_STORED)


@pytest.mark.parametrize("write", [old_format, compressed])
@pytest.mark.parametrize("url", [False, True])
def test_other_files_are_read_as_lightning_reads_them(tmp_path: Path, write: Any, url: bool) -> None:
    path = tmp_path / "it.ckpt"
    write(path)
    assert_same(CONTENT, ReplacingCheckpointIO().load_checkpoint(path.as_uri() if url else path))


def test_a_place_that_maps_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(*_: Any) -> None:
        raise RuntimeError("unable to mmap")

    path = tmp_path / "it.ckpt"
    torch.save(CONTENT, path)
    monkeypatch.setattr(torch.UntypedStorage, "from_file", unable)
    assert_same(CONTENT, ReplacingCheckpointIO().load_checkpoint(path))


class NotCopied:
    """Part of a callback's state."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is one of me")


def test_what_cannot_be_copied_is_said(tmp_path: Path) -> None:
    path = tmp_path / "it.ckpt"
    torch.save({**CONTENT, "mine": NotCopied()}, path)
    with pytest.warns(UserWarning, match="read into memory as a whole, .* TypeError: there is one of me"):
        found = ReplacingCheckpointIO().load_checkpoint(path, weights_only=False)
    assert isinstance(found.pop("mine"), NotCopied)
    assert_same(CONTENT, found)


def test_a_file_that_is_replaced_in_between_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch opens it twice, once for the places of tensors, once for their values."""
    path, plugin = tmp_path / "it.ckpt", ReplacingCheckpointIO()
    plugin.save_checkpoint(CONTENT, path)
    from_file = torch.UntypedStorage.from_file
    other = {**CONTENT, "later": torch.ones(3), "state_dict": {"weight": torch.ones(5000)}}

    def replaced(*args: Any) -> Any:
        plugin.save_checkpoint(other, path)
        return from_file(*args)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", replaced)
    assert_same(other, plugin.load_checkpoint(path))


def test_what_is_missing_or_broken_is_refused_as_by_lightning(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        ReplacingCheckpointIO().load_checkpoint(tmp_path / "none.ckpt")
    torch.save({"strange": Learner}, tmp_path / "it.ckpt")
    with pytest.raises(Exception, match="Weights only load failed"):
        ReplacingCheckpointIO().load_checkpoint(tmp_path / "it.ckpt", weights_only=True)
    assert ReplacingCheckpointIO().load_checkpoint(tmp_path / "it.ckpt", weights_only=False) == {"strange": Learner}


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files may have a megabyte, as on a disk that is full."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("small_files")
def test_a_disk_that_is_full_is_said(tmp_path: Path) -> None:
    """Torch would say that it found an unexpected position."""
    with pytest.raises(OSError, match="File too large"):
        ReplacingCheckpointIO().save_checkpoint({"state_dict": {"weight": torch.ones(1 << 20)}}, tmp_path / "it.ckpt")
    assert list(tmp_path.iterdir()) == []


# Host memory, of a fit with AdamW.

WIDTH = 3000  # more than 32 MiB for each layer, below which glibc keeps what is free
WEIGHTS = 2 * WIDTH * WIDTH * 4
"""Bytes of the weights; the optimizer's state has twice as many."""
MARGIN = WEIGHTS // 2


class Large(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0].repeat(1, WIDTH // 5)).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def loader() -> Any:
    return labelled(4, 2, 5, classes=2)


class Restoring(L.Callback):
    """The most memory from the setup of a run to its first step, and whether the file is part of it then."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        gc.collect()
        self.peak = Peak()
        self.peak.__enter__()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        assert is_mapped(self.path)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.peak.__exit__(None, None, None)
        gc.collect()
        self.mapped = is_mapped(self.path)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trainer = quiet_trainer(HetPipeStrategy(stages=2, in_flight=1))
    trainer.fit(Large(), loader())
    path = tmp_path_factory.mktemp("large") / "it.ckpt"
    tracemalloc.start()
    peak = Peak()
    with peak:
        trainer.save_checkpoint(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20, "Lightning's has all bytes of the file in memory"
    tracemalloc.stop()
    assert peak.bytes < MARGIN
    assert os.path.getsize(path) > 3 * WEIGHTS
    return path


@linux
@pytest.mark.parametrize(("empty", "copies"), [(False, 2), (True, 3)])
def test_a_resumed_run_holds_what_it_trains_and_nothing_else(large: Path, empty: bool, copies: int) -> None:
    """The optimizer's state, and the weights where the user has not made them; from there on no byte of the file."""
    restoring = Restoring(large)
    trainer = quiet_trainer(HetPipeStrategy(stages=2, in_flight=1), callbacks=[restoring], max_epochs=2)
    with trainer.init_module(empty_init=empty):
        module = Large()
    trainer.fit(module, loader(), ckpt_path=large)
    assert (copies - 0.1) * WEIGHTS < restoring.peak.bytes < copies * WEIGHTS + MARGIN
    assert not restoring.mapped


@linux
def test_an_evaluation_holds_the_weights_once(large: Path) -> None:
    class Tested(Large):
        def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            if batch_idx == 0:
                peak.__exit__(None, None, None)
                assert not is_mapped(large)

    trainer = quiet_trainer(HetPipeStrategy(stages=2, in_flight=1))
    with trainer.init_module(empty_init=True):
        module = Tested()
    peak = Peak()
    peak.__enter__()
    trainer.test(module, loader(), ckpt_path=large, verbose=False)
    assert 0.9 * WEIGHTS < peak.bytes < WEIGHTS + MARGIN


@linux
def test_a_file_that_is_cut_off_after_resuming_harms_nothing(tmp_path: Path) -> None:
    """A process that touches pages of a mapped file beyond its end is killed."""
    path = tmp_path / "it.ckpt"
    trainer = quiet_trainer(pipeline(2))
    trainer.fit(Learner(), batches())
    trainer.save_checkpoint(path)

    class Cuts(L.Callback):
        def on_train_start(self, *_: Any) -> None:
            path.write_bytes(b"")

    trainer = quiet_trainer(pipeline(2), callbacks=[Cuts()], max_epochs=2)
    with trainer.init_module(empty_init=True):
        module = Learner()
    trainer.fit(module, batches(), ckpt_path=path)
    assert trainer.global_step == 10
