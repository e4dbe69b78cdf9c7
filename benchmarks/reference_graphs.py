"""The operator graphs of msr-fiddle/dnn-partitioning (NeurIPS 2020), as layers in a row, and the costs of stages."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import ROOT
from lightning_hetpipe.planning.search.split_points import best_split_points

DATA = Path(os.environ.get("HETPIPE_REFERENCE_DATA") or ROOT.parent / "shared" / "data")
"""Reference data that is no part of this repository."""

BEST: Mapping[str, float] = {"resnet50": 80.4549, "bert24": 41.7458}
"""The load of the busiest of six accelerators, in the best contiguous split by that project's dynamic program."""

DEVICES = 6


def missing(*names: str) -> str | None:
    """A sentence for people, where one of these files of the reference data is not there."""
    absent = next((name for name in names if not (DATA / name).is_file()), None)
    return None if absent is None else f"there is no {absent} of the reference data; set HETPIPE_REFERENCE_DATA"


def file_of(name: str) -> str:
    """Path of the graph ``name`` within the reference data."""
    return f"graphs/{name}_training.json"


def busiest(name: str) -> float:
    """The load of the busiest of six accelerators in our split of the graph ``name``."""
    return busiest_of(json.loads((DATA / file_of(name)).read_text()))


def busiest_of(graph: Mapping[str, Any]) -> float:
    """Our split of ``graph``: of its layers in one topological order, at the best boundaries.

    A layer is all nodes of a colour: its forward and its backward. A device's load is the sum of its nodes' times and,
    for every node whose value enters or leaves it, the transfer cost. Splits of one order are fewer than all contiguous
    splits of the graph; where nearly all of a model is one chain, they lose nothing.
    """
    nodes = {node["id"]: node for node in graph["nodes"]}
    place = _places(graph, nodes)
    count = len(set(place.values()))
    load, size = np.zeros(count + 1), np.zeros(count + 1)
    for number, node in nodes.items():
        load[place[number] + 1] += node["fpgaLatency"]
        size[place[number] + 1] += node["size"]
    load, size = load.cumsum(), size.cumsum()
    costs = load[None, :] - load[:, None]
    readers: dict[int, list[int]] = {}
    transfer: dict[int, float] = {}
    for edge in graph["edges"]:
        readers.setdefault(edge["sourceId"], []).append(place[edge["destId"]])
        transfer[edge["sourceId"]] = edge["cost"]
    starts, ends = np.ogrid[: count + 1, : count + 1]
    for number, places in readers.items():
        before = np.zeros(count + 1)
        for each in places:
            before[each + 1] += 1
        before = before.cumsum()
        inside = before[None, :] - before[:, None]
        own = (starts <= place[number]) & (place[number] < ends)
        costs += transfer[number] * np.where(own, inside < len(places), inside > 0)
    costs[(ends <= starts) | (size[None, :] - size[:, None] > graph["maxSizePerFPGA"])] = np.inf
    splits = best_split_points([costs] * DEVICES)
    return float(max(costs[start, end] for start, end in zip(splits, [*splits[1:], count], strict=True)))


def _places(graph: Mapping[str, Any], nodes: Mapping[int, Mapping[str, Any]]) -> dict[int, int]:
    """The place of each node's layer in the order: a layer whose inputs are there comes as soon as it can."""
    forward = {number for number, node in nodes.items() if not node["isBackwardNode"]}
    behind: dict[int, set[int]] = {node["colorClass"]: set() for node in nodes.values()}
    waits = dict.fromkeys(behind, 0)
    for edge in graph["edges"]:
        source, target = nodes[edge["sourceId"]]["colorClass"], nodes[edge["destId"]]["colorClass"]
        if {edge["sourceId"], edge["destId"]} <= forward and source != target and target not in behind[source]:
            behind[source].add(target)
            waits[target] += 1
    order = sorted(colour for colour, before in waits.items() if not before)
    for colour in order:
        for target in sorted(behind[colour]):
            waits[target] -= 1
            if not waits[target]:
                order.append(target)
    place = {colour: index for index, colour in enumerate(order)}
    return {number: place[node["colorClass"]] for number, node in nodes.items()}
