"""Roster of the VWs of a session: which VWs may speak, live, have departed, or wait for each other. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from lightning_hetpipe.server.protocol import messages
from lightning_hetpipe.server.protocol.gathers import Bytes
from lightning_hetpipe.server.protocol.identifiers import Refusal, RemoteFault
from lightning_hetpipe.server.protocol.recovery import check

FORGOTTEN = 10
"""Number of leases of silence of all VWs after which they count as dead."""


class Leases:
    """Leases of ``seconds``: a VW is alive if it was heard within its lease. If no VW is heard, all VWs or the server
    were stopped (Ctrl-Z). VWs are heard three times in a lease, so at most half a lease of this silence counts. After
    `FORGOTTEN` leases of silence all leases end."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.seen: dict[int, float] = {}
        """Time at which each live VW was last heard."""
        self._heard: float | None = None
        """Time at which any VW was last heard."""

    def hear(self, now: float) -> float:
        """Record that a VW is heard. Return the seconds of silence before that do not count."""
        excess = 0.0 if self._heard is None else max(0.0, now - self._heard - self.seconds / 2)
        self._heard = now
        self.seen = {vw: seen + excess for vw, seen in self.seen.items()}
        return excess

    def expired(self, now: float) -> list[int]:
        """Return the VWs whose leases have run out."""
        silence = 0.0 if self._heard is None else now - self._heard
        if self.seconds / 2 < silence <= FORGOTTEN * self.seconds:
            return []
        return [vw for vw, seen in self.seen.items() if now - seen > self.seconds]


class Roster:
    """VWs that a coordinator has heard of. ``gone`` has the last incarnation of each VW that had left or was left out
    before this coordinator took over. ``replaced`` is called before a new process of a VW takes the place of the known
    process."""

    def __init__(self, leases: Leases, gone: Mapping[int, int], replaced: Callable[[int], None]) -> None:
        self._leases = leases
        self.signature: messages.TrainingSignature | None = None
        """Signature of the first VW, which all other VWs must have."""
        self.incarnation: dict[int, int] = {}
        """Newest known incarnation of each VW."""
        self.gone: dict[int, int] = dict(gone)
        """Last incarnation of each VW that has left or was left out."""
        self._departed: dict[int, messages.Departed] = {}
        """Last departure of a process of each VW that was a member."""
        self._replaced = replaced

    @property
    def silent(self) -> str:
        """Reason for leaving out a VW, as text."""
        lease = f"{self._leases.seconds:g} s"
        return f"silent for longer than its lease of {lease} (raise WSPCallback(lease=...) if it may be)"

    def lives(self, vw: int) -> bool:
        return vw in self._leases.seen

    def identify(self, message: messages.Request, now: float, again: bool) -> None:
        """Let the sender of ``message`` speak, and record that it lives unless the message is tried ``again``. Raise
        RemoteFault if the sender is no VW of this session, or no longer a VW of it, or has to join first."""
        vw, incarnation = message.vw, message.incarnation
        if isinstance(message, messages.Join):
            check(message)
            first = self.signature or message.signature
            if (what := difference(first, message.signature)) is not None:
                raise RemoteFault(Refusal.SIGNATURE, f"VW {vw} differs from the VW that came first: {what}")
            self.signature = first
        if vw < 0 or (self.signature is not None and vw >= self.signature.virtual_workers):
            raise RemoteFault(Refusal.MALFORMED, f"there is no VW {vw}")
        known = self.incarnation.get(vw, -1)
        if incarnation < known:
            raise RemoteFault(Refusal.FENCED, f"VW {vw} was started again, and this is the older one")
        if self.has_gone(vw, incarnation) and not isinstance(message, messages.Leave):
            raise RemoteFault(Refusal.LEFT_OUT, f"VW {vw} was {self.silent}, or has left")
        if incarnation > known:
            if not isinstance(message, messages.Join | messages.Leave):
                if not self.lives(vw) and self.signature is not None:
                    self.incarnation[vw], self._leases.seen[vw] = incarnation, now  # it will join when it can
                raise RemoteFault(Refusal.GENERATION, f"VW {vw} is not known here, and has to join")
            if known >= 0 and isinstance(message, messages.Leave):  # perhaps of another launch, never admitted
                raise RemoteFault(Refusal.GENERATION, f"VW {vw} is not known here, and cannot leave")
            self._replaced(vw)
            self.incarnation[vw] = incarnation
        if not again and not isinstance(message, messages.Leave):
            self._leases.seen[vw] = now

    def has_gone(self, vw: int, incarnation: int) -> bool:
        """Return True if this process of a VW has left or was left out."""
        return incarnation <= self.gone.get(vw, -1)

    def depart(self, vw: int, incarnation: int, clock: int, why: str) -> None:
        """Record that a member has left, or was left out for the reason ``why``."""
        self.gone[vw] = incarnation
        if vw not in self._departed or self._departed[vw].incarnation < incarnation:
            self._departed[vw] = messages.Departed(vw, incarnation, clock, why)

    def done(self) -> messages.Done:
        """Make the answer that reports departed members."""
        return messages.Done(tuple(self._departed.values()))


