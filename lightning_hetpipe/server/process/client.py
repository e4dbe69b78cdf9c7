"""Client of a VW: blocking calls to the servers that can be cancelled, all shards at once, and a heartbeat.

Bounds: host memory holds two blocks of weights (the last pull, and the one that arrives) and one of an update: three
times the model's bytes. A server on the same host adds the update from there, so it changes only once a pull of the
VW's own includes it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from torch import Tensor

from lightning_hetpipe.server.process.held_weights import HeldWeights, WeightHolder, decisive
from lightning_hetpipe.server.process.kept_content import KeptContent
from lightning_hetpipe.server.process.server_requests import (
    LONGEST_WAIT,
    Cancelled,
    ServerRequests,
    ServersSilent,
    Wait,
)
from lightning_hetpipe.server.protocol.actions import Ask, AskShards, Body, Goal, MemberState
from lightning_hetpipe.server.protocol.identifiers import COORDINATOR, LocalFault, PeerFailed, Refusal, RemoteFault
from lightning_hetpipe.server.protocol.member import Member
from lightning_hetpipe.server.protocol.messages import Answer, Departed, Lost, NotYet, Parameter, TrainingSignature
from lightning_hetpipe.server.transport.interface import Channel

TIME_TO_LEAVE = 10.0
"""Seconds for which a VW repeats that it leaves, as the coordinator may be starting again; then its lease runs out."""


class NotJoined(ServersSilent):
    """The VWs ``missing`` have not joined within ``join_timeout``."""

    def __init__(self, message: str, missing: Sequence[int]) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class Client(ServerRequests):
    """Membership of one VW in a session. Its calls are made by one thread at a time; ``cancel`` by any.

    Args:
        channels: one per server; the first is the coordinator's.
        signature: what must be the same on all VWs; its parameters in the order of ``weights`` and ``update``.
        placement: for each server, the indices of its parameters.
        vw: i.
        incarnation: larger than that of any earlier process of this VW.
        lease: as for ``ServerRequests``; a heartbeat goes out three times in it.
        timeout, longest_wait: likewise.
        join_timeout: seconds to wait in ``join`` for VWs that have not joined; by default ``longest_wait``.
        name: prefix of the threads' names.
        lost: as for ``ServerRequests``; the call under way and all later ones raise the error.
        heart: channel to the coordinator for heartbeats alone, which would wait behind weights on a slow link for
            longer than the lease; by default the first of ``channels``.
        departed, updates_lost: as for ``ServerRequests``.
        returns: as in ``Join``.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        signature: TrainingSignature,
        placement: Sequence[Sequence[int]],
        vw: int,
        incarnation: int,
        *,
        lease: float = 30.0,
        timeout: float = 300.0,
        longest_wait: float = LONGEST_WAIT,
        join_timeout: float | None = None,
        name: str = "hetpipe-client",
        lost: Callable[[], Exception | None] = lambda: None,
        heart: Channel | None = None,
        departed: Callable[[Departed], None] = lambda each: None,
        returns: bool = False,
        updates_lost: Callable[[Lost], None] = lambda each: None,
    ) -> None:
        owned: list[tuple[Parameter, ...]] = [
            tuple(signature.parameters[index] for index in indices) for indices in placement
        ]
        super().__init__(channels, vw, lease, timeout, longest_wait, lost, departed, updates_lost)
        self.member = Member(vw, incarnation, signature, owned, returns)
        self.kept = KeptContent(self, incarnation)
        """Content that is left with the coordinator for VWs that come back."""
        self.waits_for = ""
        """Reason for which the call under way waits, in the coordinator's words."""
        self.bytes_pushed = 0
        self.bytes_pulled = 0
        self._heart_channel = channels[COORDINATOR] if heart is None else heart
        self._held = HeldWeights(signature.parameters, placement)
        self._part = b""
        self._gathered = b""
        self._result = bytearray()
        self._join_timeout = longest_wait if join_timeout is None else join_timeout
        self._name = name
        self._pool = self._new_pool()
        self._busy = threading.Lock()
        """Held while the member makes requests."""
        self._left = False
        self._heart = threading.Thread(target=self._beat, name=f"{name}-heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._heart.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Leave, unless that was done: with an exception, the others are told and end as well."""
        if not self._left:
            self._leave("" if kind is None else f"{kind.__name__}: {error}"[:2000])
        self.close()

    def close(self) -> None:
        """End the threads without telling the servers, for which the VW's lease runs out."""
        self._left = True
        self._stopped.set()
        if self._heart.is_alive():
            self._heart.join(timeout=self._lease)
        self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def is_idle(self) -> bool:
        """No call is under way, and none has failed."""
        return self.member.state is MemberState.IDLE

    # Calls of the VW.

    def join(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Become a member; return w_0, which are VW 0's ``weights``, or the present weights for a new incarnation.

        The tensors that this and the other calls return belong to this object and are valid until the next call.

        Raises:
            RemoteFault: the VW differs from the others, or was left out or replaced.
            PeerFailed: another VW has failed.
            ServersSilent: after ``timeout`` or ``longest_wait``; ``NotJoined`` after ``join_timeout``.
            Cancelled: after ``cancel``.
        """
        for view, value in zip(self._held.weights(self.member.newest), weights, strict=True):
            view.copy_(value)
        return self._do(self.member.join)

    def hold(self, holder: Callable[[Channel, int], WeightHolder]) -> None:
        """Have weights and updates at other holders from now on, which call servers for them.

        Args:
            holder: Gives the holder of a parameter, by its index, for calls of the server that a channel leads to.
        """
        with self._busy:
            self.member.check_idle()
            self._held.hold(lambda server, index: holder(self._channels[server], index), self.member.newest)
            self._pool.shutdown()
            self._pool = self._new_pool()

    def synchronise(self, update: Sequence[Tensor], *, cut: bool = False) -> list[Tensor]:
        """End a wave: push ``update`` and return w_global, which includes it. Raises as ``join`` does; and

        Raises:
            LocalFault: ``update`` has a NaN or infinity, in the parameter that the message names. Nothing was pushed.
        """
        with self._busy:
            self._take(update)
        return self._do(lambda: self.member.synchronise(cut=cut))

    def update_buffers(self) -> list[Tensor]:
        """Tensors for the next update; given to ``synchronise`` or ``arrive``, they are not copied."""
        with self._busy:
            self.member.check_idle()
        return self._held.update()

    def arrive(self, cut: int, update: Sequence[Tensor] | None = None, *, admit: bool = False) -> list[Tensor]:
        """Wait at a cut for all others, after pushing a short wave's ``update``; return the weights that all get."""
        with self._busy:
            if update is not None:
                self._take(update)
        return self._do(lambda: self.member.arrive(cut, update=update is not None, admit=admit))

    def gather(self, ordinal: int, part: bytes) -> dict[int, bytes]:
        """Return everyone's part, by VW, in the ``ordinal``-th gather since the last cut."""

        def begin() -> None:
            self.member.gather(ordinal)
            self._part = part

        self._do(begin)
        gathered = self.member.gathered
        assert gathered is not None
        self._gathered = bytes(self._result)
        found, start = {}, 0
        for each in gathered.parts:
            found[each.vw] = self._gathered[start : start + each.size]
            start += each.size
        return found

    def leave(self, why: str = "") -> None:
        """End the membership; the others are told ``why``, if they go on without this one."""
        self._leave("", why)

    def fail(self, reason: str) -> None:
        """End the membership because of a failure, with which the others end too."""
        self._leave(reason)

    # Requests.

    def _new_pool(self) -> ThreadPoolExecutor:
        """One thread for each call that is made at once, and one to join again."""
        return ThreadPoolExecutor(self._held.parts + 1, thread_name_prefix=self._name)

    def _take(self, update: Sequence[Tensor]) -> None:
        self.member.check_idle()
        if (name := self._held.take(update)) is not None:
            wave = self.member.clock
            raise LocalFault(f"the update of wave {wave} has a NaN or infinity in '{name}', and is not pushed")

    def _do(self, begin: Callable[[], None]) -> list[Tensor]:
        with self._busy:
            self.check()
            begin()
            self._drive()
            return self._held.weights(self.member.newest)

    def _drive(self) -> None:
        """Make the member's requests until it has nothing more to do."""
        wait = Wait(self)
        generation = self.member.generation
        while (action := self.member.next()) is not None:
            self.check_goes_on()
            state, why = self.member.state, ""
            missing: tuple[int, ...] = ()
            if isinstance(action, Ask):
                answer = self._ask(action)
                answers = {} if answer is None else {COORDINATOR: answer}
            else:
                answers = self._ask_shards(action)
            for server, answer in answers.items():
                if self.member.state is not state:
                    break  # another server's answer has changed the state
                if isinstance(action, AskShards):
                    self.member.heard_from(server, answer)
                else:
                    if isinstance(answer, NotYet):
                        why, missing = answer.waits_for, answer.missing
                    self.waits_for = why
                    self.member.heard(answer)
            if answers:
                wait.hear()
            if self.member.generation != generation:
                generation = self.member.generation
                self.kept.leave_again()
            if self.member.state is not state:
                wait = Wait(self)
                continue
            who = f"VW {self.vw}, in state '{state.value}', has waited"
            if missing and self.member.goal is Goal.START and wait.seconds > self._join_timeout:
                raise NotJoined(f"{who} for {self._join_timeout:g} s for {why}", missing)
            wait.check(who, why or "a server")
            if not why:
                self.pause()

    def _ask(self, action: Ask) -> Answer | RemoteFault | None:
        body: Sequence[memoryview] = ()
        into: Sequence[memoryview] = ()
        if action.body is Body.PART:
            body = [memoryview(self._part)]
        elif action.body is Body.GATHERED:
            body = [memoryview(self._gathered)]
        elif action.body is Body.RESULT:
            assert self.member.gathered is not None
            self._result = bytearray(self.member.gathered.size)
            into = [memoryview(self._result)]
        return self.ask(action.message, body, into)

    def _ask_shards(self, action: AskShards) -> dict[int, Answer | RemoteFault]:
        newest = self.member.newest
        calls = [call for each in action.messages.items() for call in self._held.calls(action.body, *each, newest)]
        if action.body is Body.UPDATE:
            self.bytes_pushed += sum(call.body.numel() for call in calls if call.body is not None)
        self.bytes_pulled += sum(call.into.numel() for call in calls if call.into is not None)
        # A single one is made by this thread: on busy cores, each thread that has to wake up delays all VWs.
        answers = (self._pool.map if len(calls) > 1 else map)(self.ask_shard, calls)
        found: dict[int, list[Answer | RemoteFault | None]] = {}
        for call, answer in zip(calls, answers, strict=True):
            found.setdefault(call.server, []).append(answer)
        known = {server: decisive(given) for server, given in found.items()}
        return {server: answer for server, answer in known.items() if answer is not None}

    # The end of the membership, and the heartbeat.

    def _leave(self, failure: str, why: str = "") -> None:
        self._left = True
        self._stopped.set()
        with self._busy:
            joined = self.member.state is not MemberState.OUTSIDE
            message = self.member.leave(failure, why)
        deadline, pause = time.monotonic() + min(TIME_TO_LEAVE, self._lease), threading.Event()
        while joined and self.ask(message, timeout=min(2.0, self.timeout)) is None:
            if time.monotonic() > deadline:
                break
            pause.wait(0.1)

    def _beat(self) -> None:
        try:
            while not self._stopped.wait(self._lease / 3):
                if self.member.state is not MemberState.OUTSIDE:
                    self._say_alive()
        except Exception as error:  # `check` and the next call raise it
            self.failure = error

    def _say_alive(self) -> None:
        heartbeat = self.member.heartbeat()
        answer = self.ask(heartbeat, timeout=self._lease / 3, channel=self._heart_channel)
        if not isinstance(answer, RemoteFault):
            return
        if answer.refusal is Refusal.FAILED:
            self.failure = PeerFailed(str(answer))
        elif answer.refusal in (Refusal.FENCED, Refusal.LEFT_OUT) and not self._stopped.is_set():
            self.failure = answer
        elif answer.refusal is Refusal.GENERATION:
            self._pool.submit(self._rejoin, heartbeat.generation)  # it may take long, and heartbeats have to go on

    def _rejoin(self, lost: str) -> None:
        """Join again while the VW computes, as a server was lost; a call that is under way does so by itself."""
        if not self._busy.acquire(blocking=False):
            return
        try:
            if self.member.state is MemberState.IDLE and self.member.generation == lost:
                self.member.lose()
                self._drive()
        except Cancelled:
            pass
        except Exception as error:
            self.failure = error
        finally:
            self._busy.release()
