"""A whole world of VWs and servers without threads, sockets or time of its own: every message is delivered by hand.

What a world checks at every pull, and at its end, are the laws L3 to L5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise, takewhile

import torch
from torch import Tensor

from lightning_hetpipe.server.process.held_weights import decisive
from lightning_hetpipe.server.protocol.coordinator import Coordinator
from lightning_hetpipe.server.protocol.identifiers import COORDINATOR, Commit, Refusal, RemoteFault, UpdateId
from lightning_hetpipe.server.protocol.member import Goal, Member, MemberState
from lightning_hetpipe.server.protocol.messages import (
    Answer,
    Departed,
    Done,
    Gather,
    Gathered,
    Granted,
    Join,
    Joined,
    Load,
    Lost,
    Parameter,
    Pushed,
    Read,
    Request,
    ShardRequest,
    StageUpdate,
    TrainingSignature,
    decode,
    encode,
)
from lightning_hetpipe.server.protocol.shard import Shard, ShardLayout, add, block_of, memory_of

LEASE = 30.0
LAST_CUT = 1_000_000


class Fault(Enum):
    """Fate of a request."""

    NONE = "none"
    LOST_REQUEST = "lost request"
    LOST_REPLY = "lost reply"
    CUT_OFF = "cut off"
    """Only half of its body arrives."""
    TWICE = "twice"


def parameter(name: str, shape: Sequence[int] = (3,), dtype: str = "float32", update_dtype: str = "") -> Parameter:
    return Parameter(name, tuple(shape), dtype, update_dtype or dtype)


def signature(n: int, servers: int = 2, distance: int = 0, aggregate: str = "sum") -> TrainingSignature:
    kinds = [("weight", (2,)), ("bias", (1,))]
    parameters = tuple(parameter(f"layer{server}.{name}", shape) for server in range(servers) for name, shape in kinds)
    return TrainingSignature("0.1.0", n, distance, aggregate, servers, (), parameters)


@dataclass
class VW:
    member: Member
    weights: list[list[Tensor]]
    update: list[Tensor]
    waves: int = 0
    heartbeats: bool = True
    part: bytes = b""
    kept: bytes = b""
    lost: list[Lost] = field(default_factory=list)
    """Updates that were lost with servers, as it was told."""


@dataclass
class Server:
    shard: Shard
    coordinator: Coordinator


@dataclass
class World:
    """``n`` VWs with ``servers`` servers, each of which owns two parameters, of two elements and of one.

    VW 1 sends updates and takes weights of each parameter by itself.
    """

    n: int
    distance: int = 0
    servers: int = 2
    aggregate: str = "sum"
    now: float = 0.0
    lossy: bool = False
    """A VW has died: what the updates are divided by, and which there are, is not known beforehand."""
    vws: dict[int, VW] = field(default_factory=dict)
    sent: list[tuple[int, Request | ShardRequest, bytes | memoryview]] = field(default_factory=list)
    """Every request, with its body: any of them may arrive again. The memory of a VW is seen as it is by then."""
    updates: dict[UpdateId, list[Tensor]] = field(default_factory=dict)
    pushed: set[UpdateId] = field(default_factory=set)
    """Those updates that a coordinator has taken note of."""
    departed: set[Departed] = field(default_factory=set)
    """Departures that VWs were told of."""
    starts: int = 0
    cuts: dict[int, int] = field(default_factory=dict)
    """Number of updates that the final weights of each cut include."""

    def __post_init__(self) -> None:
        self._sums: list[tuple[UpdateId, list[Tensor]]] = []
        self.generator = torch.Generator().manual_seed(self.n * 100 + self.distance)
        self.signature = signature(self.n, self.servers, self.distance, self.aggregate)
        every = self.signature.parameters
        self.owned = [every[start : start + 2] for start in range(0, len(every), 2)]
        self.layouts = [ShardLayout(own, update=False) for own in self.owned]
        self.server = [self._server() for _ in range(self.servers)]
        for vw in range(self.n):
            self.begin(vw, 0)
        self.w0 = [block.clone() for block in self.vws[0].weights[0]]

    def _server(self) -> Server:
        self.starts += 1
        epoch = f"epoch{self.starts}"
        return Server(Shard(epoch), Coordinator(epoch, LEASE))

    def begin(self, vw: int, incarnation: int) -> VW:
        member = Member(vw, incarnation, self.signature, self.owned)
        blocks = [[self._random(layout) for layout in self.layouts] for _ in range(2)]
        self.vws[vw] = VW(member, blocks, [block_of(layout.size) for layout in self.layouts])
        member.join()
        return self.vws[vw]

    def _random(self, layout: ShardLayout) -> Tensor:
        block = block_of(layout.size)
        for view in layout.views(block):
            # Sums of small multiples of 1/8 are exact in any order; those of any floats only in one order.
            exact = self.distance > 0
            view.copy_(
                torch.randint(-99, 99, view.shape, generator=self.generator) / 8
                if exact
                else torch.randn(view.shape, generator=self.generator)
            )
        return block

    # What VWs do.

    def wave(self, vw: int, *, cut: int = 0, update: bool = True, ask_cut: bool = False) -> None:
        """An idle VW ends a wave, or comes to a cut."""
        one = self.vws[vw]
        if update:
            update_id = UpdateId(vw, one.member.incarnation, one.member.clock)
            assert update_id not in self.updates
            self.updates[update_id] = [self._random(layout) for layout in self.layouts]
            for block, values in zip(one.update, self.updates[update_id], strict=True):
                block.copy_(values)  # the same memory in every wave: what a server still needs of it would be lost
            one.waves += 1
        if cut:
            one.member.arrive(cut, update=update)
        else:
            one.member.synchronise(cut=ask_cut)

    def gather(self, vw: int, ordinal: int, part: bytes) -> None:
        self.vws[vw].part = part
        self.vws[vw].member.gather(ordinal)

    def step(self, vw: int, fault: Fault = Fault.NONE) -> None:
        """Sends what the VW has to send, to all servers that it is for."""
        one = self.vws[vw]
        action, state = one.member.next(), one.member.state
        if action is None:
            return
        messages: dict[int, Request | ShardRequest] = (
            {COORDINATOR: action} if isinstance(action, Request) else dict(action)
        )
        for server, message in messages.items():
            if one.member.state is not state:
                break
            answer, body = self._ask(server, message, self._body(one, message, server), fault)
            if answer is None:
                continue
            if isinstance(answer, Granted):
                self._check_grant(vw, answer)
            before, cut = one.member.newest, one.member.cut
            if not isinstance(action, Request):
                if isinstance(message, Read) and not isinstance(answer, RemoteFault):
                    one.weights[1 - before][server] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
                one.member.heard_from(server, answer)
            else:
                if isinstance(answer, Gathered):
                    one.kept = body
                if isinstance(answer, Joined):
                    one.lost += answer.lost
                one.member.heard(answer)
            if one.member.newest != before:
                self._check_pull(vw)
                if one.member.cut != cut and not self.lossy:
                    assert one.member.commit_index is not None
                    count = self.cuts.setdefault(one.member.cut, one.member.commit_index.count)
                    assert one.member.commit_index.count == count, "VWs take different weights at a cut"

    def _body(self, one: VW, message: Request | ShardRequest, server: int) -> bytes | memoryview:
        match message:
            case StageUpdate():
                update = memory_of(one.update[server])
                return update if one.member.vw % 2 == 0 else bytes(update)  # every other VW is on the servers' host
            case Load():
                return bytes(memory_of(one.weights[one.member.newest][server]))
            case Gather():
                return one.part
            case Join() if message.report.gathered is not None:
                return one.kept
        return b""

    def _ask(
        self, server: int, message: Request | ShardRequest, body: bytes | memoryview, fault: Fault
    ) -> tuple[Answer | RemoteFault | None, bytes]:
        """Send ``message``, perhaps in parts, of which ``fault`` befalls one."""
        if message.vw != 1 or not isinstance(message, StageUpdate | Read):
            return self._send(server, message, body, fault)
        bodies = (body[:8], body[8:])
        given = [
            self._send(server, replace(message, part=(number,)), own, Fault.NONE if number == self.now % 2 else fault)
            for number, own in enumerate(bodies)
        ]
        return decisive([answer for answer, _ in given]), b"".join(reply for _, reply in given)

    def _send(
        self, server: int, message: Request | ShardRequest, body: bytes | memoryview, fault: Fault
    ) -> tuple[Answer | RemoteFault | None, bytes]:
        self.sent.append((server, message, body))
        if fault is Fault.LOST_REQUEST:
            return None, b""
        answer, reply = self.deliver(server, message, body, half=fault is Fault.CUT_OFF and bool(body))
        if fault is Fault.TWICE:
            answer, reply = self.deliver(server, message, body)
        return (None, b"") if fault in (Fault.LOST_REPLY, Fault.CUT_OFF) else (answer, reply)

    def deliver(
        self, server: int, message: Request | ShardRequest, body: bytes | memoryview, half: bool = False
    ) -> tuple[Answer | RemoteFault, bytes]:
        """A request arrives at a server."""
        decoded = decode(encode(message))
        assert decoded == message
        one = self.server[server]
        if not isinstance(message, ShardRequest):
            try:
                answer, parts = one.coordinator.handle(message, self.now, bytes(body))
            except RemoteFault as fault:
                return fault, b""
            if isinstance(answer, Done):
                self.departed.update(answer.departed)
            if isinstance(message, Pushed):
                self.pushed.add(UpdateId(message.vw, message.incarnation, message.clock))
            return answer, b"".join(parts)
        try:
            memory = one.shard.open(message, len(body), body if isinstance(body, memoryview) else None)
            if half:
                if memory is not body:
                    memory[: len(body) // 2] = body[: len(body) // 2]
                one.shard.abandoned(message)
                return RemoteFault(Refusal.BUSY, "half of it came"), b""
            if memory is not body:
                memory[:] = body
            if isinstance(message, StageUpdate):
                one.shard.examine(message, memory)
            held, views = one.shard.run(message, memory)
        except RemoteFault as fault:
            return fault, b""
        size = self.layouts[server].size
        assert one.shard.bytes_held <= (1 + self.n) * size, "a shard keeps more than one update per VW"
        return held, b"".join(bytes(view) for view in views)

    def again(self, index: int) -> None:
        """A request of long ago arrives once more, and nobody waits for its answer."""
        self.deliver(*self.sent[index])

    # What befalls them.

    def restart(self, server: int) -> None:
        self.server[server] = self._server()

    def kill(self, vw: int) -> None:
        self.lossy = True
        del self.vws[vw]

    def pass_time(self, seconds: float) -> None:
        """Time passes; every VW's heartbeat comes in time."""
        while seconds > 0:
            self.now += min(seconds, LEASE / 3)
            seconds -= LEASE / 3
            for vw in list(self.vws):
                if self.vws[vw].heartbeats:
                    self.heartbeat(vw)

    def heartbeat(self, vw: int) -> None:
        member = self.vws[vw].member
        answer, _ = self.deliver(COORDINATOR, member.heartbeat(), b"")
        if (
            isinstance(answer, RemoteFault)
            and answer.refusal is Refusal.GENERATION
            and member.state is MemberState.IDLE
        ):
            member.lose()

    def finish(self) -> None:
        """All come to a last cut, and nothing goes wrong any more.

        A VW that was left out finds out, and is no more.
        """
        for turn in range(300):
            for vw in list(self.vws):
                member = self.vws[vw].member
                if member.state is MemberState.IDLE and member.goal is Goal.NONE and member.cut < LAST_CUT:
                    self.wave(vw, cut=LAST_CUT)
                try:
                    self.step(vw)
                except RemoteFault as fault:
                    if fault.refusal is not Refusal.LEFT_OUT or not self.lossy:
                        raise
                    self.kill(vw)
            if all(one.member.state is MemberState.IDLE and one.member.cut == LAST_CUT for one in self.vws.values()):
                break
            if turn % 20 == 19:
                self.pass_time(LEASE / 3)
        else:
            states = {vw: (one.member.state, one.member.next()) for vw, one in self.vws.items()}
            raise AssertionError(f"the world does not come to its end: {states}")
        self.check_end()

    # Laws.

    def _check_grant(self, vw: int, granted: Granted) -> None:
        one = self.vws[vw].member
        assert one.clock - granted.slowest <= self.distance
        live = [(self.vws[each.vw].member, each) for each in granted.commit_index.members if each.vw in self.vws]
        if one.goal is Goal.WAVE:  # and by what the VWs themselves know, who may have pushed and not heard so
            for other, each in live:
                if other.incarnation == each.incarnation and other.goal is not Goal.CUT and other.cut == one.cut:
                    assert one.clock - other.clock <= self.distance + (other.goal is Goal.WAVE)
        if self.distance == 0:
            ids = [commit.update for commit in granted.tail]
            assert all((a.clock, a.vw) < (b.clock, b.vw) for a, b in pairwise(ids)), ids
        mine = [each for each in self.updates if each.vw == vw and each.incarnation == one.incarnation]
        assert all(granted.commit_index.includes(each) for each in mine), "a pull includes the VW's own updates"

    def _check_pull(self, vw: int) -> None:
        one = self.vws[vw]
        commit_index = one.member.commit_index
        assert commit_index is not None
        if self.aggregate == "mean" and self.lossy:
            return
        expected = self.expected([each for each in self.updates if commit_index.includes(each)])
        got = one.weights[one.member.newest]
        for server in range(self.servers):
            assert torch.equal(got[server].view(torch.float32), expected[server].view(torch.float32)), (
                f"VW {vw} got other weights from server {server} than the sum of what {commit_index} includes"
            )

    def expected(self, ids: Sequence[UpdateId]) -> list[Tensor]:
        """w_0 plus these updates, wave after wave in VW order; goes on from what the last call has added up alike."""
        order = sorted(ids, key=lambda each: (each.clock, each.vw))
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1][0], zip(order, self._sums, strict=False)))
        del self._sums[alike:]
        for each in order[alike:]:
            total = [block.clone() for block in (self._sums[-1][1] if self._sums else self.w0)]
            add_blocks(self.layouts, total, self.updates[each], self.n if self.aggregate == "mean" else 1)
            self._sums.append((each, total))
        return self._sums[-1][1] if self._sums else self.w0

    def check_end(self) -> None:
        ends = {vw: one.weights[one.member.newest] for vw, one in self.vws.items()}
        for end in ends.values():
            assert all(torch.equal(a, b) for a, b in zip(end, next(iter(ends.values())), strict=True))
        assert len({one.member.clock for one in self.vws.values()}) <= 1
        if not self.lossy:
            expected = self.expected(list(self.updates))
            for end in ends.values():
                assert all(torch.equal(a, b) for a, b in zip(end, expected, strict=True)), "an update is missing"
            assert not any(one.lost for one in self.vws.values())
        for commit_index in [one.member.commit_index for one in self.vws.values()]:
            assert commit_index is not None
            unknown = [each for each in self.pushed if not (commit_index.includes(each) or self._told(each))]
            assert not unknown, "updates are gone, and nobody was told"

    def _told(self, update: UpdateId) -> bool:
        """VWs were told that ``update`` was lost with servers, or that its VW has departed before this wave."""
        lost = [each for one in self.vws.values() for each in one.lost]
        ends = [(each.vw, each.incarnation, each.first, each.last) for each in lost]
        ends += [(each.vw, each.incarnation, each.clock, -1) for each in self.departed]
        return any(
            (vw, incarnation) == (update.vw, update.incarnation)
            and first <= update.clock
            and (last < 0 or update.clock <= last)
            for vw, incarnation, first, last in ends
        )


def add_blocks(layouts: Sequence[ShardLayout], total: Sequence[Tensor], update: Sequence[Tensor], divisor: int) -> None:
    for layout, block, more in zip(layouts, total, update, strict=True):
        for weight, each in zip(layout.views(block), layout.views(more.clone()), strict=True):
            add(weight, [(each, divisor)])


def commits(*ids: tuple[int, int]) -> tuple[Commit, ...]:
    """The commits of (VW, clock), of incarnation 0."""
    return tuple(Commit(UpdateId(vw, 0, clock), 1) for vw, clock in ids)
