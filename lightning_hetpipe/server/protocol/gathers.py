"""Gather: the only collective of the live VWs. Every VW gives some bytes, and gets the bytes of all.

A gather is named by (cut, ordinal). Its members are the VWs that are live at its start and do not wait at a later cut.
It is complete when each member has given its part, has left, or has come to a later cut. The last result is kept until
the next gather is complete: then all members have it, because they had to go on from there.

Bound: a part has at most `LIMIT` bytes. There are at most two gathers, one complete and one open: 2 N `LIMIT`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lightning_hetpipe.server.protocol import messages
from lightning_hetpipe.server.protocol.identifiers import Refusal, RemoteFault

Name = tuple[int, int]
Bytes = bytes | memoryview

LIMIT = 64 << 20
"""Largest part in bytes. Larger content takes several gathers."""


class Gathers:
    """Successive gathers of one generation."""

    limit = LIMIT

    def __init__(self) -> None:
        self._open: dict[Name, tuple[list[int], dict[int, Bytes]]] = {}
        """Members of each open gather, and the parts that they have given."""
        self._given: dict[int, Name] = {}
        self._name: Name = (-1, -1)
        self._parts: dict[int, Bytes] = {}

    def check(self, size: int) -> None:
        if size > self.limit:
            raise RemoteFault(Refusal.TOO_LARGE, f"{size} bytes in a gather are more than the {self.limit} allowed")

    def serve(
        self, message: messages.Gather, part: Bytes, live: Collection[int], waits: Mapping[int, int]
    ) -> tuple[messages.Answer, Sequence[Bytes]]:
        """Take the VW's part, once. Return the answer, with the parts in VW order if the gather is complete. ``waits``
        has the cut at which a VW waits."""
        name = (message.cut, message.ordinal)
        self.check(len(part))
        if name != self._name or message.vw not in self._parts:
            self._give(message.vw, name, part, live, waits)
            members, here = self._open[name]
            missing = [vw for vw in members if vw in live and waits.get(vw, -1) <= name[0] and vw not in here]
            if missing:
                return messages.NotYet(f"VW {', '.join(map(str, missing))} in gather {name}"), ()
            del self._open[name]
            self._name, self._parts = name, here
        parts = tuple(messages.GatherPart(vw, len(self._parts[vw])) for vw in sorted(self._parts))
        return messages.Gathered(*name, parts), [self._parts[each.vw] for each in parts]

    def _give(self, vw: int, name: Name, part: Bytes, live: Collection[int], waits: Mapping[int, int]) -> None:
        if name <= self._name or name < self._given.get(vw, name):
            raise RemoteFault(Refusal.STALE, f"gather {name} of VW {vw} is over")
        if name not in self._open:
            # No VW is in two gathers at once: an older gather is left over from VWs that are gone.
            for older in [each for each in self._open if each < name]:
                del self._open[older]
            self._open[name] = sorted(each for each in live if waits.get(each, -1) <= name[0]), {}
        self._open[name][1].setdefault(vw, part)
        self._given[vw] = name

    def restore(self, gathered: messages.Gathered, body: Bytes) -> None:
        """Take over a result that a VW has kept, if it is newer. Drop open gathers, which begin again."""
        self._open.clear()
        name = (gathered.cut, gathered.ordinal)
        if gathered.size != len(body) or any(part.size < 0 for part in gathered.parts):
            raise RemoteFault(Refusal.MALFORMED, f"gather {name} is reported with {len(body)} bytes")
        if name > self._name:
            self._name, self._parts = name, {**gathered.split(memoryview(body))}


class KeptBytes:
    """Bytes of any size, by name, which VW 0 leaves for VWs that come later."""

    def __init__(self) -> None:
        self.content: dict[str, tuple[messages.KeepBytes, Bytes]] = {}
        self.asked: dict[int, str] = {}
        """Name of the bytes for which a VW waits, by VW."""

    def serve(self, message: messages.AboutKept, body: Bytes) -> tuple[messages.Answer, Sequence[Bytes]]:
        """Return the answer and its body."""
        if isinstance(message, messages.KeepBytes):
            self.content.pop(message.name, None)
            if len(body):
                self.content[message.name] = message, body
            return messages.Done(), ()
        kept, content = self.content.get(message.name, (None, b""))
        if kept is None or (kept.readers and message.incarnation not in kept.readers):
            self.asked[message.vw] = message.name
            return messages.NotYet(f"'{message.name}', which VW 0 leaves"), ()
        self.asked.pop(message.vw, None)
        return messages.Done(), [content]
