"""A stage's devices in a plan: one, or a group of them that divide its layers' channels among themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from lightning_hetpipe.planning.model.units import in_bytes
from lightning_hetpipe.planning.plan.json_file import Document

if TYPE_CHECKING:
    from lightning_hetpipe.planning.plan.document import PlannedStage

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


def members_of(document: Document) -> tuple[PlannedMember, ...]:
    """Read the ``group`` of a stage."""
    return tuple(map(_member, document["group"].entries())) if "group" in document else ()


def splits_of(document: Document) -> tuple[PlannedSplit, ...]:
    """Read the ``splits`` of a stage."""
    return tuple(map(_split, document["splits"].entries())) if "splits" in document else ()


def group_problems(stage: PlannedStage, place: str) -> Iterator[tuple[str, str]]:
    """Faults of a stage's group by itself: for each the key in ``plan.json``, and what is wrong there."""
    group = stage.group
    if stage.splits and not group:
        yield f"{place}.splits", "divides layers, and the stage has no group; give it one, or leave splits out"
    if not group:
        return
    places = [(member.node, member.device_number) for member in group]
    if len(group) == 1:
        yield f"{place}.group", "has one member; leave it out for a stage on one device"
    if (stage.node, stage.device_number) not in places:
        yield f"{place}.device", f"is '{stage.place}', which holds the unsplit weights and must be in the group"
    if not any(member.share > 0 for member in group):
        yield f"{place}.group", "has no share above 0; give at least one member some of the work"
    for number in range(len(group)):
        yield from _member_problems(stage, number, f"{place}.group[{number}]")
    for number, split in enumerate(stage.splits):
        yield from _split_problems(stage.splits[:number], split, len(group), f"{place}.splits[{number}]")


def _member_problems(stage: PlannedStage, number: int, place: str) -> Iterator[tuple[str, str]]:
    member, limit = stage.group[number], stage.group[number].memory_limit_bytes
    at = member.node, member.device_number
    if at[1] is None:
        yield f"{place}.device", f"is '{member.device}' and must be a name and a number, such as 'RTX-3090:0'"
    elif at in [(each.node, each.device_number) for each in stage.group[:number]]:
        yield f"{place}.device", f"is '{member.place}', which is in the group already"
    if member.node != stage.node:
        yield f"{place}.node", f"is '{member.node}', and a group lies on one machine, here '{stage.node}'"
    if limit is not None and member.memory_bytes > limit:
        said = (
            f"is {in_bytes(member.memory_bytes)}, {in_bytes(member.memory_bytes - limit)} more than {member.place} has"
        )
        yield f"{place}.memory_bytes", said


def _split_problems(
    before: Sequence[PlannedSplit], split: PlannedSplit, members: int, place: str
) -> Iterator[tuple[str, str]]:
    if len(split.counts) != members:
        yield f"{place}.counts", f"has {len(split.counts)} numbers for '{split.layer}', and the group {members} members"
    elif not sum(split.counts):
        yield f"{place}.counts", f"gives nobody anything of '{split.layer}'"
    if split.layer in [each.layer for each in before]:
        yield f"{place}.layer", f"is '{split.layer}', which is divided already"


def _member(document: Document) -> PlannedMember:
    document.object(*(field.name for field in fields(PlannedMember)))
    has_limit = "memory_limit_bytes" in document and document["memory_limit_bytes"].value is not None
    return PlannedMember(
        document["node"].text(),
        document["device"].text(),
        document["share"].number(),
        document["memory_bytes"].whole() if "memory_bytes" in document else 0,
        document["memory_limit_bytes"].whole(1) if has_limit else None,
    )


def _split(document: Document) -> PlannedSplit:
    document.object(*(field.name for field in fields(PlannedSplit)))
    return PlannedSplit(document["layer"].text(), tuple(each.whole() for each in document["counts"].entries()))
