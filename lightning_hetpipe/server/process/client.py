"""Client of a VW: blocking calls to the servers that can be cancelled, all shards at once, and a heartbeat.

Bounds: host memory holds two blocks of weights (the last pull, and the arriving pull) and one block of an update: three
times the model's bytes. A server on the VW's host adds the update from this memory. So the update changes only after a
pull of this VW that includes it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self, TypeVar

from torch import Tensor

from lightning_hetpipe.server.process.held_weights import HeldWeights, ShardCall, WeightHolder, decisive
from lightning_hetpipe.server.process.sessions import COORDINATOR_METHOD, SHARD_METHOD
from lightning_hetpipe.server.process.waits import LONGEST_WAIT, Cancelled, KeptContent, ServersSilent, Wait
from lightning_hetpipe.server.protocol import messages
from lightning_hetpipe.server.protocol.identifiers import COORDINATOR, LocalFault, PeerFailed, Refusal, RemoteFault
from lightning_hetpipe.server.protocol.member import Goal, Member, MemberState
from lightning_hetpipe.server.transport.interface import CallRefused, Channel, Received, Room, Unreachable

TIME_TO_LEAVE = 10.0
"""Seconds for which a VW repeats that it leaves, because the coordinator may be restarting. Then its lease runs out."""

MOST_CALLS = 1000
"""Largest number of simultaneous calls. There is one for each server and each holder of its weights."""

News = TypeVar("News", messages.Departed, messages.Lost)


class NotJoined(ServersSilent):
    """Error that the VWs ``missing`` have not joined within ``join_timeout``."""

    def __init__(self, message: str, missing: Sequence[int]) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class Client:
    """Membership of one VW in a session. One thread at a time makes its calls. Any thread makes requests and cancels.

    Args:
        channels: One for each server. The first leads to the coordinator.
        signature: Settings that must be equal on all VWs. Its parameters have the order of ``weights`` and ``update``.
        placement: For each server, the indices of its parameters.
        vw: i.
        incarnation: Larger than the incarnation of any earlier process of this VW.
        lease: Seconds, equal to the servers' lease. A lease has three heartbeats.
        timeout: Seconds for which servers may be unreachable, and for one request. May be changed.
        longest_wait: Seconds to wait for other VWs while they live. May be changed.
        join_timeout: Seconds to wait in ``join`` for VWs that have not joined, by default ``longest_wait``.
        name: Prefix of the threads' names.
        lost: Function that returns an error once servers are known not to come back. Running and later calls raise it.
        heart: Channel to the coordinator for heartbeats, by default the first of ``channels``. Behind weights on a slow
            link, heartbeats would wait for longer than the lease.
        departed: Called once for each other VW that was left out or has left, from any thread.
        updates_lost: Called once, from any thread, for lost updates of a VW that died together with servers.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        signature: messages.TrainingSignature,
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
        departed: Callable[[messages.Departed], None] = lambda each: None,
        updates_lost: Callable[[messages.Lost], None] = lambda each: None,
    ) -> None:
        owned: list[tuple[messages.Parameter, ...]] = [
            tuple(signature.parameters[index] for index in indices) for indices in placement
        ]
        self.vw = vw
        self.timeout, self.longest_wait = timeout, longest_wait
        self.failure: Exception | None = None
        """Known fatal error, which ends waits."""
        self.silence = ""
        """The transport's error of the last request without an answer. It names the server."""
        self.member = Member(vw, incarnation, signature, owned)
        self.kept = KeptContent(self, incarnation)
        """Content that this VW leaves with the coordinator for VWs that come back."""
        self.waits_for = ""
        """The coordinator's reason why the running call waits."""
        self.gathers = 0
        """Number of the last gather since the last cut."""
        self.bytes_pushed = 0
        self.bytes_pulled = 0
        self._channels = channels
        self._lease = lease
        self._lost, self._on_departed, self._on_updates_lost = lost, departed, updates_lost
        self._told: dict[messages.Departed | messages.Lost, None] = {}
        self._hears = threading.Lock()
        self._stopped = threading.Event()
        self._heart_channel = channels[COORDINATOR] if heart is None else heart
        self._held = HeldWeights(signature.parameters, placement)
        self._part = b""
        self._gathered = bytearray()
        self._join_timeout = longest_wait if join_timeout is None else join_timeout
        self._pool = ThreadPoolExecutor(MOST_CALLS, thread_name_prefix=name)
        self._busy = threading.Lock()
        """Held while the member makes requests."""
        self._left = False
        self._heart = threading.Thread(target=self._beat, name=f"{name}-heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._heart.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Leave, if the VW has not left yet. With an exception, the other VWs are informed and end."""
        if not self._left:
            self.leave("" if kind is None else f"{kind.__name__}: {error}"[:2000])
        self.close()

    def close(self) -> None:
        """End the threads without a message to the servers, where the VW's lease runs out."""
        self._left = True
        self._stopped.set()
        if self._heart.is_alive():
            self._heart.join(timeout=self._lease)
        self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def is_idle(self) -> bool:
        """True if no call is running, and no call has failed."""
        return self.member.state is MemberState.IDLE

    @property
    def departures(self) -> list[messages.Departed]:
        """All departures of VWs that the coordinator has reported to this VW."""
        with self._hears:
            return [each for each in self._told if isinstance(each, messages.Departed)]

    # Calls of the VW.

    def join(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Become a member. Return w_0, which are VW 0's ``weights``, or the present weights for a new incarnation.

        All calls return tensors of this object, which are valid until the next call.

        Raises:
            RemoteFault: if the VW differs from the other VWs, or was left out or replaced.
            PeerFailed: if another VW has failed.
            ServersSilent: after ``timeout`` or ``longest_wait``. ``NotJoined`` after ``join_timeout``.
            Cancelled: after ``cancel``.
        """
        for view, value in zip(self._held.weights(self.member.newest), weights, strict=True):
            view.copy_(value)
        return self._do(self.member.join)

    def hold(self, holder: Callable[[Channel, int], WeightHolder]) -> None:
        """Move weights and updates to other holders, which call servers for them from now on. ``holder`` returns the
        holder of a parameter, given a server's channel and the parameter's index."""
        with self._busy:
            self.member.check_idle()
            self._held.hold(lambda server, index: holder(self._channels[server], index), self.member.newest)

    def synchronise(self, update: Sequence[Tensor], *, cut: bool = False) -> list[Tensor]:
        """End a wave: push ``update`` and return w_global, which includes it.

        Raises as :meth:`join` does. Raises LocalFault without pushing if ``update`` has a NaN or infinity, and names
        the parameter.
        """
        with self._busy:
            self._take(update)
        return self._do(lambda: self.member.synchronise(cut=cut))

    def update_buffers(self) -> list[Tensor]:
        """Return tensors for the next update. ``synchronise`` and ``arrive`` do not copy these tensors."""
        with self._busy:
            self.member.check_idle()
        return self._held.update()

    def arrive(self, cut: int, update: Sequence[Tensor] | None = None, *, admit: bool = False) -> list[Tensor]:
        """Push ``update``, if given, of a short wave, and wait at a cut for all other VWs. Return the weights that all
        get."""
        with self._busy:
            if update is not None:
                self._take(update)
        weights = self._do(lambda: self.member.arrive(cut, update=update is not None, admit=admit))
        self.gathers = 0
        return weights

    def gather(self, part: bytes) -> dict[int, bytes]:
        """Return the parts of all VWs in the next gather since the last cut, by VW."""

        def begin() -> None:
            self.gathers += 1
            self.member.gather(self.gathers)
            self._part = part

        self._do(begin)
        gathered = self.member.gathered
        assert gathered is not None
        return {vw: bytes(own) for vw, own in gathered.split(memoryview(self._gathered)).items()}

    def cancel(self) -> None:
        """End the running wait and all later waits with ``Cancelled``."""
        self._stopped.set()

    def check(self) -> None:
        """Raise the known fatal error, if any. Call this where nothing waits for long."""
        if (failure := self.failure or self._lost()) is not None:
            raise failure

    def check_goes_on(self) -> None:
        """Raise the error that ends a wait: ``Cancelled`` after ``cancel``, or the known fatal error."""
        if self._stopped.is_set():
            raise Cancelled("the call was cancelled")
        self.check()

    def pause(self) -> None:
        """Wait a moment before the next request if no request waits at the server. ``cancel`` ends the pause."""
        self._stopped.wait(min(0.1, self._lease / 10))

    # Requests.

    def ask(
        self,
        message: messages.Request,
        body: Sequence[memoryview] = (),
        into: Room = (),
        timeout: float | None = None,
        channel: Channel | None = None,
    ) -> messages.Answer | RemoteFault | None:
        """Return the coordinator's answer, or None without an answer. ``body`` goes with the message, and ``into`` is
        room for the answer's body. The default ``timeout`` is the VW's, the default ``channel`` the first."""
        channel, timeout = channel or self._channels[COORDINATOR], timeout or self.timeout
        return self._answered(message, lambda header: channel.call(COORDINATOR_METHOD, header, body, into, timeout))

    def ask_shard(self, call: ShardCall) -> messages.Answer | RemoteFault | None:
        """Return the answer of a server's shard, or None without an answer."""
        channel, by = self._channels[call.server], call.by
        return self._answered(
            call.message, lambda header: by.call(channel, SHARD_METHOD, header, call.body, call.into, self.timeout)
        )

    def _answered(
        self, message: messages.Request | messages.ShardRequest, call: Callable[[bytes], bytes]
    ) -> messages.Answer | RemoteFault | None:
        try:
            header = call(messages.encode(message))
        except Unreachable as silence:
            self.silence = str(silence)
            return None
        except CallRefused as refused:
            return RemoteFault.parse(str(refused))
        answer = messages.decode(header)
        if not isinstance(answer, messages.Answer):
            raise RemoteFault(Refusal.MALFORMED, f"a server answered with a {type(answer).__name__}")
        if isinstance(answer, messages.Done):
            self._tell(answer.departed, self._on_departed)
        elif isinstance(answer, messages.Joined):
            self._tell(answer.lost, self._on_updates_lost)
        return answer

    def _tell(self, told: Sequence[News], listener: Callable[[News], None]) -> None:
        with self._hears:
            # Calls raise an error for this VW's own departure.
            news = [each for each in told if each not in self._told and each.vw != self.vw]
            self._told.update(dict.fromkeys(news))
        for each in news:
            listener(each)

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
        """Make the member's requests until it has no next request."""
        wait = Wait(self)
        generation = self.member.generation
        while (action := self.member.next()) is not None:
            self.check_goes_on()
            state, why = self.member.state, ""
            missing: tuple[int, ...] = ()
            if isinstance(action, messages.Request):
                answer = self._ask(action)
                answers = {} if answer is None else {COORDINATOR: answer}
            else:
                answers = self._ask_shards(action)
            for server, answer in answers.items():
                if self.member.state is not state:
                    break  # another server's answer has changed the state
                if not isinstance(action, messages.Request):
                    self.member.heard_from(server, answer)
                else:
                    if isinstance(answer, messages.NotYet):
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

    def _ask(self, message: messages.Request) -> messages.Answer | RemoteFault | None:
        if not isinstance(message, messages.Gather):
            reported = isinstance(message, messages.Join) and message.report.gathered is not None
            return self.ask(message, [memoryview(self._gathered)] if reported else ())
        received = Received()
        answer = self.ask(message, [memoryview(self._part)], received)
        if isinstance(answer, messages.Gathered):
            self._gathered = received.content
        return answer

    def _ask_shards(self, asked: Mapping[int, messages.ShardRequest]) -> dict[int, messages.Answer | RemoteFault]:
        calls = [call for each in asked.items() for call in self._held.calls(*each, self.member.newest)]
        staged = [call.body for call in calls if isinstance(call.message, messages.StageUpdate)]
        self.bytes_pushed += sum(body.numel() for body in staged if body is not None)
        self.bytes_pulled += sum(call.into.numel() for call in calls if call.into is not None)
        # This thread makes a single call: on busy cores, each thread that has to wake up delays all VWs.
        answers = (self._pool.map if len(calls) > 1 else map)(self.ask_shard, calls)
        found: dict[int, list[messages.Answer | RemoteFault | None]] = {}
        for call, answer in zip(calls, answers, strict=True):
            found.setdefault(call.server, []).append(answer)
        known = {server: decisive(given) for server, given in found.items()}
        return {server: answer for server, answer in known.items() if answer is not None}

    # The end of the membership, and the heartbeat.

    def leave(self, failure: str = "", why: str = "") -> None:
        """End the membership. With a ``failure``, the other VWs end. If they go on, they receive ``why``."""
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
        """Join again after the loss of a server while the VW computes. A running call of the VW joins again by
        itself."""
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
