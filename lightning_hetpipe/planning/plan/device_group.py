"""A stage's devices in a plan: one, or a group of them that divide its layers' channels among themselves."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from lightning_hetpipe.planning.plan.json_file import Document

ESTIMATED = " (estimated)"
NOMINAL = " (nominal memory)"
_DEVICE = re.compile(rf"(?P<name>.+):(?P<number>\d+)(?:{re.escape(ESTIMATED)}|{re.escape(NOMINAL)})?", re.DOTALL)


class DeviceLabel:
    """Reader of a ``device`` such as "RTX-3090:1": a name, and the device's number on its node."""

    device: str

    @property
    def device_name(self) -> str:
        """Device name without its number."""
        match = _DEVICE.fullmatch(self.device)
        return self.device if match is None else match["name"]

    @property
    def device_number(self) -> int | None:
        """Number of the device on its node, from 0; None if ``device`` does not say."""
        match = _DEVICE.fullmatch(self.device)
        return None if match is None else int(match["number"])

    @property
    def place(self) -> str:
        """Device name and number, such as "RTX-3090:1"."""
        return self.device.removesuffix(ESTIMATED).removesuffix(NOMINAL)

    @property
    def estimated(self) -> bool:
        """True if its times come from a data sheet."""
        return self.device.endswith(ESTIMATED)

    @property
    def nominal(self) -> bool:
        """True if its memory comes from a data sheet, and its times do not."""
        return self.device.endswith(NOMINAL)


@dataclass(frozen=True)
class PlannedMember(DeviceLabel):
    """One device of a stage's group.

    Attributes:
        node: The machine's name, which is the stage's.
        device: As a stage's.
        share: Its part of the work, relative to the other members' shares; 0 for nothing.
        memory_bytes: That it takes; 0 where nothing was estimated.
        memory_limit_bytes: That it has; None where that is no limit.
    """

    node: str
    device: str
    share: float
    memory_bytes: int = 0
    memory_limit_bytes: int | None = None

    @classmethod
    def read(cls, document: Document) -> PlannedMember:
        """Read a member of a ``group``."""
        document.object(*(field.name for field in fields(cls)))
        return cls(
            document["node"].text(),
            document["device"].text(),
            document["share"].number(),
            **document.given(memory_bytes=Document.whole, memory_limit_bytes=lambda each: each.whole_or_none(1)),
        )


@dataclass(frozen=True)
class PlannedSplit:
    """One layer that a group divides.

    Attributes:
        layer: Path of the module in the LightningModule, such as "net.features.0"; of a parameter that no module has
            as its ``weight``, the parameter's own.
        counts: How many of its units each member computes, in the order of the group: output channels, groups of a
            grouped convolution, or attention heads (of keys and values, where several of queries share one).
    """

    layer: str
    counts: tuple[int, ...]

    @classmethod
    def read(cls, document: Document) -> PlannedSplit:
        """Read one of a stage's ``splits``."""
        document.object(*(field.name for field in fields(cls)))
        return cls(document["layer"].text(), tuple(each.whole() for each in document["counts"].entries()))
