"""Whatever fails, wherever: the user's own error comes out, as in a plain run, and nothing is left behind."""

from __future__ import annotations

import functools
import signal
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

from tests.exact.pipelines import even
from tests.parity.describing import describe
from tests.parity.faults import (
    Address,
    Aftermath,
    Fault,
    Mine,
    build,
    everything,
    fail,
    trainer_for,
    weights,
)
from tests.parity.observing import AHEAD
from tests.parity.stale import Stale
from tests.support.equality import assert_same


def counted() -> dict[Address, int]:
    """Number of calls of each hook in a run that does not fail."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Mine(Path(folder))
        module, data = build(notes)
        everything(trainer_for(notes, "auto"), module, data)
    return dict(notes.counted)


@functools.cache
def addresses() -> dict[Address, int]:
    return counted()


HOOKS = {
    "callback": (
        "on_after_backward on_before_backward on_before_optimizer_step on_before_zero_grad on_fit_end on_fit_start "
        "on_predict_batch_end on_predict_batch_start on_predict_end on_predict_epoch_end on_predict_epoch_start "
        "on_predict_start on_sanity_check_end on_sanity_check_start on_save_checkpoint on_test_batch_end "
        "on_test_batch_start on_test_end on_test_epoch_end on_test_epoch_start on_test_start on_train_batch_end "
        "on_train_batch_start on_train_end on_train_epoch_end on_train_epoch_start on_train_start "
        "on_validation_batch_end on_validation_batch_start on_validation_end on_validation_epoch_end "
        "on_validation_epoch_start on_validation_start setup state_dict teardown"
    ),
    "data": ("predict_dataloader setup state_dict teardown test_dataloader train_dataloader val_dataloader"),
    "dataset": "__getitem__",
    "logger": "after_save_checkpoint finalize log_graph log_metrics save",
    "module": (
        "configure_callbacks configure_gradient_clipping configure_optimizers lr_scheduler_step on_after_backward "
        "on_after_batch_transfer on_before_backward on_before_batch_transfer on_before_optimizer_step "
        "on_before_zero_grad on_fit_end on_fit_start on_predict_batch_end on_predict_batch_start on_predict_end "
        "on_predict_epoch_end on_predict_epoch_start on_predict_model_eval on_predict_start on_save_checkpoint "
        "on_test_batch_end on_test_batch_start on_test_end on_test_epoch_end on_test_epoch_start "
        "on_test_model_eval on_test_start on_train_batch_end on_train_batch_start on_train_end on_train_epoch_end "
        "on_train_epoch_start on_train_start on_validation_batch_end on_validation_batch_start on_validation_end "
        "on_validation_epoch_end on_validation_epoch_start on_validation_model_eval on_validation_model_zero_grad "
        "on_validation_start optimizer_step optimizer_zero_grad predict_step setup teardown test_step "
        "training_step transfer_batch_to_device validation_step"
    ),
    "optimizer": "state_dict step zero_grad",
    "scheduler": "step",
}
ADDRESSES = [(owner, hook) for owner, hooks in HOOKS.items() for hook in hooks.split()]
FAST = {
    "callback": "on_fit_start on_save_checkpoint",
    "data": "train_dataloader",
    "dataset": "__getitem__",
    "logger": "log_metrics",
    "module": ("on_after_backward on_before_batch_transfer predict_step training_step"),
    "optimizer": "step",
}
ADDRESS = pytest.mark.parametrize(
    "address",
    [
        pytest.param(
            address,
            marks=[] if address[1] in FAST.get(address[0], "").split() else pytest.mark.slow,
            id=".".join(address),
        )
        for address in ADDRESSES
    ],
)


def test_all_hooks_that_a_run_calls_are_here() -> None:
    assert sorted(addresses()) == sorted(ADDRESSES)


@pytest.fixture(autouse=True)
def loaders_as_they_were() -> Iterator[None]:
    """A hook for loaders that fails leaves wrappers of Lightning 2.6 on torch's classes."""
    classes = (DataLoader, BatchSampler)
    before = [dict(vars(each)) for each in classes]
    yield
    for each, attributes in zip(classes, before, strict=True):
        for name in vars(each).keys() - attributes.keys():
            delattr(each, name)
        for name, value in attributes.items():
            if vars(each)[name] is not value:
                setattr(each, name, value)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In an empty folder; Lightning ignores Ctrl-C once it was pressed, so its handler is put back."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def both(address: Address, in_flight: int, error: Any, folder: Path) -> tuple[Aftermath, Aftermath]:
    """The same fault in the oracle's run and in the pipeline's."""
    handler, at = signal.getsignal(signal.SIGINT), min(3, addresses()[address])
    found = []
    for name, strategy in (("plain", Stale(in_flight)), ("ours", even(4, 2, in_flight))):
        found.append(fail(Mine(folder / name, address=address, at=at, error=error), strategy))
        signal.signal(signal.SIGINT, handler)
    return found[0], found[1]


def assert_alike(plain: Aftermath, ours: Aftermath, in_flight: int) -> None:
    assert describe(ours.error) == describe(plain.error)
    if in_flight > 1:
        ahead = {*AHEAD, "__getitem__"}
        for aftermath in (plain, ours):
            aftermath.calls = [address for address in aftermath.calls if address[1] not in ahead]
    assert ours.calls == plain.calls
    for part in ("process", "things"):
        assert_same(getattr(plain, part), getattr(ours, part), part, ordered=True)


@functools.cache
def expected(in_flight: int) -> dict[str, str]:
    """The weights after a fit in which nothing fails."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Mine(Path(folder))
        module, data = build(notes)
        trainer_for(notes, Stale(in_flight)).fit(module, data)
        return weights(module)


def assert_fits_again(ours: Aftermath, in_flight: int) -> None:
    """The same module, and another Trainer: as if nothing had failed."""
    notes = ours.notes
    notes.address = None
    fresh, _ = build(Mine(notes.folder))
    ours.module.load_state_dict(fresh.state_dict())
    ours.module.train()  # an evaluation that fails leaves layers in their mode, in a plain run too
    trainer_for(notes, even(4, 2, in_flight)).fit(ours.module, ours.data)
    assert weights(ours.module) == expected(in_flight)


NM = pytest.mark.parametrize("in_flight", [pytest.param(1, marks=pytest.mark.slow), 3])


@NM
@ADDRESS
def test_an_error_in_a_hook(tmp_path: Path, address: Address, in_flight: int) -> None:
    plain, ours = both(address, in_flight, Fault, tmp_path)
    assert isinstance(ours.error, Fault)
    frames = [frame.name for frame in traceback.extract_tb(ours.error.__traceback__)]
    assert frames[-2:] == ["observe", "fail"]
    assert_alike(plain, ours, in_flight)
    assert_fits_again(ours, in_flight)


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [1, 3])
@ADDRESS
def test_control_c_in_a_hook(tmp_path: Path, address: Address, in_flight: int) -> None:
    plain, ours = both(address, in_flight, KeyboardInterrupt, tmp_path)
    assert isinstance(ours.error, SystemExit)
    assert ours.trainer.interrupted
    assert_alike(plain, ours, in_flight)
    assert_fits_again(ours, in_flight)


def test_the_threads_of_torch_are_the_users(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    plain, ours = both(("callback", "on_train_batch_end"), 3, Fault, tmp_path)
    assert ours.process["torch"] == plain.process["torch"]
    assert torch.get_num_threads() == 2
