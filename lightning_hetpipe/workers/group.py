"""Group of a launch's virtual workers, as one of them sees the others: through servers, not a process group.

They gather in a *session* on the servers, from the first run of a Trainer to the program's end, like ddp's process
group: user code may gather between runs. A fit has a second session, in which they share weights. While it is open,
gathers go through it, because it knows which virtual worker waits at which cut (law L6).
"""

from __future__ import annotations

import atexit
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from lightning_hetpipe.errors import NOTICE_AFTER, say
from lightning_hetpipe.launch import parent_watch, servers
from lightning_hetpipe.launch.ends import lost_workers
from lightning_hetpipe.launch.ranks import Role
from lightning_hetpipe.launch.servers import FoundServers, LaunchSettings
from lightning_hetpipe.launch.wsp_settings import WSPSettings
from lightning_hetpipe.server.process.client import Client
from lightning_hetpipe.server.process.waits import ServersSilent, ServersUnheard
from lightning_hetpipe.server.protocol.identifiers import COORDINATOR, FirstLost, PeerFailed
from lightning_hetpipe.server.protocol.messages import Departed
from lightning_hetpipe.workers.collectives import gather_in_chunks, gather_values
from lightning_hetpipe.workers.join_handshake import JoinHandshake
from lightning_hetpipe.workers.program_group import FIT, LAUNCH, go_on_from, next_session
from lightning_hetpipe.workers.seats import CameTooLate, Departures, Returning, SeatMissed, Seats, too_late


