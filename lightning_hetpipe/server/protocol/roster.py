"""Roster: the VWs of a session, by their incarnations: who may speak, who lives, who has departed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lightning_hetpipe.server.protocol.identifiers import Refusal, RemoteFault
from lightning_hetpipe.server.protocol.leases import Leases
from lightning_hetpipe.server.protocol.messages import Departed, Done, Join, Leave, Request, TrainingSignature
from lightning_hetpipe.server.protocol.recovery import check
from lightning_hetpipe.server.protocol.signature import difference


class Roster:
    """The VWs that a coordinator has heard of.

    Args:
        leases: tell which VWs live.
        gone: of VWs that have left or were left out before this coordinator took over, the last incarnation.
        replaced: called when another process of a VW comes, before it takes the place of the one that is known.
    """

    def __init__(self, leases: Leases, gone: Mapping[int, int], replaced: Callable[[int], None]) -> None:
        self._leases = leases
        self.signature: TrainingSignature | None = None
        """Signature of the VW that came first, which all others must have."""
        self.incarnation: dict[int, int] = {}
        """Newest incarnation of each VW that has been heard of."""
        self.gone: dict[int, int] = dict(gone)
        """Last incarnation of each VW that has left or was left out."""
        self._departed: dict[tuple[int, int], Departed] = {}
        """Departures of those among them that were members, by VW and incarnation."""
        self._replaced = replaced

    @property
    def silent(self) -> str:
        """The reason for which a VW is left out, in words."""
        lease = f"{self._leases.seconds:g} s"
        return f"silent for longer than its lease of {lease} (raise WSPCallback(lease=...) if it may be)"

    def lives(self, vw: int) -> bool:
        return vw in self._leases.seen

    def identify(self, message: Request, now: float, again: bool) -> None:
        """Let the sender of a ``message`` speak, and note that it lives unless its message is tried ``again``.

        Raises:
            RemoteFault: if it is no VW of this session, or not any more, or has to join first.
        """
        vw, incarnation = message.vw, message.incarnation
        if isinstance(message, Join):
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
        if self.has_gone(vw, incarnation) and not isinstance(message, Leave):
            raise RemoteFault(Refusal.LEFT_OUT, f"VW {vw} was {self.silent}, or has left")
        if incarnation > known:
            if not isinstance(message, Join | Leave):
                if not self.lives(vw) and self.signature is not None:
                    self.incarnation[vw], self._leases.seen[vw] = incarnation, now  # it will join when it can
                raise RemoteFault(Refusal.GENERATION, f"VW {vw} is not known here, and has to join")
            if self.lives(vw) and isinstance(message, Leave):  # of another launch, perhaps, which was never let in
                raise RemoteFault(Refusal.GENERATION, f"VW {vw} is not known here, and cannot leave")
            self._replaced(vw)
            self.incarnation[vw] = incarnation
        if not again and not isinstance(message, Leave):
            self._leases.seen[vw] = now

    def has_gone(self, vw: int, incarnation: int) -> bool:
        """Tell whether that process of a VW has left or was left out."""
        return incarnation <= self.gone.get(vw, -1)

    def depart(self, vw: int, incarnation: int, clock: int, why: str) -> None:
        """Note that a process of a VW, which was a member, has left, or was left out for the reason ``why``."""
        self.gone[vw] = incarnation
        self._departed.setdefault((vw, incarnation), Departed(vw, incarnation, clock, why))

    def done(self) -> Done:
        """Answer that tells of departed members."""
        return Done(tuple(self._departed.values()))