def difference(first: messages.TrainingSignature, other: messages.TrainingSignature) -> str | None:
    """Describe the first difference of ``other`` from the first VW's signature, or return None."""
    for mine, theirs in zip(first.settings, other.settings, strict=False):
        if mine != theirs:
            return f"'{theirs}' instead of '{mine}'"
    for field in fields(messages.TrainingSignature):
        a, b = getattr(first, field.name), getattr(other, field.name)
        if field.name not in ("settings", "parameters", "least") and a != b:
            return f"{field.name.replace('_', ' ')}: {b!r} instead of {a!r}"
    if len(first.settings) != len(other.settings):
        return f"settings: {', '.join(other.settings)} instead of {', '.join(first.settings)}"
    names = [parameter.name for parameter in first.parameters]
    known = {parameter.name: parameter for parameter in first.parameters}
    others = {parameter.name: parameter for parameter in other.parameters}
    for name in names:
        if name not in others:
            return f"parameter '{name}' is missing"
    for name, parameter in others.items():
        if name not in known:
            return f"parameter '{name}' is not known to the others"
        if parameter != known[name]:
            return f"parameter '{name}' is {_described(parameter)} instead of {_described(known[name])}"
    if names != [parameter.name for parameter in other.parameters]:
        return "the order of the parameters"
    return None


def _described(parameter: messages.Parameter) -> str:
    sent = "" if parameter.update_dtype == parameter.dtype else f" sent as {parameter.update_dtype}"
    return f"{parameter.dtype} {list(parameter.shape)}{sent}"


Serve = Callable[[Any, Bytes], tuple[messages.Answer, Sequence[Bytes]]]

CIRCLE = (
    "all virtual workers wait for each other; call what needs all of them, such as a metric with sync_dist=True or a"
    " checkpoint, after the same minibatch on each"
)


class DeadlockDetector:
    """Last waiting request of each VW, to find VWs that wait for each other in a circle. A deadlock arises if a program
    calls a collective (a gather) at different minibatches. One VW waits in the gather for another VW, which waits for
    the first VW's wave."""

    def __init__(self) -> None:
        self._waiting: dict[int, messages.Request] = {}

    def after(
        self, message: messages.Request, answer: messages.Answer, members: Collection[int], serve: Serve
    ) -> str | None:
        """Return a text with who waits for whom, if all ``members`` wait and nothing can change that. Only the requests
        of ``members`` could change the state. ``serve`` answers a request once more, without its body."""
        if isinstance(message, messages.Heartbeat):
            return None
        self._waiting.pop(message.vw, None)
        if isinstance(answer, messages.NotYet):
            self._waiting[message.vw] = message
        if not members or not set(members) <= self._waiting.keys():
            return None
        told = []
        for other in sorted(members):
            try:
                answer, _ = serve(self._waiting[other], b"")  # the answer may have changed since
            except RemoteFault:
                return None
            if not isinstance(answer, messages.NotYet):
                return None
            told.append(f"VW {other} for {answer.waits_for}")
        return f"{CIRCLE}: {'; '.join(told)}"

    def forget(self, vw: int) -> None:
        """Drop a VW that is gone."""
        self._waiting.pop(vw, None)
