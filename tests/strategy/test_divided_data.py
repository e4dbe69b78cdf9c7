"""Decision on the shares of virtual workers at the start of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import LearningRateFinder

from lightning_hetpipe import HetPipeStrategy, WSPCallback
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.strategy.shared_checkpoints import note_shares, take_shares
from lightning_hetpipe.strategy.virtual_workers import VirtualWorkers
from lightning_hetpipe.workers.shared_data import Shares
from tests.support.small import Validated, batches
from tests.support.trainers import quiet_trainer


def divided(
    caplog: pytest.LogCaptureFixture, given: Any, recorded: Any = None, limit: int | float = 1.0, **more: Any
) -> tuple[Shares | None, list[str]]:
    """The shares of a run with ``shares=given`` that goes on from a checkpoint with others, and what is said."""
    workers: Any = HetPipeStrategy(virtual_workers=2)._workers
    workers.group = SimpleNamespace(settings=WSPCallback(shares=given).settings)
    workers.recorded = recorded
    with caplog.at_level("INFO"):
        settings = {"limit_train_batches": limit, "val_check_interval": 1.0, "accumulate_grad_batches": 1, **more}
        workers.divide(SimpleNamespace(**settings))
    assert workers.recorded is None
    return workers.shares, [record.getMessage() for record in caplog.records]


def test_what_is_given_counts_and_auto_goes_on_as_before(caplog: pytest.LogCaptureFixture) -> None:
    assert divided(caplog, "equal") == (None, [])
    shares, said = divided(caplog, [2, 5], recorded=(2, 5))
    assert shares is not None
    assert (shares.lengths, shares.decided, shares.adapts, said) == ((2, 5), True, False, [])
    for recorded, lengths in ((None, (1, 1)), ((2, 5), (2, 5))):
        shares, said = divided(caplog, "auto", recorded)
        assert shares is not None
        assert (shares.lengths, shares.decided, shares.adapts, said) == (lengths, recorded is not None, True, [])


def test_recorded_shares_become_whole_steps_of_the_run_that_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise a run with shares="auto" could not go on with another accumulate_grad_batches."""
    shares, _ = divided(caplog, "auto", (2, 5), accumulate_grad_batches=4)
    assert shares is not None
    assert shares.lengths == (4, 8)


@pytest.mark.parametrize(("given", "shown"), [("equal", "shares='equal'"), ([2, 4], r"shares=[2, 4]")])
def test_other_shares_than_the_checkpoint_s_are_said(caplog: pytest.LogCaptureFixture, given: Any, shown: str) -> None:
    _, said = divided(caplog, given, recorded=(2, 5))
    assert said == [f"the checkpoint was saved with shares=[2, 5], and this run goes on with {shown}"]


@pytest.mark.parametrize("limit", [1, 5, 0.5])
def test_limited_batches_leave_shares_equal(caplog: pytest.LogCaptureFixture, limit: float) -> None:
    shares, said = divided(caplog, "auto", limit=limit)
    assert shares is None
    assert len(said) == 1
    assert "shares stay equal: limit_train_batches" in said[0]


def test_shares_stay_equal_in_a_search_for_a_learning_rate(caplog: pytest.LogCaptureFixture) -> None:
    shares, said = divided(caplog, [2, 5], callbacks=[LearningRateFinder()])
    assert shares is None
    assert said == ["shares stay equal: a search for a learning rate waits for all after every step"]


def test_an_interval_of_virtual_worker_0_may_be_longer_than_the_share_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lightning would refuse it where it is made, before any loader is asked for its length by us."""
    workers: Any = HetPipeStrategy(virtual_workers=2)._workers
    workers.group = SimpleNamespace(settings=WSPCallback(shares=[8, 2]).settings)
    monkeypatch.setattr(VirtualWorkers, "rank", SimpleNamespace(index=1, size=2))
    trainer = quiet_trainer("auto", max_epochs=1, val_check_interval=5)
    workers.divide(trainer)
    trainer.fit(Validated(), batches(3), batches(1))
    assert (trainer.val_check_interval, repr(trainer.val_check_interval)) == (5, "5")
    with pytest.raises(ValueError, match="must be less than or equal"):
        quiet_trainer("auto", max_epochs=1, val_check_interval=5).fit(Validated(), batches(3), batches(1))


def test_shares_of_another_number_of_virtual_workers_are_refused() -> None:
    strategy = HetPipeStrategy(virtual_workers=2, wsp=WSPCallback(shares=[1, 2, 3]))
    with pytest.raises(SettingError, match=r"shares=\[1, 2, 3\] has 3 entries, and 2 virtual workers train; give one"):
        strategy._workers.check_shares()


@pytest.mark.parametrize(("shares", "size", "taken"), [(Shares(0, 2, (3, 4)), 2, (3, 4)), (Shares(0, 2), 2, None)])
def test_what_a_checkpoint_holds(shares: Shares, size: int, taken: Any) -> None:
    """Shares that are decided; for as many virtual workers as had them; of whole steps of the epoch that comes next."""
    for count, wanted in ((size, taken), (size + 1, None)):
        checkpoint: dict[str, Any] = {}
        note_shares(checkpoint, shares)
        assert take_shares(checkpoint, count) == wanted
        assert take_shares(checkpoint, count) is None
    note_shares(checkpoint := {}, shares, 2)
    assert take_shares(checkpoint, size) == (taken and (4, 4))
