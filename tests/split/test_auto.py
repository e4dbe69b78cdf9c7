"""Groups that the search chooses: which layers can be divided, times of their parts, and fits with ``split="auto"``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetpipe import Cluster, Device, HetPipeStrategy, Node
from lightning_hetpipe.capture.measured_widths import measured_parts
from lightning_hetpipe.pipeline.split.joined_graph import joined_graph
from lightning_hetpipe.pipeline.split.rewriting import divided_layers
from lightning_hetpipe.placement import measuring
from lightning_hetpipe.planning.model.profile import LayerBytes, LayerWidths, Profile, Times, Width
from tests.exact.pipelines import Pinned
from tests.exact.running import fit
from tests.oracle import Batch, Outputs
from tests.split.dividing import Whole
from tests.split.longest_layer import with_longest
from tests.split.nets import NETS, Bert, pixels
from tests.split.test_fits import colours, image_task, words_task
from tests.support.models import SGD, Learner, sentences

Run = tuple[int, dict[str, int], bool]

LAYERS: dict[str, dict[str, Run]] = {
    "vgg": {
        "net.0": (0, {"net.0": 8}, False),
        "net.1": (0, {}, False),
        "net.3": (0, {}, False),
        "net.4": (3, {"net.4": 12}, False),
        "net.6": (3, {}, False),
        "net.7": (3, {}, False),
        "net.8": (3, {}, True),
        "net.11": (8, {"net.11": 5}, False),
    },
    "bert": {
        "net.q": (0, {"net.q": 4}, False),
        "net.k": (0, {"net.k": 4}, False),
        "net.v": (0, {"net.v": 4}, False),
        "net.out": (0, {}, True),
        "net.first": (5, {"net.first": 16}, False),
        "net.second": (5, {}, True),
    },
    "gpt": {
        "net.words": (0, {"net.head": 8}, False),  # of both ends of it
        "net.places": (0, {"net.places": 8}, False),
        "net.blocks.0": (2, {"net.blocks.0.qkv": 4, "net.blocks.0.mlp.0": 32}, True),
        "net.blocks.1": (3, {"net.blocks.1.qkv": 4, "net.blocks.1.mlp.0": 32}, True),
        "net.head": (5, {"net.head": 13}, False),
    },
    "encoder": {
        "net.self_attn": (0, {"net.self_attn.in_proj_weight": 4}, True),
        "net.linear1": (2, {"net.linear1": 16}, False),
        "net.linear2": (2, {}, True),
    },
}


@pytest.mark.parametrize("net", LAYERS)
def test_layers_that_have_the_same_counts_are_one_run(net: str) -> None:
    make, given, _ = NETS[net]
    layers = Whole(make(), given()).captured.layers
    found = divided_layers(joined_graph(layers, 0))
    assert {layers[n].name: (own.run, dict(own.units), own.sums) for n, own in found.items()} == LAYERS[net]


BOX = Cluster([Node("box", [Device("gpu", speed=speed) for speed in (1.0, 4.0, 2.0)], "100 GB/s")])


@pytest.mark.parametrize(
    ("units", "step", "parts"), [(1, 1, 1), (12, 1, 12), (16, 1, 16), (17, 2, 9), (112, 8, 14), (256, 16, 16)]
)
def test_measured_parts_are_multiples_of_a_power_of_two(units: int, step: int, parts: int) -> None:
    found = measured_parts(units)
    assert len(found) == parts
    assert found[-1] == 1.0
    assert [part * units for part in found[:-1]] == pytest.approx([step * number for number in range(1, parts)])


LONG = ("net.4", "net.q", "net.head")
"""The second convolution, what attention follows, and the layer that has its weight from the first one."""


@pytest.fixture
def profiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Profile]:
    """The profiles of fits in which one layer takes most of the time."""
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))
    found: list[Profile] = []
    monkeypatch.setattr(measuring, "profiled", with_longest(measuring.profiled, LONG, found.append))
    return found


def test_a_fit_divides_the_layer_that_no_cut_balances(profiles: list[Profile]) -> None:
    loader = colours(12, 4)
    strategy = HetPipeStrategy(cluster=BOX, split="auto", in_flight=1, weights="stash")
    together = fit(image_task(), loader, strategy=strategy, precision="64-true")
    unsplit = Pinned((0, 2), 1)  # a pipeline, too, whose dropouts draw from the minibatch's generators
    alone = fit(image_task(), loader, strategy=unsplit, precision="64-true")
    (stage,) = strategy.last_run.stages
    assert "+" in str(stage.device)
    for one, other in zip(together.states, alone.states, strict=True):
        for key, weight in one.weights.items():
            torch.testing.assert_close(other.weights[key], weight, rtol=1e-9, atol=1e-9)
    (profile,) = profiles
    wide = profile.widths[[layer.name for layer in profile.layers].index("net.4")]
    assert [width.part for width in wide.measured["cpu"]] == measured_parts(12)
    assert all(width.forward > 0 < width.backward for width in wide.measured["cpu"])


class Copies(Learner):
    """Is to give what it is given."""

    def __init__(self) -> None:
        super().__init__(SGD)
        self.net = Bert()

    def compute(self, batch: Batch) -> Outputs:
        return {"loss": (self.net(batch[0]) - batch[0]).square().mean()}


def copied() -> DataLoader[Any]:
    return DataLoader(TensorDataset(pixels(10, 5, 8), torch.zeros(10)), 4)


@pytest.mark.parametrize(
    ("make", "load", "layers"),
    [
        (Copies, copied, ["net.q"]),  # without the attention, whose heads it is divided by
        (words_task, lambda: sentences(12, 4), ["net.head"]),
    ],
)
def test_a_divided_layer_in_a_stage_of_its_own(
    profiles: list[Profile], make: Any, load: Any, layers: list[str]
) -> None:
    strategy = HetPipeStrategy(cluster=BOX, split="auto", in_flight=3, stages=2)
    fit(make(), load(), strategy=strategy)
    assert {str(stage.device): stage.layers for stage in strategy.last_run.stages}["cpu + cpu"] == layers


def test_nothing_is_divided_where_that_does_not_pay(monkeypatch: pytest.MonkeyPatch, profiles: list[Profile]) -> None:
    slow = Cluster([Node("box", BOX.nodes[0].devices, "1 kB/s")])
    strategy = HetPipeStrategy(cluster=slow, split="auto", in_flight=2)
    fit(image_task(), colours(8, 4), strategy=strategy)
    assert all("+" not in str(stage.device) for stage in strategy.last_run.stages)


def test_without_split_no_part_is_measured(profiles: list[Profile]) -> None:
    fit(image_task(), colours(8, 4), strategy=HetPipeStrategy(cluster=BOX, in_flight=2))
    assert [profile.widths for profile in profiles] == [{}]


def test_widths_of_several_devices_are_joined() -> None:
    own = {name: (Width(1.0, seconds, seconds),) for name, seconds in (("a", 1.0), ("b", 2.0))}
    layer = LayerBytes("net.0", 1, 1, 1)
    one, other = (
        Profile(
            "net",
            1,
            [layer],
            {name: [Times(*own[name][0][1:])]},
            {},
            widths={0: LayerWidths(0, {"net.0": 4}, False, {name: own[name]})},
        )
        for name in own
    )
    assert one.joined(other).widths == {0: LayerWidths(0, {"net.0": 4}, measured=own)}
