"""Cluster, Plan and Profile, by arguments and as files; arguments of the planner, the demo and the reports."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_hetpipe import Cluster, Device, Link, Node, Plan
from lightning_hetpipe.demo.data import Digits, SourceText
from lightning_hetpipe.demo.models import GPT, ResNet
from lightning_hetpipe.emulation import Emulation, Pad
from lightning_hetpipe.planning.allocation.allocator import Allocator
from lightning_hetpipe.planning.allocation.groupings import equal_distribution, hybrid_distribution
from lightning_hetpipe.planning.allocation.placed import placed
from lightning_hetpipe.planning.model.catalogue import gpus
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times
from lightning_hetpipe.planning.model.stage_memory import optimizer_state
from lightning_hetpipe.planning.plan import profile_file
from lightning_hetpipe.planning.plan.planned_worker import PlannedMember, PlannedSplit, PlannedStage, PlannedWorker
from lightning_hetpipe.planning.search.choice import best_plan
from lightning_hetpipe.planning.search.problem import PlanningProblem
from lightning_hetpipe.reporting.plots import draw
from lightning_hetpipe.reporting.timeline import Timeline
from lightning_hetpipe.rules.versions import POLICIES, Versions
from tests.golden.cases import Case, Place, case, given
from tests.reporting.test_timeline import EXAMPLE

GIB = 1 << 30
LAYERS = [LayerBytes("a", 4, 8, 2), LayerBytes("b", 0, 1, 1)]
TIMES = [Times(1.0, 2.0, 0.5), Times(3.0, 4.0)]
PROFILE = Profile("m", 4, LAYERS, {"own": TIMES}, {"own": 24 * GIB}, speeds={"own": 1e12}, calls=[(0, 2)])
T4 = Cluster([Node("box", ["T4"])])

FIRST = PlannedStage("box", "RTX-3090:0", 0, 1, 0.25, 1 * GIB, 24 * GIB)
SECOND = PlannedStage("box", "T4:1", 2, 2, 0.5, 2 * GIB, 16 * GIB)
GROUP = (PlannedMember("box", "RTX-3090:0", 3.0, GIB, 24 * GIB), PlannedMember("box", "T4:2", 1.0))
PLAN = Plan("m", 3, 3, 0, 0.5, 2.0, (PlannedWorker(2.0, (FIRST, SECOND)),), ("a", "b", "c"))


def made(make: Callable[[], object], setting: str, value: object, *way_out: str) -> Case:
    return case(lambda _: make(), setting, value, *way_out, name=f"{setting}={value}"[:80])


def device(setting: str, value: object, *way_out: str, **arguments: Any) -> Case:
    return made(lambda: Device(**{"name": "T4", **arguments}), setting, value, *way_out)


def node(setting: str, value: object, *way_out: str, devices: Any = ("T4",), link: Any = None) -> Case:
    return made(lambda: Node("n", devices, link=link), setting, value, *way_out)


NO_DEVICES: list[Any] = [[], "T4", 5, {}]
CLUSTER = [
    device("Device.name", "''", "name", "'RTX-3090'", name=""),
    device("Device.name", "3", "name", "'RTX-3090'", name=3),
    device("Device('T4').memory", "0", "positive", "whole number of bytes", "'24 GiB'", "None", memory=0),
    device("Device('T4').memory", "True", "positive", "whole number of bytes", "'24 GiB'", "None", memory=True),
    device("Device('T4').memory", "0.5", "did you mean '0.5 GiB'", memory=0.5),
    device("Device('T4').memory", "2500000000.5", "whole number", "'24 GiB'", memory=2.5e9 + 0.5),
    device("Device('T4').memory", "'24 gigs'", "GiB", "MB", memory="24 gigs"),
    device("Device('T4').memory", "'24 gib'", "did you mean 'GiB'?", memory="24 gib"),
    device("Device('T4').memory", "'much'", "number and a unit", "'24 GiB'", "'512 MB'", memory="much"),
    *[device("Device('T4').memory", repr(it), "number and a unit", "'24 GiB'", memory=it)
      for it in ("-3 GiB", "1e999999999 GiB")],
    device("Device('T4').memory", "'24 GB/s'", "GiB", "MB", memory="24 GB/s"),
    device("Device('T4').speed", "inf", "positive number", speed=math.inf),
    made(lambda: Link(0), "Link.bandwidth", "0", "positive number", "bytes per second", "'12 GB/s'"),
    made(lambda: Link("fast"), "Link.bandwidth", "'fast'", "number and a unit", "'12 GB/s'", "'200 Mbit/s'"),
    made(lambda: Link("10 Gbps"), "Link.bandwidth", "'10 Gbps'", "did you mean 'Gbit/s'?"),
    made(lambda: Link(1, -1), "Link.latency", "-1", "seconds", "at least 0", "'10 us'"),
    made(lambda: Link(1, "short"), "Link.latency", "'short'", "number and a unit", "'10 us'", "'0.5 ms'"),
    made(lambda: Node("", ["T4"]), "Node.name", "''", "'box'"),
    *[node("Node('n').devices", repr(it), "at least one Device", "name", devices=it) for it in NO_DEVICES],
    node("Node('n').devices[0]", "3", "Device", "'RTX-3090'", devices=[3]),
    node("Node('n').devices[0].memry", "", "did you mean Node('n').devices[0].memory?",
         devices=[{"name": "a", "memry": 1}]),
    node("Node('n').devices[0].many", "", "name, memory, speed", devices=[{"name": "a", "many": 1}]),
    node("Node('n').devices[0].name", "missing", "give", devices=[{"memory": 1 << 30}]),
    node("'0xT4'", "", "1 to 10000 devices", devices=["0xT4"]),
    node("'1000000000000xT4'", "", "1 to 10000 devices", devices=["1000000000000xT4"]),
    node("Node('n').link", "3", "Link", "'12 GB/s'", link=3),
    node("Node('n').link", "'fast'", "number and a unit", "'12 GB/s'", link="fast"),
    made(lambda: Cluster([]), "Cluster.nodes", "[]", "at least one Node"),
    made(lambda: Cluster(T4.nodes[0]), "Cluster.nodes", repr(T4.nodes[0]), "at least one Node"),  # type: ignore[arg-type]
    made(lambda: Cluster(["n"]), "Cluster.nodes[0]", "'n'", "lightning_hetpipe.Node"),  # type: ignore[list-item]
    made(lambda: Cluster([Node("n", ["a"])] * 2), "Cluster", "'n'", "name of its own"),
    made(lambda: Cluster([Node("n", ["a"])], {"bandwith": 1}), "Cluster.link.bandwith", "",  # type: ignore[arg-type]
         "did you mean Cluster.link.bandwidth?"),
    made(lambda: Cluster([Node("n", ["a"])] * 1).over(Cluster([Node("a", ["x"]), Node("b", ["x"])])),
         "cluster", "1 node", "2", "declare"),
    made(lambda: T4.over(Cluster([Node("here", ["RTX-3090", "T4"])])), "node 'box'", "1 device", "2", "RTX-3090, T4",
         "declare"),
    made(lambda: T4.over(Cluster([Node("here", ["RTX-3090"])])), "node 'box'", "'T4'", "'RTX-3090'", "in the order"),
    made(lambda: gpus()["T4"].speed("8"), "precision", "'8'", "32", "32-highest", "16"),
]  # fmt: skip


def with_stage(number: int, **changes: Any) -> Plan:
    (worker,) = PLAN.virtual_workers
    stages = [replace(stage, **changes) if n == number else stage for n, stage in enumerate(worker.stages)]
    return replace(PLAN, virtual_workers=(replace(worker, stages=tuple(stages)),))


def faulty(key: str, value: str, *way_out: str, plan: Plan, cluster: Cluster | None = None) -> Case:
    return case(lambda _: plan.check(cluster), key, value, *way_out, "plan anew", name=f"plan {key} {value}")


def stage(key: str, value: str, *way_out: str, number: int = 0, **changes: Any) -> Case:
    return faulty(f"virtual_workers[0].stages[{number}]{key}", value, *way_out, plan=with_stage(number, **changes))


def group(key: str, value: str, *way_out: str, **changes: Any) -> Case:
    return stage(key, value, *way_out, **{"group": GROUP, **changes})


def there(key: str, value: str, *way_out: str, cluster: Cluster) -> Case:
    return faulty(f"virtual_workers[0].{key}", value, *way_out, plan=PLAN, cluster=cluster)


FAULTS = [
    made(lambda: replace(PLAN, weights="stale"), "Plan.weights", "'stale'", *POLICIES),
    made(lambda: replace(PLAN, placement="near"), "Plan.placement", "'near'", "size", "round_robin", "local"),
    made(lambda: replace(PLAN, virtual_workers=()), "Plan.virtual_workers", "()", "at least one"),
    made(lambda: PlannedWorker(2.0, ()), "PlannedWorker.stages", "()", "at least one stage"),
    made(lambda: replace(SECOND, device="T4"), "PlannedStage.device", "'T4'", "name and a number", "'RTX-3090:0'"),
    made(lambda: replace(GROUP[1], device="T4"), "PlannedMember.device", "'T4'", "name and a number", "'RTX-3090:0'"),
    made(lambda: replace(GROUP[1], share=math.nan), "PlannedMember.share", "nan", "0 or more", "finite"),
    faulty(
        "virtual_workers[1].stages[0].device",
        "'RTX-3090:0'",
        "virtual worker 0",
        "only last stages",
        plan=replace(PLAN, virtual_workers=PLAN.virtual_workers * 2),
    ),
    faulty(
        "virtual_workers[0].stages[1].last_layer",
        "2",
        "3",
        plan=replace(PLAN, layers=("a", "b", "c", "d")),
    ),
    stage(".first_layer", "1", "0", first_layer=1),
    stage(".last_layer", "3", "from 2 to 2", number=1, last_layer=3),
    stage(".memory_bytes", "25.0 GiB", "1.0 GiB more", "RTX-3090:0", memory_bytes=25 * GIB),
    stage(
        ".memory_bytes",
        "25.0 GiB",
        "1.0 GiB more",
        "RTX-3090:0",
        number=1,
        device="RTX-3090:0",
        memory_bytes=24 * GIB,
        memory_limit_bytes=24 * GIB,
    ),
    stage(".splits", "no group", "give it one", "leave splits out", splits=(PlannedSplit("net.0", (1, 1)),)),
    group(".group", "one member", "leave it out", group=GROUP[:1]),
    group(".device", "'RTX-3090:0'", "must be in the group", group=(replace(GROUP[1], device="T4:3"), GROUP[1])),
    group(".group", "no share above 0", "at least one", group=tuple(replace(each, share=0.0) for each in GROUP)),
    group(".group[2].device", "'T4:2'", "in the group already", group=(*GROUP, GROUP[1])),
    group(".group[1].node", "'other'", "one machine", "'box'", group=(GROUP[0], replace(GROUP[1], node="other"))),
    group(".splits[0].counts", "3", "'net.0'", "2 members", splits=(PlannedSplit("net.0", (1, 2, 3)),)),
    group(".splits[0].counts", "nobody", "'net.0'", splits=(PlannedSplit("net.0", (0, 0)),)),
    group(".splits[1].layer", "'net.0'", "already", splits=(PlannedSplit("net.0", (1, 1)),) * 2),
    there("stages[0].node", "'box'", "bax", cluster=Cluster([Node("bax", ["RTX-3090", "T4"])])),
    there("stages[1].device", "'T4:1'", "box has 1", "from 0 on", cluster=Cluster([Node("box", ["RTX-3090"])])),
    there("stages[0].device", "'RTX-3090:0'", "box has a T4", cluster=Cluster([Node("box", ["T4", "T4"])])),
    there(
        "stages[0].memory_bytes",
        "1.0 GiB",
        "512.0 MiB more",
        cluster=Cluster([Node("box", [Device("RTX-3090", "512 MiB"), "T4"])]),
    ),
]

Change = Callable[[Any], object]


def document(
    write: Callable[[Path], object], load: Callable[[Path], object], change: Change, key: str, value: str, *way: str
) -> Case:
    """Case of a file of ours that somebody has changed."""

    def run(_: Place) -> None:
        path = Path("it.json")
        write(path)
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))
        load(path)

    return case(run, key, value, "it.json", *way, name=f"file {key} {value} {way}"[:80])


def plan_file(change: Change, key: str, value: str, *way: str) -> Case:
    return document(PLAN.save, Plan.load, change, key, value, *way)


def profile_of(change: Change, key: str, value: str, *way: str) -> Case:
    return document(lambda path: profile_file.save(PROFILE, path), profile_file.load, change, key, value, *way)


WIDTH = {"part": 0.5, "forward_s": 1.0, "backward_s": 1.0}
WIDTHS = {"layer": 0, "run": 0, "units": {"a": 4}, "sums": False, "devices": {"own": [WIDTH]}}


def width(key: str, value: str, *way: str, **changes: Any) -> Case:
    return profile_of(
        lambda it: it.update(widths=[{**WIDTHS, **changes}]), "widths of layer", value, *way, "profile anew"
    )


def at(path: str, value: Any) -> Change:
    """Set the value at ``path``, such as "layers.0.name"; without one, take it out."""

    def change(content: Any) -> None:
        *before, last = (int(part) if part.isdecimal() else part for part in path.split("."))
        for part in before:
            content = content[part]
        if value is None:
            del content[last]
        else:
            content[last] = value

    return change


OTHER_VERSION = ("1", "make it anew")

FILES = [
    plan_file(at("schema_version", 2), "schema_version", "2", *OTHER_VERSION),
    plan_file(at("in_flight", None), "in_flight", "missing", "give"),
    plan_file(at("in_flight", 0), "in_flight", "0", "whole number", "at least 1"),
    plan_file(at("in_flght", 0), "in_flght", "", "did you mean in_flight?"),
    plan_file(at("weights", "stale"), "weights", '"stale"', *POLICIES),
    plan_file(at("virtual_workers", []), "virtual_workers", "[]", "at least one virtual worker"),
    plan_file(
        at("virtual_workers.0.stages.1.time_s", "fast"),
        "virtual_workers[0].stages[1].time_s",
        '"fast"',
        "number",
        "at least 0",
    ),
    plan_file(at("virtual_workers.0.stages", 3), "virtual_workers[0].stages", "3", "list of at least one stage"),
    plan_file(at("virtual_workers.0", 3), "virtual_workers[0]", "3", "mapping", "stages"),
    plan_file(
        at("virtual_workers.0.stages.0.device", "T4"), "virtual_workers[0].stages[0].device", '"T4"', "'RTX-3090:0'"
    ),
    plan_file(at("recompute", 1), "recompute", "1", "true or false"),
    plan_file(at("layers.0", 3), "layers[0]", "3", "text"),
    profile_of(at("schema_version", 2), "schema_version", "2", *OTHER_VERSION),
    profile_of(at("schema_version", None), "schema_version", "missing"),
    profile_of(at("sample", 2), "sample", "", "did you mean samples?"),
    profile_of(at("samples", 0), "samples", "0", "at least 1"),
    profile_of(at("samples", True), "samples", "true", "at least 1"),
    profile_of(at("devices.own.layers.1", None), "the profile of m", "1 times", "'own'", "2 layers"),
    profile_of(at("devices.own.layers.1.forward_s", None), "devices['own'].layers[1].forward_s", "missing", "give"),
    profile_of(at("devices.own.layers.1.forward_s", -1), "devices['own'].layers[1].forward_s", "-1", "at least 0"),
    profile_of(at("devices.own.memory_bytes", 24), "devices['own'].memory_bytes", "24", "bytes", "1 MiB or more"),
    profile_of(at("devices.own.flop_per_s", 0), "devices['own'].flop_per_s", "0", "positive"),
    profile_of(at("devices", {}), "devices", "{}", "at least one device"),
    profile_of(at("layers", []), "layers", "[]", "at least one layer"),
    profile_of(at("layers.0.name", 3), "layers[0].name", "3", "text"),
    profile_of(at("layers.0.kept_bytes", 1.5), "layers[0].kept_bytes", "1.5", "whole number", "at least 0"),
    profile_of(at("layers.0.frozen_bytes", 5), "frozen_bytes", "5", "'a'", "parameter_bytes=4", "profile anew"),
    profile_of(at("layers.0.changes_buffers", 1), "layers[0].changes_buffers", "1", "true or false"),
    profile_of(at("calls.0", [0]), "calls[0]", "[0]", "two", "the first one", "behind the last"),
    profile_of(at("estimated", {"a": 1}), "estimated['a']", "1", "text"),
    profile_of(at("user_code", {"many": 1}), "user_code.many", "", "trained_bytes", "loss_bytes"),
    width("layer", "2", "2 layers", layer=2),
    width("run", "3", "2 layers", run=3),
    profile_of(lambda it: it.update(widths=[{**WIDTHS, "units": {"a": 0}}]), "widths[0].units['a']", "0", "at least 1"),
    profile_of(
        lambda it: it.update(widths=[{**WIDTHS, "devices": {"own": [{**WIDTH, "part": 2}]}}]),
        "widths[0].devices['own'][0].part",
        "2",
        "more than 0",
        "at most 1",
    ),
]

PROFILES = [
    made(lambda: Profile("m", 1, LAYERS, {"own": TIMES[:1]}, {}), "'own'", "1 times", "2 layers", "one for each"),
    made(
        lambda: Profile("m", 1, LAYERS, {"own": TIMES}, {}, calls=[(0, 1), (0, 1)]),
        "the profile of m",
        "(0, 1)",
        "2 layers",
        "each once",
    ),
    made(lambda: replace(PROFILE, times={"own": TIMES, "b": TIMES}).times_on(Device("owl")),
         "'owl'", "", "b, own", "did you mean 'own'"),
    made(lambda: replace(PROFILE, times={"own": TIMES, "b": TIMES}).times_on(Device("abacus")),
         "'abacus'", "", "b, own", "profile the model on it", "name another device"),
    made(lambda: PROFILE.joined(replace(PROFILE, samples=2)), "profiles of m", "", "profile anew"),
    made(lambda: optimizer_state("sgdm"), "optimizer", "'sgdm'", "sgd_momentum", "adamw", "_weight_decay",
         "bytes of state"),
    made(lambda: optimizer_state(-1), "optimizer", "-1", "bytes of state"),
]  # fmt: skip


def nodes(*counts: int) -> Cluster:
    return Cluster([Node(f"n{number}", [f"{count}xT4"]) for number, count in enumerate(counts)])


def one(_: object) -> float:
    return 1.0


PLANNING = [
    made(lambda: equal_distribution(nodes(4, 2), one), "allocation", "'ed'", "'n0' has 4", "'n1' has 2", "'np'",
            "'auto'"),
    made(lambda: hybrid_distribution(nodes(2, 2, 2), one), "allocation", "'hd'", "3", "'np'", "'auto'"),
    made(lambda: hybrid_distribution(nodes(2, 3), one), "allocation", "'hd'", "'n1' has 3", "'np'", "'auto'", "even"),
    made(
        lambda: placed(Allocator(PlanningProblem(replace(PROFILE, times={"T4": TIMES}), nodes(2))), shares=False),
        "allocation", "'placed'", "1 node", "'np'", "'auto'", "declare more nodes", "fewer stages",
    ),
    made(
        lambda: best_plan(PlanningProblem(replace(PROFILE, times={"T4": TIMES}), nodes(3), stages=4)),
        "stages", "4", "3 devices", "2 layers", "at most 2",
    ),
    made(
        lambda: Versions(POLICIES["2bw"], 4, 2).check(),
        "weights", "'2bw'", "accumulate_grad_batches=4", "in_flight=2", "weights='stash'",
    ),
    made(
        lambda: Versions(POLICIES["2bw"], 4, 4).check(wave=6),
        "WSPCallback(wave", "6", "shares", "accumulate_grad_batches=4", "leave it out",
    ),
]  # fmt: skip


def idle_pad() -> None:
    emulation = Emulation([Pad(0.0, 0.0)] * 2, lambda: 0.0, lambda _: None)
    emulation(0, "forward", 1)()
    emulation.check()


def without_matplotlib(place: Place) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        place.patch.delitem(sys.modules, name)
    place.patch.setitem(sys.modules, "matplotlib", None)
    draw(EXAMPLE)


def without_scikit_learn(place: Place) -> None:
    place.patch.setitem(sys.modules, "sklearn.datasets", None)
    Digits().setup("fit")


EMPTY = Timeline((), 2, 2)
OTHERS = [
    made(lambda: Pad(0.0, -1.0), "Pad.backward", "-1.0", "number of seconds", "0 or more"),
    made(lambda: Pad(math.nan, 1.0), "Pad.forward", "nan", "number of seconds", "0 or more"),
    made(lambda: Emulation([Pad(0, 0)])(1, "forward", 1), "stage 1", "1 stages", "give each a Pad"),
    made(idle_pad, "stage 1", "2 stages", "leave its Pad out"),
    made(lambda: EXAMPLE.between(50, 60), "between(50, 60)", "", "it has minibatches"),
    made(lambda: EMPTY.between(0, 1), "between(0, 1)", "", "it is empty"),
    made(lambda: draw(EMPTY), "timeline", "empty", "record some minibatches"),
    case(without_matplotlib, "matplotlib", "", 'pip install "lightning-hetpipe[plot]"', name="without matplotlib"),
    case(without_scikit_learn, "scikit-learn", "", 'pip install "lightning-hetpipe[examples]"', name="without sklearn"),
    given(ResNet, "lr", -1.0, "at least 0"),
    given(ResNet, "blocks", 0, "at least 1"),
    given(ResNet, "weight_decay", math.nan, "at least 0"),
    given(GPT, "heads", 5, "width=96", "multiple"),
    given(GPT, "dropout", 1.5, "at least 0", "at most 1"),
    made(lambda: GPT(betas=(0.5, 1.0)), "betas[1]", "1.0", "at least 0", "at most 0.9999999"),
    given(Digits, "val_share", 2.0, "at least 0.01", "at most 0.98"),
    made(lambda: Digits(val_share=0.5, test_share=0.6), "val_share + test_share", "1.1", "at most"),
    given(SourceText, "val_share", 0.5, "at least 0.001", "at most 0.45"),
    made(lambda: SourceText(folder=".").setup("fit"), "folder", "0 bytes", "data.folder", "data.context"),
]

CASES = [*CLUSTER, *FAULTS, *FILES, *PROFILES, *PLANNING, *OTHERS]
