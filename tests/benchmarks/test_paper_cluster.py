"""The benchmark of the paper's cluster: layers are counted, all-reduce is modelled, and ratios are to the paper's."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks import paper_models
from benchmarks.all_reduce import AllReduce, all_reduce, ring_seconds, slowest_link, step_seconds
from benchmarks.paper_cluster import GROWING, PAPER, Found, Grown, Reported, paper_cluster, rate, report
from benchmarks.paper_models import BATCH, MODELS, counted, profile
from lightning_hetpipe.cli.cluster_plans import Compared
from lightning_hetpipe.planning.allocation.allocator import Allocator
from lightning_hetpipe.planning.allocation.groupings import equal_distribution
from lightning_hetpipe.planning.model.catalogue import gpus
from lightning_hetpipe.planning.model.cluster import Cluster, Link, Node
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times
from lightning_hetpipe.planning.search.problem import PlanningProblem

MACHINE = {"cpu": "a cpu", "cores_used": "CPUs 0 and 1", "load_average": 0.0, "torch": "2", "lightning": "2"}


@pytest.mark.parametrize(
    ("model", "parameters", "layers"), [("VGG-19", 143_667_240, 19), ("ResNet-152", 60_192_808, 52)]
)
def test_models_have_the_published_parameters(model: str, parameters: int, layers: int) -> None:
    with torch.device("meta"):
        made = MODELS[model]()
        output: Tensor = made(torch.empty(2, 3, 224, 224))
    assert sum(each.numel() for each in made.parameters()) == parameters
    assert len(made) == layers
    assert output.shape == (2, 1000)


@pytest.mark.parametrize(
    ("model", "multiplications"), [("VGG-19", 19.63e9), pytest.param("ResNet-152", 11.51e9, marks=pytest.mark.slow)]
)
def test_work_is_counted(model: str, multiplications: float) -> None:
    """A multiplication with its addition is two FLOP, a backward twice a forward but for the gradient of the images."""
    first, *others = counted(model)
    assert sum(each.forward for each in (first, *others)) / BATCH == pytest.approx(2 * multiplications, rel=1e-3)
    assert first.backward == first.forward
    assert all(each.backward == 2 * each.forward for each in others)


def test_a_layers_bytes_are_those_that_autograd_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """In-place ReLUs overwrite their inputs, and weights do not count."""

    def small() -> nn.Sequential:
        first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True))
        return nn.Sequential(first, nn.Sequential(nn.Flatten(), nn.Linear(4 * 224 * 224, 2)))

    monkeypatch.setitem(paper_models.MODELS, "small", small)
    first, second = counted("small")
    images, maps = BATCH * 3 * 224 * 224 * 4, BATCH * 4 * 224 * 224 * 4
    assert first.layer == LayerBytes("0", 4 * (3 * 4 * 9 + 4), images + maps, maps, images)
    assert second.layer.kept == maps + BATCH * 2 * 4
    assert first.moved > images + 4 * maps, "both of convolution and ReLU, forward and backward"


def test_times_follow_from_data_sheets() -> None:
    found = profile("VGG-19", ["Titan-V"])
    layers, times = counted("VGG-19"), found.times["Titan-V"]
    assert times[1].forward == pytest.approx(layers[1].forward / gpus()["Titan-V"].speed("32"))
    assert times[1].backward == pytest.approx(layers[1].backward / gpus()["Titan-V"].speed("32"))
    assert times[1].update == pytest.approx(5 * layers[1].layer.parameters / gpus()["Titan-V"].bandwidth)


LINK = Link(1e3)


def test_a_ring_sends_each_part_twice_round() -> None:
    assert ring_seconds(4000, LINK, 4) == pytest.approx(2 * 3 / 4 * 4)
    assert ring_seconds(4000, Link(1e3, latency=0.1), 4) == pytest.approx(6 + 6 * 0.1)
    assert ring_seconds(4000, LINK, 1) == 0


def test_gradients_are_summed_while_the_backward_goes_on() -> None:
    """Two devices, so that 1,000 bytes take a second. Backwards end at 4 (last layer), 6 and 8 s."""
    times = [Times(1 / 3, 2.0, 0.5)] * 3
    at = 1 + 3 * 2.0
    assert step_seconds(times, [0, 0, 0], LINK, 2) == pytest.approx(at + 1.5)
    assert step_seconds(times, [500, 1000, 2000], LINK, 2) == pytest.approx(at + 0.5 + 1.5), "the first layer's, last"
    # The last layer's gradient takes from 3 to 8 s: those of both others wait, and go together.
    assert step_seconds(times, [500, 1000, 5000], LINK, 2) == pytest.approx(8 + 1.5 + 1.5)
    slow = Link(1e3, latency=1.0)
    assert step_seconds(times, [500, 1000, 5000], slow, 2) == pytest.approx(3 + 2 + 5 + 2 + 1.5 + 1.5), "as one message"


def test_the_slowest_link_and_the_slowest_device_count() -> None:
    nodes = [Node("a", ["2xTitan-V"], "3 GB/s"), Node("b", ["T4"], "1 GB/s")]
    both = Cluster(nodes, "2 GB/s")
    assert slowest_link(both).bandwidth == 2e9, "no node's own link, where that has one device"
    assert slowest_link(Cluster(nodes[:1])).bandwidth == 3e9
    layers = [LayerBytes("one", 4, 8 << 30, 4)]
    found = Profile("model", 1, layers, {"Titan-V": [Times(1.0, 2.0)], "T4": [Times(2.0, 3.0)]}, {})
    summed = all_reduce(found, both.with_memory({"T4": 4 << 30}), "sgd")
    assert summed.rate == pytest.approx(3 / 5.0)
    assert [*summed.lacking] == ["Titan-V", "T4"]
    assert summed.lacking["T4"] > 4 << 30
    roomy = all_reduce(replace(found, layers=[LayerBytes("one", 4, 8, 4)]), both.with_memory({}), "sgd")
    assert not roomy.lacking


def planned() -> Found:
    """Plans of a model of two layers."""
    cluster = paper_cluster()
    names = [slot.device.name for slot in cluster.slots]
    layers = [LayerBytes(str(n), 4 << 20, 8 << 20, 1 << 20) for n in range(4)]
    own = Profile("small", BATCH, layers, {name: [Times(0.01, 0.02)] * 4 for name in names}, {})
    allocator = Allocator(PlanningProblem(own, cluster, optimizer=1.0))
    ed = allocator.allocate("ed", equal_distribution(cluster, allocator.speed), shares=False, placement="local")
    fits = Grown(AllReduce(16 / 0.2, {}), ed, ed)
    grown = {name: replace(fits, data_parallel=AllReduce(1.0, {"RTX-2060": 3 << 30})) for name in GROWING}
    grown["4[V]"] = fits
    refused = Compared("hd", "size", False, None, "an odd number")
    return Found(dict.fromkeys(names, 8.0), [refused, Compared("ed", "local", True, ed)], grown, 3.0)


def test_the_report_compares_with_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAPER, "VGG-19", Reported((1280.0, 1.0, 1.0, None), (1e4, 1e4, 1e4, 1e4)))
    found = planned()
    outcome = report(MACHINE, {"VGG-19": found})
    images = rate(found.grown["4[V]"].local)
    assert images is not None
    cells = {figure.name: figure.cells()[0] for figure in outcome.figures}
    assert cells["VGG-19, ED local, with shares"] == f"{images:.0f}"
    assert cells["VGG-19, HD, without shares"] == "?"
    assert cells["VGG-19 on 4[V], all-reduce over the paper's Horovod, planned"] == "2.00"
    assert cells["VGG-19 on 16[VRQG], ED local over the paper's HetPipe, planned"] == f"{images / 1e4:.2f}"
    assert "VGG-19 on 8[VR], all-reduce over the paper's Horovod, planned" not in cells, "it does not fit"
    rows = [line.split() for line in outcome.text.splitlines()]
    assert next(row for row in rows if row[:1] == ["8[VR]"])[1:5] == ["does", "not", "fit", "1"]
    assert "all-reduce needs the whole model on RTX-2060, which lacks 3.0 GiB" in outcome.text
    assert "not possible" in outcome.text
    assert f"{images / (16 * 8 * BATCH):.2f}" in outcome.text


def test_nodes_are_added_from_the_strongest_to_those_of_the_whole_cluster() -> None:
    parts = [paper_cluster().of_nodes(nodes) for nodes in GROWING.values()]
    assert [len(part.slots) for part in parts] == [4, 8, 12, 16]
    for model in MODELS:
        assert len(PAPER[model].horovod) == len(PAPER[model].hetpipe) == len(GROWING)
