"""Plan of a segment that a group computes: what runs whole, and regions in which each member computes its parts.

A *region* is a stretch in which members need nothing of each other. What comes to it from outside is whole on each
member, or a part on each; what leaves it is put together of parts, added up, or remains where it is for a later region.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from torch import fx

from lightning_hetpipe.rules.channel_layouts import ChannelLayout


class TakenAs(Enum):
    """Ways in which a member takes what a region is given."""

    WHOLE = "whole"
    PART = "its part"
    MASK = "its part of a mask"
    STATE = "its part of a buffer, which is written back"
    HELD = "what it has kept of an earlier region"
    DEVICE = "its device"


class GivenAs(Enum):
    """Ways in which what members give leaves a region."""

    JOINED = "put together"
    ADDED = "added up"
    HELD = "kept by each"


@dataclass(frozen=True)
class RegionInput:
    """One input of a region.

    Attributes:
        node: In the graph of the segment.
        taken: How.
        layout: Of what each member takes; None for what is whole.
        is_weight: Whether it is a tensor of a layer: of parameters, parts are kept for each version.
    """

    node: fx.Node
    taken: TakenAs
    layout: ChannelLayout | None = None
    is_weight: bool = False


@dataclass(frozen=True)
class RegionOutput:
    """One output of a region.

    Attributes:
        node: In the graph of the segment.
        given: How.
        layout: That says which members have a part.
    """

    node: fx.Node
    given: GivenAs
    layout: ChannelLayout


@dataclass
class Region:
    """A region.

    Attributes:
        members: Number of members.
        inputs, outputs: What comes to it, and what leaves it.
        graphs: What each member computes: it takes its part of the inputs of the numbers in ``takes``, and gives its
            part of the outputs of the numbers in ``gives``.
    """

    members: int
    inputs: list[RegionInput] = field(default_factory=list)
    outputs: list[RegionOutput] = field(default_factory=list)
    graphs: list[fx.GraphModule] = field(default_factory=list)
    takes: list[list[int]] = field(default_factory=list)
    gives: list[list[int]] = field(default_factory=list)

    def input(self, wanted: RegionInput) -> int:
        """Number of the ``wanted`` input, which is one from now on."""
        if wanted not in self.inputs:
            self.inputs.append(wanted)
        return self.inputs.index(wanted)

    def output(self, wanted: RegionOutput) -> int:
        """Number of the ``wanted`` output."""
        if wanted not in self.outputs:
            self.outputs.append(wanted)
        return self.outputs.index(wanted)


@dataclass(frozen=True)
class SplitGraph:
    """Graph that a group computes in place of a segment's.

    Attributes:
        graph: The segment's graph, with calls of modules "region_0" and so on in place of what members compute.
        regions: These, by their names.
        layers: Numbers of units in which each layer may begin to be divided, by its path; the best one first.
        gathered: For reports: the operators before which values are put together.
    """

    graph: fx.Graph
    regions: dict[str, Region]
    layers: dict[str, tuple[int, ...]]
    gathered: Sequence[str]
