"""VW's side of the protocol, a state machine that decides what to send next. Pure.

    state     sends                              goes to
    -----------------------------------------------------------------------------------------------------------------
    OUTSIDE   nothing
    HELLO     Hello                  to shards   JOIN, when all have said what they hold
    JOIN      Join with a report                 CONFIRM; LOAD, if its weights are the newest
    CONFIRM   Heartbeat                          on with what it was doing, see below
    LOAD      Load + last pull       to shards   LOADED
    LOADED    Loaded                             JOIN
    STAGE     StageUpdate + update   to shards   PUSH
    PUSH      Pushed                             PULL; ARRIVE at a cut
    ARRIVE    Arrive                             PULL, when the cut has closed
    PULL      Pull                               READ, when it gets a read lease
    READ      Read                   to shards   PULLED
    PULLED    Pulled                             IDLE; the weights that were read are the last pull now
    GATHER    Gather + part                      IDLE, when all have given their parts
    IDLE      nothing

A lost server refuses a request in any state (``Refusal.GENERATION``). Then the VW goes through HELLO and JOIN back to
its call: to STAGE if the new generation's base lacks its update, else to PULL, ARRIVE, GATHER or IDLE. Requests without
an answer are sent again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from lightning_hetpipe.server.protocol import messages
from lightning_hetpipe.server.protocol.identifiers import (
    CommitIndex,
    LocalFault,
    PeerFailed,
    Refusal,
    RemoteFault,
    UpdateId,
)


class MemberState(Enum):
    OUTSIDE = "outside"
    HELLO = "hello"
    JOIN = "join"
    CONFIRM = "confirm"
    LOAD = "load"
    LOADED = "loaded"
    STAGE = "stage"
    PUSH = "push"
    ARRIVE = "arrive"
    PULL = "pull"
    READ = "read"
    PULLED = "pulled"
    GATHER = "gather"
    IDLE = "idle"


class Goal(Enum):
    """Unfinished call of the VW's owner."""

    NONE = "none"
    START = "start"
    WAVE = "wave"
    CUT = "cut"
    GATHER = "gather"


