"""Waves of one fit: this virtual worker pushes its updates and takes the global weights (laws L3 and L6)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor

from lightning_hetpipe.rules.versions import STASH, WeightPolicy
from lightning_hetpipe.rules.waves import next_lengths, staleness_bound
from lightning_hetpipe.server.process.held_weights import HERE, WeightHolder
from lightning_hetpipe.server.transport.interface import Channel
from lightning_hetpipe.torch_private.tensors import address_of
from lightning_hetpipe.workers.collectives import tensors_of_first
from lightning_hetpipe.workers.seats import EXCHANGE
from lightning_hetpipe.workers.shared_data import Shares
from lightning_hetpipe.workers.weight_copies import WeightCopies

if TYPE_CHECKING:
    from lightning_hetpipe.workers.group import Group

Computing = Callable[[], AbstractContextManager[None]]
"""Context manager around computations, as ``Engine.computing`` is."""


class NoSynchroniser:
    """Replacement of the synchroniser for a single virtual worker, which never synchronises. It keeps no copies."""

    def __init__(self) -> None:
        self.rounded: list[Tensor] = []

    wave: int | None = None
    """W, or None because there are no waves."""
    shares: Shares | None = None

    def hold(self, holder: Callable[[Channel, Tensor], WeightHolder], machine: Callable[[Tensor], str]) -> None:
        """Do nothing, because no weights are sent."""

    def follow(self) -> None:
        """Do nothing, because there are no copies."""

    def let_go(self) -> None:
        """Do nothing, because there are no copies."""

    def agree(self, in_flight: int, weights: WeightPolicy, every: int = 1) -> tuple[int, WeightPolicy]:
        return in_flight, weights

    def staleness(self, behind: int) -> tuple[int, int]:
        return behind, 1

    def metrics(self) -> dict[str, float]:
        return {}


class Synchroniser:
    """Sharing of all parameters of ``module`` with the other virtual workers of ``group``. ``shares`` are the shares of
    the data, if they may be unequal. Memory is bounded as in ``WeightCopies`` and the client."""

    def __init__(self, group: Group, module: L.LightningModule, shares: Shares | None = None) -> None:
        self.group = group
        self.shares = shares
        self.lengths = (1,) * group.size
        """W_v of each virtual worker."""
        self.meet: Callable[[], bool] = lambda: True
        """Prepares a call that all virtual workers make. Returns False while virtual workers with own shares are
        apart."""
        self.save_for_returning: Callable[[Path], None] = lambda path: None
        """Saves, on virtual worker 0, the checkpoint for processes that come back. All virtual workers call it."""
        self._least = 1  # the length of the shortest wave, which is Nm
        self._why = ""
        self._waited = 0.0
        self._reported: tuple[float, int, int] = (0.0, 0, 0)
        self._module = module
        self._copies = WeightCopies(list(module.named_parameters()), group.settings.update_dtype)
        self._counted = 0  # the newest version that is part of a wave
        self._open = 0  # minibatches in the wave that is open
        self._holds = False  # weights are at other processes
        self.missed_samples = 0
        """Known number of samples that lost virtual workers have left untouched."""
        self.last_cut = 0
        """Number of the last cut."""

    @property
    def most_waves_to_cut(self) -> int:
        """Largest number of waves from virtual worker 0's request for a cut to that cut."""
        return self.group.settings.clock_distance + 1

    @property
    def wave(self) -> int:
        """W of this virtual worker."""
        return self.lengths[self.group.index]

    def enter(self, settings: list[str]) -> None:
        """Take w_0 and its buffers. ``settings`` must be equal on all virtual workers, as "name=value"."""
        self._copies.begin(self.group.enter_fit(self._copies.named, settings))
        self.take_buffers()

    def follow(self) -> None:
        """Move the copies of weights to the weights' devices, once weights have come to their stages."""
        self._copies.follow()

    def hold(self, holder: Callable[[Channel, Tensor], WeightHolder], machine: Callable[[Tensor], str]) -> None:
        """Move updates and weights to holders of the parameters, which call servers for them.

        With ``placement="local"``, the server of a parameter is on the machine of virtual worker 0's holder.

        Args:
            holder: Function that returns the holder of a parameter, given a server's channel.
            machine: Function that returns the host of a parameter's machine, or an empty text for this machine.
        """
        named = self._copies.named
        if self.group.settings.placement == "local":
            machines, *_ = self.group.agree([machine(parameter) for _, parameter in named], "where weights are")
            if any(machines):  # no wave has ended yet, so all have these weights
                last = zip(named, self._copies.last, strict=True)
                self.group.place_on(machines, [(name, weight) for (name, _), weight in last])
        self._holds = any(address_of(parameter) is None for _, parameter in named)
        if self._holds:
            self.group.weights.hold(lambda channel, index: holder(channel, named[index][1]))
        self._copies.go_to_holders()

    @property
    def rounded(self) -> list[Tensor]:
        """Roundings to ``update_dtype`` of each parameter so far, which go into its next update. Empty without it."""
        return self._copies.roundings

    @rounded.setter
    def rounded(self, saved: list[Tensor]) -> None:
        roundings = self._copies.roundings
        with torch.no_grad():
            # A checkpoint of a run without ``update_dtype`` has none.
            for rounding, before in zip(roundings, saved or [torch.zeros(())] * len(roundings), strict=False):
                rounding.copy_(before)

    def let_go(self) -> None:
        """Free the memory of the copies before holders end. Nothing is synchronised any more."""
        self._copies.forget()
        if self._holds and self.group.weights.is_idle:  # a failed call does not need the holders any more
            self._holds = False
            self.group.weights.hold(lambda channel, index: HERE)

    def agree(self, in_flight: int, weights: WeightPolicy, every: int = 1) -> tuple[int, WeightPolicy]:
        """Agree on Nm and the weight policy, and set W. Return Nm and the policy.

        Nm is the largest that any virtual worker would choose. The policy is stashing if virtual workers differ,
        because some virtual worker has no room for the other policy. By default W is Nm, or more for whole optimizer
        steps of ``every`` minibatches. With decided shares, waves have the shares' lengths.
        """
        choices, names = zip(*self.group.agree((in_flight, weights.name), "the choice of in_flight"), strict=True)
        in_flight, weights = max(choices), weights if len(set(names)) == 1 else STASH
        asked, self._least = self.group.settings.wave, in_flight
        equal = -(-in_flight // every) * every if asked == "auto" else asked
        decided = self.shares is not None and self.shares.decided
        self.lengths = self.shares.lengths if self.shares and decided else (equal,) * self.group.size
        return in_flight, weights

    def divide(self, rates: Mapping[int, float | None], every: int) -> bool:
        """Decide, with one result on all, on shares and wave lengths from the next epoch on. Return True if they
        change.

        Args:
            rates: Minibatches per second, or None, of each virtual worker that is there. The waves of absent virtual
                workers stay.
            every: Number of minibatches of an optimizer step then. Waves hold whole steps.
        """
        if self.shares is None or not self.shares.adapts:
            return False
        known = [rate for rate in rates.values() if rate is not None]
        least = self._least if self.group.settings.wave == "auto" else self.group.settings.wave
        steps = [-(-length // every) for length in self.lengths]
        if len(known) == len(rates):
            found = next_lengths([steps[vw] for vw in rates], known, -(-least // every))
            for vw, length in zip(rates, found, strict=True):
                steps[vw] = length
            self._why = f"virtual workers make {' and '.join(f'{rate:.3g}' for rate in known)} per second"
        elif self.shares.decided:
            self._why = f"{every} make an optimizer step"
        else:
            return False
        lengths = tuple(every * each for each in steps)
        if lengths == self.lengths:
            return False
        self.lengths = lengths
        self.shares.decide(lengths)
        return True

    def told_shares(self) -> str:
        """Describe the lengths of waves, and why they were chosen."""
        return f"{list(self.lengths)} minibatches in a wave, as {self._why}"

    def staleness(self, behind: int) -> tuple[int, int]:
        """Return by how many minibatches gradients are behind at most, and the number of virtual workers with added
        updates (sum). ``behind`` is the lag within a virtual worker. If waves differ, the lag is averaged over the
        virtual workers."""
        wsp, every = self.group.settings, range(self.group.size)
        workers = self.group.size if wsp.aggregate == "sum" else 1
        missed = [
            sum(staleness_bound(self.lengths, vw, of, behind + 1, wsp.clock_distance) for of in every) for vw in every
        ]
        return -(-max(missed) // self.group.size), workers

    def metrics(self) -> dict[str, float]:
        """Return the metrics for loggers. Times and bytes are since the last call."""
        client = self.group.weights
        counters = (self._waited, client.bytes_pushed, client.bytes_pulled)
        waited, pushed, pulled = (now - before for now, before in zip(counters, self._reported, strict=True))
        self._reported = counters
        commit_index = client.member.commit_index
        return {
            "hetpipe/members": float(0 if commit_index is None else len(commit_index.members)),
            "hetpipe/missed_samples": float(self.missed_samples),
            "hetpipe/wave": float(self.wave),
            "hetpipe/clock": float(client.member.clock),
            "hetpipe/clock_lag": float(client.member.clock - client.member.slowest),
            "hetpipe/sync_wait_seconds": waited,
            "hetpipe/push_bytes": float(pushed),
            "hetpipe/pull_bytes": float(pulled),
        }

    def ends_wave(self, version: int) -> bool:
        """Count ``version``, which is published next. Return True if it ends a wave, so that :meth:`synchronise` is
        due."""
        self.group.check()
        self._count(version)
        return self._open >= self.wave

    def synchronise(self, computing: Computing, ask_for_cut: bool = False) -> bool:
        """End a wave: push the update, and take the global weights as the live weights. User code may run meanwhile.
        With ``ask_for_cut``, virtual worker 0 requests a cut after one wave, as soon as all can. Return True if all cut
        here after such a request."""
        update = self._update(computing)
        with self._waiting():
            weights = self.group.weights.synchronise(update, cut=ask_for_cut)
        self._settle(weights, computing)
        member = self.group.weights.member
        return member.clock == member.cut_at

    def cut(self, number: int, version: int, computing: Computing) -> bool:
        """Make all virtual workers hold equal weights, unless done at this cut. User code may run meanwhile. Cut
        numbers grow. ``version`` is the version of the live weights. Return False if this cut has been made already."""
        if number <= self.last_cut:
            return False
        self._count(version)
        self._pass_cut(number, self._update(computing) if self._open else None, computing)
        # If callbacks have changed frozen weights since the epoch began, all take virtual worker 0's now. Servers get
        # them when the next epoch begins, like all changes that callbacks make between epochs.
        changed = {index for each in self.group.gather(self._copies.changed(frozen=True), "a cut") for index in each}
        if changed:
            frozen = [self._copies.named[index][1] for index in sorted(changed)]
            self._take_first(frozen, f"{EXCHANGE} frozen weights")
        return True

    def begin(self, first: int, version: int, computing: Computing, told: Any = None) -> list[Any]:
        """Begin an epoch, or go on in an epoch, with the weights of the last cut. Return the values ``told`` of all. If
        callbacks have changed weights since, all take virtual worker 0's weights. Otherwise each would add its own
        change. ``first`` and the next number must be free for cuts. ``version`` is the version of the live weights."""
        self._counted, self._open = version, 0
        self.last_cut = max(self.last_cut, self.group.weights.member.cut)
        self.group.begin_epoch()
        everyones: list[Any] = []
        for number in (first, first + 1):  # the first sum is off by a rounding, the second is exact
            found = self.group.gather((bool(self._copies.changed()), told), "the start of an epoch")
            everyones = [each for _, each in found]
            if not any(changed for changed, _ in found):
                break
            update = self._update(computing, everything=True) if self.group.index == 0 else self._copies.no_update()
            if self.group.settings.aggregate == "mean":
                members = self.group.weights.member.commit_index
                assert members is not None
                update = [each * len(members.members) for each in update]  # by which the servers divide
            self._pass_cut(number, update, computing, everything=True)
        return everyones

    def go_back(self) -> bool:
        """Make the last taken weights the live weights. Return False if weights are at other processes."""
        if self._holds or not self._copies.last:
            return False
        self._copies.go_back()
        return True

    def _pass_cut(
        self, number: int, update: list[Tensor] | None, computing: Computing, everything: bool = False
    ) -> None:
        self.last_cut = number
        with self._waiting():
            weights = self.group.weights.arrive(number, update)
        self._settle(weights, computing, everything)

    def take_averages(self, averages: list[Tensor]) -> None:
        """Take virtual worker 0's averages of weights, which callbacks keep, at a cut."""
        if averages:
            self._take_first(averages, f"{EXCHANGE} averaged weights")

    def take_buffers(self) -> None:
        """Take the buffers of virtual worker 0 at the end of an epoch, as in DDP."""
        self._take_first(list(self._module.buffers()), f"{EXCHANGE} buffers")

    def borrow_buffers(self) -> Callable[[], None]:
        """Take the buffers of virtual worker 0 for an evaluation within an epoch. Return a function that undoes
        this."""
        own = [buffer.clone() for buffer in self._module.buffers()]
        self.take_buffers()

        def give_back() -> None:
            for buffer, before in zip(self._module.buffers(), own, strict=True):
                if not torch.equal(buffer, before):
                    buffer.copy_(before)

        return give_back

    def _take_first(self, tensors: list[Tensor], what: str) -> None:
        """Replace ``tensors`` by virtual worker 0's. If nothing changes, version counters stay. A process that comes
        back keeps the tensors of its checkpoint, because the other virtual workers exchanged older tensors."""
        if self.group.seats.returning is not None:
            return
        with torch.no_grad():
            for tensor, theirs in zip(tensors, tensors_of_first(self.group, tensors, what), strict=True):
                if not torch.equal(tensor.cpu(), theirs):
                    tensor.copy_(theirs)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._waited += time.perf_counter() - started

    def _count(self, version: int) -> None:
        if version > self._counted:
            self._open += version - self._counted
            self._counted = version

    def _update(self, computing: Computing, everything: bool = False) -> list[Tensor]:
        with computing():
            return self._copies.update(self.group.weights.update_buffers, everything)

    def _settle(self, weights: list[Tensor], computing: Computing, everything: bool = False) -> None:
        self._open = 0
        with computing():
            self._copies.settle(weights, everything)
