"""Rewriting of a segment's graph into the graphs of a group's members.

In order, each operator is found to be whole or divided (:mod:`.operator_rules`), and gets a *level*. A region has one
level. An operator that needs the whole of a region's value is a level above it. Then the operators of each level are
copied into its region, once for each member, and regions and whole operators are called level by level. Values that are
written in place stay whole, and operators on them stay in order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from lightning_hetpipe.pipeline.random.generators import drawn
from lightning_hetpipe.pipeline.split.joined_graph import JoinedGraph, join_families, layer_path, writes_and_views
from lightning_hetpipe.pipeline.split.operator_call import Divided, layout_of, sizes_of
from lightning_hetpipe.pipeline.split.regions import (
    GivenAs,
    Mask,
    MemberGraph,
    OuterGraph,
    Region,
    RegionInput,
    RegionOutput,
    SplitGraph,
    TakenAs,
    mask_of,
)
from lightning_hetpipe.pipeline.split.unit_choice import HEAVY, chosen_units, followed, groups_of, input_of, weight_of
from lightning_hetpipe.planning.model.profile import LayerWidths
from lightning_hetpipe.rules.channel_layouts import ChannelCounts, ChannelLayout

_STATISTICS = {torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default}
"""Operators that write into their fourth and fifth operand."""


def split_graph(joined: JoinedGraph, counts: ChannelCounts, members: int) -> SplitGraph:
    """Rewrite ``joined`` for ``members`` members with ``counts``. Raise SettingError if counts fit no layer."""
    return _Rewriting(joined, counts, members).made()


def divided_layers(joined: JoinedGraph) -> dict[int, LayerWidths]:
    """Return the divisions, without times, that a group of devices may make of the layers of ``joined``, by number."""
    return _Rewriting(joined, ChannelCounts((1.0, 1.0)), 2).divided_layers()


class _Rewriting:
    def __init__(self, joined: JoinedGraph, counts: ChannelCounts, members: int) -> None:
        self._joined = joined
        self._counts = counts
        self._members = members
        self._units = chosen_units(joined.graph)
        self._layers: dict[str, tuple[int, ...]] = {}
        self._own = {node for node, _, _ in joined.own}
        self._divided: dict[fx.Node, Divided] = {}
        self._masks: dict[fx.Node, Mask] = {}
        self._levels: dict[fx.Node, int] = {}
        self._worth: set[fx.Node] = set()  # what is divided, and made from a heavy operator's output on its level
        self._whole: set[fx.Node] = set()
        self._written = _written_families(joined.graph)
        self._regions: dict[int, Region] = {}

    # What is divided, and on which level.

    def _decide(self) -> None:
        """Decide which operators are divided. Leave out runs of little work, and work that the home may as well do."""
        while True:
            for each in (self._divided, self._masks, self._levels, self._worth):
                each.clear()
            self._find_divided()
            if not (light := self._light() or self._at_home()):
                return
            self._whole |= light

    def _light(self) -> set[fx.Node]:
        """Find connected divided nodes of a level among which none is heavy work."""
        group: dict[fx.Node, set[fx.Node]] = {}
        for node in self._divided:
            given = [each for each in node.all_input_nodes if layout_of(each, self._divided) is not None]
            join_families(node, [each for each in given if self._levels[each] == self._levels[node]], group)
        return {node for node, same in group.items() if not any(each.target in HEAVY for each in same)}

    def _at_home(self) -> set[fx.Node]:
        """Find values that the home can make alone: by little work, from inputs that are gathered there anyway."""
        gathered = {node for node in self._divided if not all(self._passes(node, user) for user in node.users)}
        found = {node for node in gathered if node.target not in HEAVY and not self._divided[node].adds}
        return {
            node
            for node in found
            if (given := [each for each in node.all_input_nodes if each in self._divided])
            and all(each in gathered and sizes_of(each) == sizes_of(node) for each in given)
        }

    def _find_divided(self) -> None:
        latest: dict[int, int] = {}  # level of the last operator on each family of values written in place
        for node in self._joined.graph.nodes:
            if node.op != "call_function":
                self._levels[node] = 0
                continue
            near = (node, *node.all_input_nodes, *(node.users if node.meta.get("several") else ()))
            families = {self._written[each] for each in near if each in self._written}
            found = None if families or node in self._whole else self._division(node)
            if found is None:
                level = max((self._level_for(each, node) for each in node.all_input_nodes), default=0)
                for family in families:
                    level = latest[family] = max(level, latest.get(family, 0))
                self._levels[node] = level
                continue
            self._divided[node] = found
            given = node.all_input_nodes
            self._levels[node] = level = max(self._level_for(each, node) for each in given)
            worth = [each for each in given if each in self._worth and self._levels[each] == level]
            if node.target in HEAVY or any(self._passes(each, node) for each in worth):
                self._worth.add(node)

    def _division(self, node: fx.Node) -> Divided | None:
        """Find how members compute ``node``, or return None if it is whole."""
        if node.target is drawn:
            return self._dropout(node)
        written, _ = writes_and_views(node)
        if any(each not in self._own or node.target not in _STATISTICS for each in written):
            return None
        return followed(node, self._divided, lambda weight: self._columns(node, weight))

    def _columns(self, node: fx.Node, weight: fx.Node) -> ChannelLayout | None:
        """Return the division of the output channels of ``node``, by the counts for its ``weight``."""
        if (held := weight_of(node)) is None or (name := layer_path(weight)) is None or node not in self._units:
            return None
        outer, units, inner, _ = self._units[node]
        options = {units: (outer, inner)}
        if groups_of(node) == 1:
            options.setdefault(held[1], (1, 1))
            asked = sum(self._counts.splits.get(name, ()))  # of a stage that has more behind this layer, perhaps
            if asked and held[1] % asked == 0:
                options.setdefault(asked, (1, held[1] // asked))
        before = self._going_on(node)
        also = [] if before is None else [before.units]
        self._layers[name] = tuple(dict.fromkeys([*self._layers.get(name, ()), *options, *also]))
        if before is not None and (not self._counts.splits or self._counts.splits.get(name) == before.counts):
            return None
        counts = self._counts.of(name, list(options))
        if counts is None:
            return None
        return ChannelLayout(0, *options[sum(counts)], counts)

    def _going_on(self, node: fx.Node) -> ChannelLayout | None:
        """Return the layout of a layer's input if the layer is better divided like it: a product by rows, a convolution
        by its groups. Return None for a product before an attention, for example, which could then not be divided, and
        for little work before it."""
        given, groups = input_of(node), groups_of(node)
        if not isinstance(layout := layout_of(given, self._divided), ChannelLayout):
            return None
        if groups > 1:
            channels = sizes_of(given)[layout.dim]
            size = channels // groups if isinstance(channels, int) else 0
            fits = size > 0 and layout.outer == 1 and not any(count * layout.inner % size for count in layout.counts)
        else:
            is_last = layout.dim == len(sizes_of(given)) - 1 and "conv" not in str(node.target)
            fits = is_last and given in self._worth and not self._units[node].arrives
        return layout if fits else None

    def _dropout(self, node: fx.Node) -> Divided | None:
        """Draw the unsplit mask, of which each member multiplies by its part."""
        given = node.args[3]
        if not isinstance(given, fx.Node) or not isinstance(layout := layout_of(given, self._divided), ChannelLayout):
            return None
        whole = (each for each, level in self._levels.items() if level == 0 and each not in self._divided)
        if (mask := mask_of(node, layout, whole)) is None:
            return None
        self._masks[node] = mask
        return Divided(layout, {given: layout})

    def _level_for(self, node: fx.Node, user: fx.Node) -> int:
        """Return the first level on which ``user`` can take ``node``."""
        return self._levels[node] + (node in self._divided and not self._passes(node, user))

    def divided_layers(self) -> dict[int, LayerWidths]:
        self._decide()
        units, sums = dict[int, dict[str, int]](), set[int]()
        runs: dict[int, set[int]] = {}  # layers of one run share one set
        for node, found in self._divided.items():
            layer = _layer_of(node)
            join_families(layer, [_layer_of(each) for each in node.all_input_nodes if self._passes(each, node)], runs)
            if (name := self._begun(node)) is not None:
                units.setdefault(layer, {})[name] = self._units[node].units
            if found.adds:
                sums.add(layer)
        return {
            layer: LayerWidths(min(run), units.get(layer, {}), layer in sums) for layer, run in sorted(runs.items())
        }

    def _begun(self, node: fx.Node) -> str | None:
        """Return the path of the layer that begins to be divided at ``node``, or None if it goes on as given."""
        found, held = self._divided[node], weight_of(node)
        if held is None or found.adds or found.operands.get(input_of(node)) is not None:
            return None
        return layer_path(held[0])

    def _passes(self, node: fx.Node, user: fx.Node) -> bool:
        """Return True if members hand their parts of ``node`` on to ``user``."""
        if user not in self._divided or (layout := layout_of(node, self._divided)) is None:
            return False
        return isinstance(layout, tuple) or layout == self._divided[user].operands.get(node)

    # Regions.

    def made(self) -> SplitGraph:
        self._decide()
        levels = sorted({self._levels[node] for node in self._divided})
        self._regions = {level: Region(self._members) for level in levels}
        bodies = {level: [MemberGraph() for _ in range(self._members)] for level in levels}
        for node, found in self._divided.items():
            layout = found.layout if isinstance(found.layout, ChannelLayout) else next(filter(None, found.layout))
            for member in layout.members:
                self._copy(node, found, member, bodies[self._levels[node]][member])
        graph = OuterGraph(self._joined)
        wholes = [n for n in self._joined.graph.nodes if n.op == "call_function" and n not in self._divided]
        for node in (*wholes, self._joined.graph.output_node()):
            for each in node.all_input_nodes:
                self._leave(each)
        for level in levels:
            for body in bodies[level]:
                body.close(self._regions[level])
        last = max([*levels, *(self._levels[node] for node in wholes), 0])
        for level in range(last + 1):
            for node in wholes:
                if self._levels[node] == level:
                    graph.copy(node)
            if level in self._regions:
                for node, mask in self._masks.items():
                    if self._levels[node] == level:
                        graph.draw(node, mask)
                graph.call(level, self._regions[level])
        regions = {f"region_{level}": region for level, region in self._regions.items()}
        return SplitGraph(graph.closed(), regions, self._layers)

    def _leave(self, node: fx.Node) -> None:
        """Make the whole of ``node`` an output of its region, if it is made in a region."""
        if node not in self._divided:
            return
        found = self._divided[node]
        assert isinstance(found.layout, ChannelLayout), f"several outputs of {node} leave a region"
        given = GivenAs.ADDED if found.adds else GivenAs.JOINED
        self._regions[self._levels[node]].output(RegionOutput(node, given, found.layout))

    def _copy(self, node: fx.Node, found: Divided, member: int, body: MemberGraph) -> None:
        def operand(each: fx.Node) -> fx.Node:
            return self._operand(each, node, body)

        if node in self._masks:
            region = self._regions[self._levels[node]]
            mask = body.taken(region.input(RegionInput(node, TakenAs.MASK, self._masks[node].layout)))
            given = operand(node.all_input_nodes[0])
            mask = body.graph.call_function(torch.ops.aten.type_as.default, (mask, given))  # autocast may have cast it
            body.made[node] = body.graph.call_function(torch.ops.aten.mul.Tensor, (given, mask))
            return
        args: list[Any] = list(node.args)
        for position, values in found.arguments.items():
            args[position] = values[member]
        target: Any = found.target or node.target
        made = body.graph.call_function(target, map_arg(tuple(args), operand), map_arg(dict(node.kwargs), operand))
        body.made[node] = made

    def _operand(self, each: fx.Node, node: fx.Node, body: MemberGraph) -> fx.Node:
        """Return the node, in a member's ``body``, of operand ``each`` of ``node``."""
        region, wanted = self._regions[self._levels[node]], self._divided[node].operands.get(each)
        is_kept = self._passes(each, node)
        if is_kept and self._levels[each] == self._levels[node]:
            return body.made[each]
        if each is self._joined.device:
            return body.taken(region.input(RegionInput(each, TakenAs.DEVICE)))
        if is_kept and wanted is not None:
            self._regions[self._levels[each]].output(RegionOutput(each, GivenAs.HELD, wanted))
            return body.taken(region.input(RegionInput(each, TakenAs.HELD, wanted)))
        if each in self._divided:
            self._leave(each)
        state = node.target in _STATISTICS and each in node.args[3:5]
        taken = TakenAs.STATE if state and wanted else TakenAs.WHOLE if wanted is None else TakenAs.PART
        return body.taken(region.input(RegionInput(each, taken, wanted, each in self._own and not state)))


def _layer_of(node: fx.Node) -> int:
    """Return the number of the layer of ``node``, or -1 for values from before."""
    if "of_layer" in node.meta or node.op != "call_function":
        return int(node.meta.get("of_layer", -1))
    return max((_layer_of(each) for each in node.all_input_nodes), default=-1)


def _written_families(graph: fx.Graph) -> dict[fx.Node, int]:
    """Number the families of values that are written in place or may share memory with such a value. A buffer that only
    one operator touches is left out."""
    families: dict[fx.Node, set[fx.Node]] = {}
    written: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        writes, views = writes_and_views(node)
        written.update(each for each in writes if each.op == "call_function" or len(each.users) > 1)
        join_families(node, views, families)
    return {each: id(families.get(node, {node})) for node in written for each in families.get(node, {node})}