class Member:
    """Protocol state of VW ``vw``, without its weights. ``incarnation`` is larger than that of any earlier process of
    this VW. ``placement`` has the parameters on each server."""

    def __init__(
        self,
        vw: int,
        incarnation: int,
        signature: messages.TrainingSignature,
        placement: Sequence[tuple[messages.Parameter, ...]],
    ) -> None:
        self.vw = vw
        self.incarnation = incarnation
        self.state = MemberState.OUTSIDE
        self.goal = Goal.NONE
        self.generation = ""
        self.clock = 0
        """c_local."""
        self.slowest = 0
        """c_global at the last pull."""
        self.came_late = False
        """True if it became a member after the other VWs had begun."""
        self.cut = 0
        """The last cut that it has passed."""
        self.cut_at = -1
        self.commit_index: CommitIndex | None = None
        """Commit index of the last pull."""
        self.newest = 0
        """Index, 0 or 1, of the block of weights with the last pull. The other block takes the next pull."""
        self._signature = signature
        self._placement = placement
        self._pending: int | None = None
        self._wants_cut = False
        self._cut_clock = 0
        self._arrival = (0, False)
        self._closed = 0
        self._name = (0, 0)
        self.gathered: messages.Gathered | None = None
        """The last complete gather."""
        self._attempt = 0
        self.read_lease = 0
        self._joining: messages.Join
        self._load: messages.LoadNow
        self._base: CommitIndex | None = None
        """Base of the generation."""
        self._granted: messages.Granted
        self._unanswered: set[int] = set()
        self._holdings: dict[int, messages.Holding] = {}

    # Calls of the VW's owner.

    def join(self) -> None:
        if self.state is not MemberState.OUTSIDE:
            raise LocalFault("join() is called once")
        self.goal = Goal.START
        self._hello()

    def synchronise(self, *, cut: bool = False) -> None:
        """Push the update of the wave that ends now, then pull weights. ``cut`` is as in ``Pushed``."""
        self._begin(Goal.WAVE)
        self._pending, self._wants_cut = self.clock, cut
        self._resume(None)

    def arrive(self, cut: int, *, update: bool, admit: bool = False) -> None:
        """Wait at ``cut``, with or without an update of a short wave."""
        if cut <= self.cut:
            raise LocalFault(f"cut {cut} comes after cut {self.cut}")
        self._begin(Goal.CUT)
        if update:
            self._pending, self._wants_cut = self.clock, False
        self._arrival = cut, admit
        self._resume(None)

    def gather(self, ordinal: int) -> None:
        self._begin(Goal.GATHER)
        self._name = self.cut, ordinal
        self._resume(None)

    def lose(self) -> None:
        """Join again, because a heartbeat's answer said that the generation is lost."""
        if self.state is not MemberState.IDLE:
            raise LocalFault("a call that is under way joins again by itself")
        self._hello()

    def heartbeat(self) -> messages.Heartbeat:
        return messages.Heartbeat(self.vw, self.incarnation, self.generation)

    def leave(self, failure: str = "", why: str = "") -> messages.Leave:
        self.state = MemberState.OUTSIDE
        return messages.Leave(self.vw, self.incarnation, failure, why)

    def check_idle(self) -> None:
        """Raise LocalFault during a call, and before the VW has joined."""
        if self.state is not MemberState.IDLE:
            raise LocalFault(f"the VW is in state '{self.state.value}', and must be idle for that")

    def _begin(self, goal: Goal) -> None:
        self.check_idle()
        self.goal = goal

    # Requests.

    def next(self) -> messages.Request | Mapping[int, messages.ShardRequest] | None:
        """Return the next request to the coordinator, or requests to servers, by their index. None if there is none."""
        me = (self.vw, self.incarnation)
        here = (*me, self.generation)
        shards = sorted(self._unanswered)
        match self.state:
            case MemberState.HELLO:
                return dict.fromkeys(shards, messages.Hello(*me))
            case MemberState.JOIN:
                return self._joining
            case MemberState.CONFIRM:
                return self.heartbeat()
            case MemberState.LOAD:
                load, every = self._load, self._placement
                common = (*me, load.generation)
                return {at: messages.Load(*common, load.contents[at], load.base.included, every[at]) for at in shards}
            case MemberState.LOADED:
                return messages.Loaded(*me, self._load.generation)
            case MemberState.STAGE:
                assert self._pending is not None
                return dict.fromkeys(shards, messages.StageUpdate(*here, self._pending))
            case MemberState.PUSH:
                assert self._pending is not None
                return messages.Pushed(*here, self._pending, self._wants_cut)
            case MemberState.ARRIVE:
                return messages.Arrive(*here, *self._arrival)
            case MemberState.PULL:
                return messages.Pull(*here, self.read_lease)
            case MemberState.READ:
                return dict.fromkeys(shards, messages.Read(*here, self._granted.start, self._granted.tail))
            case MemberState.PULLED:
                return messages.Pulled(*here, self.read_lease)
            case MemberState.GATHER:
                return messages.Gather(*here, *self._name)
        return None

    # Answers.

    def heard(self, answer: messages.Answer | RemoteFault) -> None:
        """Take the coordinator's answer to the request of ``next``. Raise PeerFailed if all VWs must end. Raise
        RemoteFault if the servers refuse this VW for good, or broke the protocol."""
        if isinstance(answer, RemoteFault):
            self._refused(answer)
            return
        if isinstance(answer, messages.NotYet):
            return
        match self.state, answer:
            case MemberState.JOIN, messages.Joined():
                self._joined(answer)
            case MemberState.CONFIRM, messages.Done():
                self._resume(self._base)
            case MemberState.JOIN, messages.LoadNow():
                self._load = answer
                self._ask_shards(MemberState.LOAD)
            case MemberState.LOADED, messages.Done():
                # Another VW's report may still be newer, so this is no new pull. But w_0 counts as a pull.
                self.commit_index = self.commit_index or self._load.base
                self.state = MemberState.JOIN
            case MemberState.PUSH, messages.Done():
                assert self._pending is not None
                self.clock = self._pending + 1
                if self.goal is Goal.CUT:
                    self.state = MemberState.ARRIVE
                else:
                    self._to_pull()
            case MemberState.ARRIVE, messages.Closed():
                self._closed = answer.clock
                self._to_pull()
            case MemberState.PULL, messages.Granted(read_lease=read_lease) if read_lease == self.read_lease:
                self._granted = answer
                self._ask_shards(MemberState.READ)
            case MemberState.PULLED, messages.Done():
                self._pulled()
            case MemberState.GATHER, messages.Gathered():
                self.gathered = answer
                self._done()
            case _:
                raise RemoteFault(
                    Refusal.MALFORMED, f"a {type(answer).__name__} was answered to a VW in state '{self.state.value}'"
                )

    def heard_from(self, server: int, answer: messages.Answer | RemoteFault) -> None:
        """Take a shard's answer to the request of ``next``. Raises as ``heard`` does."""
        if server not in self._unanswered:
            return
        had = isinstance(answer, RemoteFault) and answer.refusal is Refusal.STALE
        if had and self.state in (MemberState.STAGE, MemberState.LOAD):
            pass  # an earlier request arrived, but its answer was lost
        elif isinstance(answer, RemoteFault):
            self._refused(answer)
            return
        elif isinstance(answer, messages.Holding):
            self._holdings[server] = answer
        else:
            raise RemoteFault(Refusal.MALFORMED, f"a {type(answer).__name__} was answered by a shard")
        self._unanswered.discard(server)
        if self._unanswered:
            return
        match self.state:
            case MemberState.HELLO:
                self._to_join()
            case MemberState.LOAD:
                self.state = MemberState.LOADED
            case MemberState.STAGE:
                self.state = MemberState.PUSH
            case MemberState.READ:
                self.state = MemberState.PULLED

    def _refused(self, fault: RemoteFault) -> None:
        overtaken = fault.refusal is Refusal.STALE and self.state is not MemberState.GATHER
        if fault.refusal is Refusal.GENERATION or overtaken:
            self._hello()
        elif fault.refusal is Refusal.FAILED:
            raise PeerFailed(str(fault))
        elif fault.refusal is not Refusal.BUSY:
            raise fault

    # Transitions.

    def _ask_shards(self, state: MemberState) -> None:
        self.state = state
        self._unanswered = set(range(len(self._placement)))

    def _hello(self) -> None:
        self._holdings.clear()
        self._ask_shards(MemberState.HELLO)

    def _to_join(self) -> None:
        self._attempt += 1
        report = messages.Report(
            term=0 if self._base is None else self._base.term,
            commit_index=self.commit_index,
            clock=self.clock if self._pending is None else self._pending,
            pending=self._pending is not None,
            cut=self.cut,
            cut_clock=self._cut_clock,
            cut_at=self.cut_at,
            gathered=self.gathered,
        )
        contents = tuple(self._holdings[server].content for server in range(len(self._placement)))
        me = (self.vw, self.incarnation, self._attempt)
        self._joining = messages.Join(*me, self._signature, report, contents)
        self.state = MemberState.JOIN

    def _joined(self, answer: messages.Joined) -> None:
        self.generation = answer.generation
        self.clock = answer.clock
        if self.goal is Goal.START:
            self.cut, self._cut_clock = answer.cut, answer.clock
            self.came_late = UpdateId(self.vw, self.incarnation, -1) not in answer.base.members
        self._base = answer.base
        self.state = MemberState.CONFIRM

    def _resume(self, base: CommitIndex | None) -> None:
        """Go on with the goal. ``base`` is the base of a generation that has just begun, or None."""
        update = None if self._pending is None else UpdateId(self.vw, self.incarnation, self._pending)
        owes = update is not None and not (base is not None and base.includes(update))
        if self.goal is Goal.NONE or (self.goal is Goal.START and self.commit_index is not None):
            self._done()
        elif owes:
            self._ask_shards(MemberState.STAGE)
        elif self.goal is Goal.CUT:
            self.state = MemberState.ARRIVE
        elif self.goal is Goal.GATHER:
            self.state = MemberState.GATHER
        else:
            self._to_pull()

    def _to_pull(self) -> None:
        self.read_lease += 1
        self.state = MemberState.PULL

    def _pulled(self) -> None:
        granted = self._granted
        self.newest = 1 - self.newest
        self.commit_index = granted.commit_index
        self.slowest, self.cut_at = granted.slowest, granted.cut_at
        self._pending = None
        if self.goal is Goal.CUT:
            self.cut = self._arrival[0]
            self.clock = self._cut_clock = self._closed
        self._done()

    def _done(self) -> None:
        self.goal = Goal.NONE
        self.state = MemberState.IDLE