class Group:
    """Virtual worker ``index`` among ``size``.

    Args:
        launch: Settings of the launch. Its timeout is the time for which servers may be silent.
        found: Servers, as far as this process knows them.
        on_loss: Called for each lost virtual worker as `LostWorkers.note` is, from any thread, in the first remaining
            process of each node.
        on_return: Called for each lost virtual worker once it takes part again.
    """

    def __init__(
        self,
        launch: LaunchSettings,
        found: FoundServers,
        on_loss: Callable[[int, str, str, str], None] = lambda *_: None,
        on_return: Callable[[int], None] = lambda vw: None,
    ) -> None:
        rank = launch.rank
        self.index, self.size = rank.index, rank.size
        place = f"node {rank.node}, {platform.node()}" if rank.nodes > 1 else ""
        self._departures = Departures(rank.index, place, on_loss)
        updates_lost = self._departures.tell_of_updates
        self._handshake = JoinHandshake(launch, found, self._is_lost, self._lose, updates_lost)
        self._has_taken_part = False  # in an epoch
        self._found = found
        self.coordinator = found.coordinator
        """Address of the coordinator."""
        self.interrupted: Callable[[], bool] = lambda: False
        """Returns True while an exception ends this virtual worker. Then its gathers return only its own values."""
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context manager around waits for a gather."""
        self._exits = ExitStack()
        self._launch: Client | None = None  # in the session of the launch, while that is open
        self._fit: Client | None = None  # in the session of a fit, while one runs
        self._fit_settings: Sequence[str] = ()
        self._failed = False
        # An external launcher such as torchrun ends all processes when one exits with 1, as after a loss.
        self._stays_after_loss = rank.role is Role.EXTERNAL
        self._on_return = on_return
        self.seats = Seats(rank.index, rank.size)
        self._knows = False  # whether it knows which departed virtual workers have come back

    @property
    def _clients(self) -> list[Client]:
        """Clients in the open sessions, of which gathers go through the first."""
        return [client for client in (self._fit, self._launch) if client is not None]

    @property
    def is_open(self) -> bool:
        return self._launch is not None

    @property
    def settings(self) -> WSPSettings:
        """Settings of the synchronisation."""
        return self._handshake.launch.wsp

    def open(self) -> None:
        """Join the session of the launch, and wait for all virtual workers. The session ends at exit at the latest."""
        atexit.register(self.part)
        session = next_session(LAUNCH)
        self._handshake.connect([self.coordinator])
        self._exits.callback(self._handshake.close)
        self._exits.callback(self._wait_until_all_have_left, session)
        launch = self._handshake.come_to(session)
        self._exits.push(launch)
        self._launch = launch
        self._handshake.check_lease()
        self._exits.callback(self.seats.close)
        if not self._handshake.returns:
            self._begin_to_know()
        try:
            self.seats.open(launch, session, self._handshake)
        except CameTooLate as late:
            self.part(why=late.how)
            raise
        if self.seats.returning is not None:
            launch.gathers = self.seats.returning.record.gathers_made
        there = self._meet_servers(self._found)
        if self._handshake.least:
            self.seats.taken = there

    def renew(self, launch: LaunchSettings, found: FoundServers) -> None:
        """Use the settings of a later Trainer of the program from now on."""
        assert self._launch is not None
        further = launch.wsp.placement != self.settings.placement  # with "local", only one server may have been started
        self._handshake.launch = launch
        self._launch.timeout, self._launch.longest_wait = launch.timeout, self._handshake.longest_wait
        if further:
            self._meet_servers(found)

    def _meet_servers(self, found: FoundServers) -> list[int]:
        """Connect to all servers, and return the virtual workers that are there."""
        told = self.gather((self.index, self._departures.places[self.index], list(found.known)), "the list of servers")
        self._departures.places.update((index, place) for index, place, _ in told)
        known = [address for *_, addresses in told for address in addresses]
        self._handshake.connect([self.coordinator, *known[1:]])
        return [index for index, *_ in told]

    # Fits.

    def enter_fit(self, named: Sequence[tuple[str, Tensor]], settings: Sequence[str]) -> list[Tensor]:
        """Join the session of a fit, and return w_0, the weights of VW 0. ``named`` are the parameters by name.
        ``settings`` must be equal on all virtual workers, as "name=value"."""
        self._handshake.check_lease()
        self._fit_settings = settings
        if self.seats.returning is not None:
            return self._enter_again(self.seats.returning, named, settings)
        self._fit, weights = self._join_fit(named, settings)
        return weights

    def _join_fit(
        self, named: Sequence[tuple[str, Tensor]], settings: Sequence[str], homes: Sequence[int] = ()
    ) -> tuple[Client, list[Tensor]]:
        session = next_session(FIT)
        self.seats.note_fit(session, settings, homes)
        if self._handshake.least:  # all that train, because none is replaced before the first epoch
            self._handshake.least = len(self.seats.taken)
        return self._handshake.join(session, named, settings, homes=homes)

    def place_on(self, machines: Sequence[str], named: Sequence[tuple[str, Tensor]]) -> None:
        """Move each parameter to the server of its machine, in another session. All virtual workers call this together.
        ``machines`` has the host of each parameter's machine, or an empty text for virtual worker 0's machine."""
        homes = [self._handshake.server_on(machine) if machine else COORDINATOR for machine in machines]
        if self.seats.returning is not None:  # it has come to that session at once
            return
        self.leave_fit()
        self._fit, _ = self._join_fit(named, self._fit_settings, homes)

    @property
    def weights(self) -> Client:
        """Client in the session of the present fit."""
        assert self._fit is not None
        return self._fit

    def begin_epoch(self) -> None:
        """Begin an epoch. From now on processes may come back."""
        self._has_taken_part = True
        self.seats.begin_epoch()

    # Virtual workers that come back.

    def _enter_again(
        self, returning: Returning, named: Sequence[tuple[str, Tensor]], settings: Sequence[str]
    ) -> list[Tensor]:
        """Take a seat in the running fit, at the next cut that gives seats."""
        record = returning.record
        returning.check(next_session(FIT), settings)
        go_on_from(record.session)
        returning.await_state()
        try:
            self._fit, weights = self._handshake.join(record.session, named, record.settings, homes=record.homes)
        except ServersUnheard:
            raise
        except ServersSilent:
            raise SeatMissed(self.settings.lease) from None
        self._fit.longest_wait = self._handshake.longest_wait
        self._agree_on_seats({})
        return weights

    def take_part(self) -> None:
        """Let this process, which has come back, gather with the other virtual workers from now on."""
        self.seats.take_part()
        self._handshake.returns = False
        self._begin_to_know()

    def readmit(self, vws: Mapping[int, int], checkpoint: Path, cut: int) -> list[int]:
        """Give ``vws`` seats from ``cut`` on, and return the virtual workers that have taken them. All virtual workers
        call this between two epochs. ``vws`` are ready, and have their incarnations. ``checkpoint`` is the file, on
        virtual worker 0, from which they resume."""
        self.seats.offer(vws, checkpoint, self.check)
        self.weights.arrive(cut, admit=True)
        return self._agree_on_seats(vws)

    def _agree_on_seats(self, ready: Mapping[int, int]) -> list[int]:
        """Agree with all processes at the cut on the seats. Return the virtual workers that have taken a seat. A
        process gets no seat if this is not the cut of the state that it has loaded. Then it raises SeatMissed."""
        returning, members = self.seats.returning, self.weights.member.commit_index
        assert members is not None
        mine = None if returning is None else self.weights.member.incarnation
        told = (dict(ready), self.seats.agreed) if self.index == 0 else None
        found = gather_values(self, (self.index, mine, told), "the return of virtual workers")
        ready, agreed = found[0][2] or ({}, {})  # without virtual worker 0, all are about to end
        back = [vw for vw, incarnation, _ in found if incarnation is not None and incarnation == ready.get(vw)]
        self.seats.taken = [vw for vw, incarnation, _ in found if incarnation is None or vw in back]
        self.seats.withdraw()
        if returning is not None:
            if self.index not in back:
                raise SeatMissed(self.settings.lease)
            self.seats.agreed = agreed
        there = back if returning is None else self.seats.taken
        self._departures.find({each.vw: each.incarnation for each in members.members if each.vw in there})
        self._handshake.find(there)
        for vw in there:
            self._on_return(vw)
        return back

    # Lost virtual workers.

    def lose(self, gone: Mapping[int, str]) -> None:
        """Record, from any thread, how virtual workers have ended. Joining a session, which needs all, fails from then
        on."""
        self._handshake.lose(gone)

    def _lose(self, departed: Departed, of_fit: bool, is_told: bool = True) -> None:
        """Record a departure, from any thread. The run goes on without this virtual worker, but not without virtual
        worker 0."""
        vw, why = departed.vw, departed.why
        if self._departures.is_of_former(departed) or (vw and not self._knows):
            return
        if not why:  # it has ended as it should, and after it has left the launch, nobody may wait for it
            if not of_fit:
                self.lose({vw: "has ended"})
            return
        what = self._departures.note(departed, of_fit, self._fit is not None, is_told)
        if what is None:
            return
        self.lose({vw: f"was {why}"})
        for client in self._clients if vw == 0 else ():
            client.failure = PeerFailed(f"{what}; only it writes checkpoints, so start again from the last one")

    def _begin_to_know(self) -> None:
        """Record the departures of all virtual workers that were ever lost. Only virtual workers that took part until
        now are news."""
        self._knows = True
        for client in self._clients:
            for each in client.departures:
                self._lose(each, client is self._fit, is_told=each.vw in self.seats.taken)

    def newly_lost(self) -> dict[int, int]:
        """Return the virtual workers that the present fit has lost since the last call, with their clocks."""
        return self._departures.newly()

    def _is_lost(self) -> Exception | None:
        """Return the error with which to end if servers do not come back, or the run to come back to is over."""
        child = parent_watch.this_child()
        if child is not None and child.outlasts and not self._has_taken_part and parent_watch.AGAIN in child.variables:
            return too_late(self.index)
        return servers.lost()

    def ends_without_first(self, exception: BaseException) -> bool:
        """Return True if ``exception`` ends a fit because virtual worker 0 is lost, and this is the lowest remaining
        virtual worker. Its machine counts as lost if the coordinator ran there and is silent, or if our launcher has
        ended."""
        if self.index == 0 or self._fit is None or (members := self._fit.member.commit_index) is None:
            return False
        child, silent = parent_watch.this_child(), isinstance(exception, ServersUnheard)
        orphaned = isinstance(exception.__cause__, FirstLost) or (child is not None and child.orphaned)
        lost = 0 in self._departures.lost or orphaned or (silent and self.settings.servers is None)
        left = [each.vw for each in members.members if each.vw and each.vw not in self._departures.lost]
        return lost and self.index == min(left, default=self.index)

    def check(self) -> None:
        """Raise the known failure of another virtual worker, if any."""
        for client in self._clients:
            client.check()

    # Gathers.

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return the values of all virtual workers that take part, in their order, as :func:`gather_values` does. A
        process that comes back gets recorded values. Without a session, the result is the own value alone."""
        if self._launch is None or self.interrupted():
            return [value]
        if self.seats.returning is not None:
            return self.seats.returning.answer(what)
        values = gather_values(self, value, what)
        self.seats.note_gather(what, values)
        return values

    def agree(self, value: Any, what: str) -> list[Any]:
        """Gather once in a fit. A process that comes back later gets the result of this agreement."""
        if what not in self.seats.agreed:
            self.seats.agreed[what] = self.gather(value, what)
        return self.seats.agreed[what]

    def collect(
        self, content: Callable[[], bytes | memoryview], what: str, opened: Callable[[], IO[bytes]]
    ) -> dict[int, IO[bytes]]:
        """Return the contents of the other virtual workers on virtual worker 0, by their index, and nothing elsewhere.

        The contents come one after the other. Bound: one content on its virtual worker, and a gather's chunk on all.

        Args:
            content: Function that makes this one's content when it is due.
            what: As for :meth:`gather`.
            opened: Function that opens an empty file for the content of another virtual worker.
        """
        self.gather(None, what)
        if self._launch is None or self.interrupted() or self.seats.returning is not None:
            return {}

        def collected(due: int) -> IO[bytes] | None:
            file = opened() if self.index == 0 else None
            mine = content() if self.index == due else b""
            whole = self.exchange(mine, lambda vw, part: None if file is None else file.write(part))
            return file if due in whole else None

        files = {due: collected(due) for due in range(1, self.size)}
        return {due: file for due, file in files.items() if file is not None}

    def exchange(self, content: bytes | memoryview, take: Callable[[int, bytes], object]) -> list[int]:
        """Exchange contents with all virtual workers that take part, as :func:`gather_in_chunks` does."""
        with self.waiting():
            return gather_in_chunks(content, self._clients[0].gather, take)

    # The end.

    def leave_fit(self) -> None:
        """End a run. After a fit, gathers go on in the session of the launch. Lost servers are rebuilt from what the
        virtual workers hold, but a virtual worker that has left holds nothing. So none leaves before all have the
        results of the last gather and the last cut."""
        self.gather(None, "the end of a run")
        fit, self._fit = self._fit, None
        if fit is not None:
            self.seats.end_fit()
            self._end_fit(fit, self._launch)

    def _end_fit(self, fit: Client, launch: Client | None) -> None:
        fit.__exit__(None, None, None)
        self.newly_lost()
        for each in [] if launch is None else launch.departures:  # the session of the fit may have missed some
            self._lose(each, of_fit=False)

    def part(self, failure: str = "", alone: bool = False, why: str = "") -> None:
        """Leave at once. The other virtual workers receive a ``failure``, such as an exception that ends the program,
        and end.

        Args:
            alone: Whether the failure is only this virtual worker's. Then it leaves without a message. The run goes on
                after its lease, but not without virtual worker 0.
            why: Reason that the other virtual workers receive if they go on at once. It stays for them if its node's
                server ends with it.
        """
        atexit.unregister(self.part)
        ending = lost_workers.uncaught
        failure = failure or (f"{type(ending).__name__}: {ending}" if ending is not None else "")
        if failure and self._handshake.returns:  # the others have long gone on without it
            failure, why = "", why or "unable to come back"
        self._failed = bool(failure)
        clients, fit, launch = self._clients, self._fit, self._launch
        self._fit = self._launch = None
        for client in clients:
            if why:
                client.leave(why=why)
            if failure and alone and self.index:
                client.close()
            elif failure:
                client.leave(failure)
        if fit is not None:
            self._end_fit(fit, launch)
        self._exits.close()

    def _wait_until_all_have_left(self, session: str) -> None:
        """Keep a server that ends with this process, for last calls of other virtual workers and to report a
        failure."""
        if not self._found.hosts and not (self._stays_after_loss and self._departures.has_told):
            return
        began, told, again = time.monotonic(), False, threading.Event()
        while True:
            # No members if the coordinator has ended, which ends only when all have left.
            members = self._handshake.status_of(session).get("members", ())
            left = [str(member["vw"]) for member in members if member["vw"] != self.index]
            waited = time.monotonic() - began
            bound = self.settings.lease if self._failed else self.settings.end_timeout
            if not left or (bound is not None and waited > bound):
                return
            if waited > NOTICE_AFTER and not told:
                told = True
                say(f"virtual worker {self.index} has ended, and waits for virtual worker {', '.join(left)} to end")
            again.wait(0.1)
