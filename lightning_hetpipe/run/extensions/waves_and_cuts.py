"""Waves and cuts of one fit, at which virtual workers synchronise (laws L3 and L6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_hetpipe.errors import SettingError, say
from lightning_hetpipe.lightning_private import (
    averages,
    begin_next_epoch,
    begun_minibatches,
    in_a_step,
    loaders_made,
    make_loaders_as,
    recount_batches,
    train_loaders,
    validate_in_epoch,
    validates_at_the_end,
    validation_loaders,
)
from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.run.driver import Driver
from lightning_hetpipe.run.extensions.telemetry import Pace, ProfiledSections, Recording
from lightning_hetpipe.run.lifecycle import Extension
from lightning_hetpipe.run.preemption import LEAVES, NOTHING, Preemption
from lightning_hetpipe.run.together import (
    EpochShare,
    Intervals,
    MissedData,
    check_batches,
    check_shares,
    minibatches_per_step,
)
from lightning_hetpipe.workers.seats import nameless_file
from lightning_hetpipe.workers.shared_data import deal_among, let_be_long
from lightning_hetpipe.workers.synchroniser import Synchroniser

LOOP, EPOCH = 1 << 56, 1 << 32
"""Factors of a cut's number: the run of Lightning's loop in this fit, the epoch, and the place in it. A search for a
learning rate is one more run. By these numbers virtual workers with unequal numbers of batches agree."""
BEGIN = 1
"""Place of an epoch's beginning, or of a resumed loop's beginning in it. The place after it is taken as well."""
LOADERS, METRICS = "the epochs in which loaders were made", "metrics that callbacks see"
"""Names of agreed values that a returning virtual worker is told."""
LAST_SAVE, LAST_VALIDATION, END = EPOCH - 3, EPOCH - 2, EPOCH - 1
"""Places in an epoch that all virtual workers have, whatever their number of batches."""


def within(count: int) -> int:
    """Return the place after ``count`` minibatches of an epoch, or after ``count`` waves if shares are unequal."""
    return count + BEGIN + 2


@dataclass(eq=False)
class WavesAndCuts(Extension):
    """Synchronisation of virtual workers at ends of waves, and fully at cuts, where all hold the same weights. Cuts are
    evaluations, checkpoints and ends of epochs. ``pace`` measures this virtual worker's rate for shares by rates."""

    after = (Recording, ProfiledSections, Pace)  # their sections lie within a cut, and a step counts before its wave

    trainer: L.Trainer
    synchroniser: Synchroniser
    preemption: Preemption
    driver: Driver
    pace: Pace | None = None

    def __post_init__(self) -> None:
        trainer, synchroniser = self.trainer, self.synchroniser
        self._running = False  # an epoch
        self._evaluates = False
        self._compared = False
        self._intervals: Intervals | None = None  # of virtual worker 0, where shares may be unequal
        pause: Callable[[], AbstractContextManager[None]] = nullcontext if self.pace is None else self.pace.pause
        self._pausing = pause
        self._loop = 0
        self._dealt = [*synchroniser.group.seats.taken]  # the virtual workers that have the data of the epoch
        self._known = {*self._dealt}  # virtual workers that have ever taken part
        self._coming: dict[int, int] = {}  # ready to come back, each with its incarnation
        self._missed = MissedData()
        synchroniser.group.waiting = self.driver.unlocked
        self._redirects = [
            Redirect(trainer, "save_checkpoint", self._on_save),
            Redirect(trainer.fit_loop.epoch_loop, "on_run_start", self._on_epoch),
            Redirect(trainer.fit_loop, "on_advance_start", self._on_next_epoch),
            Redirect(trainer.fit_loop.epoch_loop.val_loop, "setup_data", self._on_validation_loaders),
        ]
        synchroniser.meet = self._meet

    def closed(self) -> None:
        for redirect in self._redirects:
            redirect.remove()
        if self._intervals is not None:
            self._intervals.close()
        self.synchroniser.group.waiting = nullcontext

    def epoch_begins(self, first: int) -> None:
        if not self._compared:
            self._compare()
        self._compared = self._running = True
        if self._number(BEGIN) < self.synchroniser.last_cut:
            self._loop += 1
        with self.driver.synchronising():
            share = tuple(EpochShare.of(self.trainer))
            shares = self.synchroniser.begin(self._number(BEGIN), first - 1, self.driver.computing, share)
        self._missed.begin(shares)

    def _compare(self) -> None:
        """Check that virtual workers can train together on their data."""
        shares = self.synchroniser.shares
        if shares is None:
            check_batches(self.trainer, self.synchroniser.group)
        elif (why := shares.why_not(train_loaders(self.trainer))) is not None:
            rank_zero_info(f"shares stay equal: {why}")
            self.synchroniser.shares = None
            check_batches(self.trainer, self.synchroniser.group)
        else:
            check_shares(self.trainer, shares)
            self._intervals = Intervals(self.trainer, self.synchroniser)

    def _on_epoch(self, redirect: Redirect, *args: Any) -> None:
        """Begin an epoch, of which the loop knows how much is done."""
        if self._intervals is not None:
            self._intervals.begin()
        self._mark(begun_minibatches(self.trainer)[1])
        redirect.original(*args)

    def _meet(self) -> bool:
        """Prepare a call that all make. Return False within a wave, where unequal shares make it come at other times.

        After the last minibatch of an epoch, other virtual workers may have waves to go. They wait for this virtual
        worker's last wave before they come here. So this is a cut.
        """
        if self._intervals is None or not self._running or self._evaluates or self.trainer.interrupted:
            return True
        if self._intervals.is_last() and not in_a_step(self.trainer):
            with self._pausing():
                self._cut(LAST_SAVE)
        return self._intervals.ends_wave()

    def stepped(self, version: int) -> None:
        """Push the update and take the merged weights, at the end of a wave (law L3)."""
        self._end_if_agreed()  # during the validation that has just ended, if at all
        if not self.synchroniser.ends_wave(version):
            return
        with self._pausing():
            with self.driver.synchronising():
                cuts = self.synchroniser.synchronise(self.driver.computing, self.preemption.wish > NOTHING)
            self.preemption.wave_ends()
            self._tell_missed()
            if cuts:
                self._cut(self._place_of(version), version)
                self._agree_on_end()
                self._end_if_agreed()
            if self.preemption.wish == LEAVES:
                self.preemption.leave_unless_all_end()

    def _agree_on_end(self) -> None:
        """Agree at a cut whether to end there, as virtual worker 0 was told to."""
        self.preemption.agree(self.synchroniser.group.gather(self.preemption.wish, "a signal's cut"))

    def _end_if_agreed(self) -> None:
        if self.preemption.agreed:
            with self._redirects[0].suspended():  # this is the cut to save at
                self.preemption.end()

    @contextmanager
    def evaluating(self, minibatch: int) -> Iterator[None]:
        """Open a context around an evaluation, in which all have the same weights and buffers."""
        at_the_end = validates_at_the_end(self.trainer) or self._is_last_of_unequal()
        with self._pausing():
            self._cut(LAST_VALIDATION if at_the_end else None)
            put_back = self.synchroniser.borrow_buffers()
            self._evaluates = True
            try:
                yield
            finally:
                self._evaluates = False
                put_back()
            self._agree_on_end()

    def epoch_ends(self) -> None:
        """Cut at the end of an epoch. If one virtual worker has come to the end of training, training ends for all.
        Virtual worker 0 decides on the shares of the next epoch for all, which have the same rates."""
        rate = None if self.pace is None else self.pace.rate
        self._cut(END)
        self._running = False
        self.synchroniser.take_buffers()
        trainer = self.trainer
        stops = trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
        group, wish = self.synchroniser.group, self.preemption.wish
        found = group.gather([stops, wish, rate, group.index, group.seats.ready()], "the end of an epoch")
        if any(stop for stop, *_ in found) and not stops:
            trainer.should_stop = True
        self._tell_missed()
        seats = [index for _, wants, _, index, _ in found if wants != LEAVES]
        self._coming = {vw: incarnation for *_, coming in found for vw, incarnation in coming.items()}
        every = minibatches_per_step(trainer, trainer.current_epoch + 1)
        rates = {index: rate for _, _, rate, index, _ in found}
        if self._intervals is not None and self.synchroniser.divide(rates, every):
            rank_zero_info(f"shares from epoch {trainer.current_epoch + 1} on: {self.synchroniser.told_shares()}")
            recount_batches(trainer)
        self.preemption.agree([wish for _, wish, *_ in found])
        if wish == LEAVES:
            self.preemption.leave_unless_all_end()
        if self._coming:  # the next epoch deals the data, and a test without a next epoch is divided among ``seats``
            group.seats.taken = seats
        else:
            self._deal(seats, trainer.current_epoch + 1)

    def _mark(self, minibatch: int) -> None:
        """Record that all have come to a cut after ``minibatch`` of the epoch."""
        self._missed.mark(self.synchroniser.group.weights.member.clock, minibatch)

    def _tell_missed(self) -> None:
        """Log on virtual worker 0 which data was left by virtual workers that were lost in this epoch."""
        for vw, clock in self.synchroniser.group.newly_lost().items():
            if self.trainer.is_global_zero and vw in self._dealt:
                lengths, epoch = self.synchroniser.lengths, self.trainer.current_epoch
                sentence, samples = self._missed.report(vw, clock, lengths, epoch)
                self.synchroniser.missed_samples += samples
                if sentence:
                    say(sentence)

    def _on_next_epoch(self, redirect: Redirect, *args: Any) -> None:
        """Readmit returning virtual workers after the epoch before with its evaluations, checkpoints and hooks."""
        if self.synchroniser.group.seats.returning is not None:
            self._take_part()
        coming, self._coming = self._coming, {}
        if coming:
            self._readmit(coming)
        redirect.original(*args)
        validate_in_epoch(self.trainer)

    def _take_part(self) -> None:
        """Join the other virtual workers, in a process that has come back: from here on all act together."""
        trainer, group = self.trainer, self.synchroniser.group
        self._compare()
        self._compared, self._loop = True, group.weights.member.cut // LOOP
        begin_next_epoch(trainer)
        make_loaders_as(trainer, group.seats.agreed[LOADERS])
        # Callbacks that decide by metrics (as a save within an epoch by the last validation) must decide alike on all.
        device = trainer.strategy.root_device
        trainer.callback_metrics.update({name: value.to(device) for name, value in group.seats.agreed[METRICS]})
        group.take_part()

    def _on_validation_loaders(self, redirect: Redirect, *args: Any) -> None:
        """Make validation loaders alone in a process that comes back: other processes make theirs at another time."""
        group = self.synchroniser.group
        if group.seats.returning is None:
            redirect.original(*args)
            return
        interrupted, group.interrupted = group.interrupted, lambda: True
        try:
            redirect.original(*args)
        finally:
            group.interrupted = interrupted

    def _readmit(self, coming: Mapping[int, int]) -> None:
        trainer, group = self.trainer, self.synchroniser.group
        file, path = nameless_file()
        with self._pausing(), file:
            group.seats.agreed[LOADERS] = loaders_made(trainer)
            metrics = trainer.callback_metrics.items()
            group.seats.agreed[METRICS] = [(name, torch.as_tensor(value).cpu()) for name, value in metrics]
            self.synchroniser.save_for_returning(path)
            with self.driver.synchronising():
                # Live weights stay unchanged: changes by hooks are shared when the epoch begins.
                back = group.readmit(coming, path, self._number(0))
        for vw in back:
            how = "come back" if vw in self._known else "joined"
            rank_zero_info(f"virtual worker {vw} has {how}, and takes part from epoch {trainer.current_epoch} on")
        self._known |= {*back}
        self._deal(group.seats.taken, trainer.current_epoch)

    def _deal(self, seats: Sequence[int], epoch: int) -> None:
        """Deal the data of ``epoch``, the next one, among ``seats``, unless they have it already."""
        group, trainer = self.synchroniser.group, self.trainer
        if [*seats] == self._dealt:
            return
        self._dealt, group.seats.taken = [*seats], seats
        let_be_long(trainer)
        for loader in (*train_loaders(trainer), *validation_loaders(trainer)):
            deal_among(seats, group.index, loader)
        recount_batches(trainer)
        if gone := [vw for vw in range(group.size) if vw not in seats]:
            names = " and ".join(map(str, gone))
            rank_zero_info(
                f"epoch {epoch} and later ones are dealt among {len(seats)} of {group.size} virtual workers, without"
                f" virtual worker {names}"
            )

    def _on_save(self, redirect: Redirect, *args: Any, **kwargs: Any) -> None:
        """Cut for a checkpoint within an epoch. After an exception no virtual worker waits."""
        if self._running and not self.trainer.interrupted:
            if in_a_step(self.trainer):
                raise SettingError(
                    "a checkpoint is saved in the middle of a step, where virtual workers hold different weights and"
                    " cannot wait for each other; save it in on_train_batch_end, or at the end of an epoch"
                )
            if not self._meet():
                raise SettingError(
                    "a checkpoint is saved within a wave, where virtual workers with unequal shares are at different"
                    f" places; save it after a multiple of {self.synchroniser.wave} minibatches on virtual worker"
                    f" {self.synchroniser.group.index}, by ModelCheckpoint(every_n_train_steps=...), which waits for"
                    " that, or at the end of an epoch"
                )
            with self._pausing():
                self._cut(LAST_SAVE if self._is_last_of_unequal() else None)
                redirect.original(*args, **kwargs)
            return
        redirect.original(*args, **kwargs)

    def _cut(self, place: int | None = None, version: int | None = None) -> None:
        """Cut once at each place of each epoch, by default after minibatch ``version`` or the last that has begun."""
        version = begun_minibatches(self.trainer)[0] if version is None else version
        number = self._number(self._place_of(version) if place is None else place)
        with self.driver.synchronising():
            cut = self.synchroniser.cut(number, version, self.driver.computing)
        if cut:
            if self._intervals is None:  # otherwise waves are whole, except for the last
                begun, in_epoch = begun_minibatches(self.trainer)
                self._mark(in_epoch - begun + version)
            self.synchroniser.take_averages(averages(self.trainer))

    def _place_of(self, version: int) -> int:
        begun, in_epoch = begun_minibatches(self.trainer)
        minibatch = in_epoch - begun + version
        waves = minibatch if self._intervals is None else self._intervals.wave(minibatch)
        assert waves is not None, "it ends a wave, as nothing else may cut"
        return within(waves)

    def _is_last_of_unequal(self) -> bool:
        """Return True at the end of an epoch in which unequal shares may make last waves differ."""
        return self._intervals is not None and self._intervals.is_last()

    def _number(self, place: int) -> int:
        return self._loop * LOOP + self.trainer.current_epoch * EPOCH + place
