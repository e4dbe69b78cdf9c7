"""Settings of HetPipeStrategy and WSPCallback, each with values of the wrong type, size and name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from lightning_hetpipe import Cluster, Device, HetPipeStrategy, Node, Plan, WSPCallback
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.plan.planned_worker import PlannedWorker
from lightning_hetpipe.strategy import planned_devices, relations
from tests.golden.cases import Case, Place, case, given
from tests.golden.training import fit
from tests.placement.test_plans import planned
from tests.support.small import Learner

POLICIES = ("auto", "stash", "sync", "2bw", "spectrain", "xpipe", "pipeoptim")
YEAR_OF_SECONDS = ("positive", "a year")
TIME = ("datetime.timedelta", "number of seconds")
BOX = Cluster([Node("box", [Device("d")])])
SPREAD = replace(planned(0, 1), spread=True)
PAIR = ("(1, 3)",)


def strategy(setting: str, value: object, *way_out: str, **others: Any) -> Case:
    return given(HetPipeStrategy, setting, value, *way_out, **others)


def of_strategy(shown: str, value: object, *way_out: str, **arguments: Any) -> Case:
    """Case whose sentence shows setting or value otherwise than they were given."""
    name = f"HetPipeStrategy({', '.join(f'{name}={each!r}' for name, each in arguments.items())})"[:90]
    return case(lambda _: HetPipeStrategy(**arguments), shown, value, *way_out, name=name)


def wsp(setting: str, value: object, *way_out: str, **others: Any) -> Case:
    return given(WSPCallback, setting, value, *way_out, **others)


def of_wsp(shown: str, value: object, *way_out: str, **arguments: Any) -> Case:
    name = f"WSPCallback({', '.join(f'{name}={each!r}' for name, each in arguments.items())})"[:90]
    return case(lambda _: WSPCallback(**arguments), shown, value, *way_out, name=name)


def compiled(shown: str, value: object, *way_out: str, **options: Any) -> Case:
    """Case of what only torch can say of ``compile``: when a fit begins, before anything runs."""
    shows = value if isinstance(value, str) else repr(value)
    name = f"compile({options})"[:90]
    return fit(Learner, shown, shows, *way_out, error=SettingError, name=name,
               strategy=lambda: HetPipeStrategy(stages=2, compile=options))  # fmt: skip


def no_compiler(place: Place) -> None:
    place.patch.setattr(planned_devices, "cpp_compiler_error", lambda: "No working C++ compiler found")
    planned_devices.check_compile({}, [torch.device("cpu")])


def of_plan(name: str, plan: Plan, setting: str, value: object, *way_out: str, **arguments: Any) -> Case:
    return case(lambda _: HetPipeStrategy(plan=plan, **arguments), setting, value, *way_out, name=f"plan {name}")


def from_file(text: str | None, setting: str, value: str, *way_out: str) -> Case:
    def run(place: Place) -> None:
        if text is not None:
            Path("plan.json").write_text(text)
        HetPipeStrategy(plan="plan.json")

    return case(run, setting, value, *way_out, name=f"plan=plan.json {text if text is None else text[:20]!r}")


def unrunnable_file(place: Place) -> None:
    plan = planned(0, 2)
    (worker,) = plan.virtual_workers
    first, second = worker.stages
    gap = replace(worker, stages=(first, replace(second, first_layer=3)))
    replace(plan, virtual_workers=(gap,)).save(Path("plan.json"))
    HetPipeStrategy(plan="plan.json")


def on_nodes(*nodes: tuple[str, str], spread: bool = False) -> Plan:
    """Plan with a virtual worker for each pair of nodes, on which its two stages are."""
    plan = planned(0, 3)
    first, second = plan.virtual_workers[0].stages
    workers = [PlannedWorker(10.0, (replace(first, node=one), replace(second, node=other))) for one, other in nodes]
    return replace(plan, virtual_workers=tuple(workers), spread=spread)


def as_planned(name: str, plan: Plan, setting: str, value: object, *way_out: str, **others: Any) -> Case:
    """Case of the virtual workers that a plan says."""
    arguments: dict[str, Any] = {"virtual_workers": 1, "emulated": False, "hosts": None, "nodes": 1, **others}
    return case(
        lambda _: relations.workers_as_planned(plan=plan, **arguments), setting, value, *way_out, name=f"plan {name}"
    )


def hosts(setting: str, value: object, *way_out: str, **arguments: Any) -> Case:
    return case(
        lambda _: HetPipeStrategy(**arguments), setting, value, *way_out, name=f"stage_hosts {str(arguments)[:60]}"
    )


HOSTS: Mapping[str, str] = {"attic": "10.0.0.2:7071"}
EVERY_POLICY = tuple(map(repr, POLICIES))

NO_SPLIT: list[Any] = ["even", 1, {}]
NO_SHARES: list[Any] = ["fair", [], 4]
NO_SERVERS: list[Any] = ["10.0.0.1:5", [], 7000]
COUNTS = [
    strategy(setting, value, "at least 1", "'auto'")
    for setting in ("stages", "in_flight")
    for value in (0, -1, 1.5, True, False, "many", None)
]

STRATEGY = [
    of_strategy("split", "stage 5", "2 stages, from 0 on", "set stages", stages=2, split={0: [2, 1], 5: [1, 1]}),
    of_strategy("in_fligt", "is not a setting", "HetPipeStrategy.in_flight", in_fligt=3),
    of_wsp("clock_dist", "is not a setting", "WSPCallback.clock_distance", clock_dist=1),
    of_wsp("xyz", "is not a setting", "clock_distance, wave", xyz=1),
    *COUNTS,
    strategy("stages", 100_000, "at most 1000"),
    strategy("in_flight", 100_000, "at most 1000"),
    strategy("stages", [2, 3, 4], "virtual_workers=2", "one for each", "one number for all", virtual_workers=2),
    strategy("stages", [], "virtual_workers=2", "one for each", virtual_workers=2),
    of_strategy("stages[1]", 0, "at least 1", "'auto'", stages=[2, 0], virtual_workers=2),
    *[strategy("timeout", value, *YEAR_OF_SECONDS) for value in (0, -1, -2.5, timedelta(0), float("nan"), 1e9)],
    *[strategy("timeout", value, *TIME) for value in ("5 minutes", None, True, [5])],
    strategy("capture_timeout", 0, *YEAR_OF_SECONDS),
    strategy("capture_timeout", timedelta(seconds=-1), *YEAR_OF_SECONDS),
    strategy("capture_timeout", "long", *TIME),
    strategy("grace", -1, *YEAR_OF_SECONDS),
    strategy("grace", "long", *TIME),
    *[strategy("recompute", value, "True", "False") for value in (0, 1, "yes", None)],
    *[strategy("module", value, "name of a module", "list of names") for value in ([], (), ["net", 3], 5, {"net": 1})],
    strategy("weights", "stach", *EVERY_POLICY, "did you mean 'stash'?"),
    strategy("weights", None, *EVERY_POLICY),
    strategy("weights", 3, *EVERY_POLICY),
    *[strategy("lr_correction", value, "at least 1", "'auto'", "None") for value in (0, -3, 1.5, True, "theorem")],
    strategy("allocation", "edd", "'np'", "'ed'", "'hd'", "'placed'", "'auto'", "did you mean 'ed'?"),
    strategy("allocation", "ed", "hetpipe-plan", "strategy.allocation=ed", "leave allocation out"),
    strategy("allocation", "ed", "'np'", "plan=", "leave allocation out", plan=replace(planned(0, 1), allocation="np")),
    strategy("virtual_workers", 0, "at least 1", *PAIR),
    strategy("virtual_workers", True, "at least 1", *PAIR),
    strategy("virtual_workers", "1-3", "at least 1", *PAIR),
    strategy("virtual_workers", 1001, "at most 1000"),
    strategy("virtual_workers", [3, 2], "fewest", "most", "at least 1", "1000"),
    strategy("virtual_workers", [0, 2], "fewest", "most", "at least 1", "1000"),
    strategy("virtual_workers", [1, 1001], "fewest", "most", "at least 1", "1000"),
    strategy("virtual_workers", [1, 2, 3], "whole number", *PAIR),
    strategy("virtual_workers", [1, "2"], "whole number", *PAIR),
    case(
        lambda _: relations.check_platform(2, "win32"),
        "virtual_workers",
        "2",
        "Windows",
        "WSL 2",
        "leave virtual_workers out",
        name="virtual_workers=2 on Windows",
    ),
    of_strategy("cluster", "2", "plan", "leave cluster out", "one virtual worker", virtual_workers=(1, 2), cluster=BOX),
    strategy("cluster", 3, "lightning_hetpipe.Cluster", "None"),
    strategy("plan", 3, "lightning_hetpipe.Plan", "path"),
    strategy("wsp", 3, "WSPCallback", "None"),
    case(
        lambda _: relations.only_wsp([WSPCallback(), WSPCallback()]),
        "WSPCallbacks",
        "2",
        "HetPipeStrategy(wsp=...)",
        "callbacks",
        "strategy.wsp=null",
        name="two WSPCallbacks",
    ),
    *[
        strategy("timeline", value, "True", "False", "(100, 120)")
        for value in (1, [3], [0, 5], [5, 3], "last", [1, 2.5])
    ],
    strategy("timeline", [1, 5000], "at most 2000"),
    *[strategy("split", value, "False", "True", "'auto'", "{0: [2, 1]}") for value in NO_SPLIT],
    of_strategy("split", -1, "number", "from 0 on", split={-1: [1, 1]}),
    of_strategy("split", "'first'", "number", "from 0 on", split={"first": [1, 1]}),
    *[
        of_strategy("split[0]", value, "at least two devices", "[2, 1]", split={0: value})
        for value in ([1], 2, [0, 0], [1, -1], [1, float("inf")], [1, 10**400], [1e308, 1e308])
    ],
    strategy("split", {0: [1, 1]}, "plan", "leave split out", plan=planned(0, 1)),
    strategy("split", "auto", "plan", "leave split out", plan=planned(0, 1)),
    *[
        strategy("compile", value, "True", "False", "backend", "mode", "dynamic", "options")
        for value in (0, None, "", ["inductor"], {"fullgraph": False}, {"backend": "eager", "x": 1})
    ],
    compiled("compile", "'nothing'", "aot_eager", "inductor", "compile=True", backend="nothing"),
    compiled("compile's dynamic", "'often'", "True", "False", "None", dynamic="often"),
    compiled("compile", {"mode": "max-autotune"}, "mode='max-autotune-no-cudagraphs'", mode="max-autotune"),
    compiled(
        "compile",
        {"options": {"triton.cudagraphs": True}},
        "mode='max-autotune-no-cudagraphs'",
        options={"triton.cudagraphs": True},
    ),
    compiled("compile's options", 3, "dictionary", options=3),
    compiled("compile's options", {"zzz": 1}, "zzz", "torch._inductor.list_options()", options={"zzz": 1}),
    compiled(
        "compile's options",
        {"max_autotune": "yes"},
        "max_autotune",
        "bool",
        "leave that out",
        options={"max_autotune": "yes"},
    ),
    compiled("compile's mode", "'fast'", "default", "max-autotune-no-cudagraphs", mode="fast"),
    compiled("compile's mode", "'default'", "'eager'", "leave it out", backend="eager", mode="default"),
    compiled("compile", {"mode": "reduce-overhead"}, "mode='max-autotune-no-cudagraphs'", mode="reduce-overhead"),
    compiled("compile", {"backend": "cudagraphs"}, "mode='max-autotune-no-cudagraphs'", backend="cudagraphs"),
    case(no_compiler, "compile", "True", "g++", "CXX", "leave compile out", name="compile without a compiler"),
    hosts("stage_hosts", "attic", "{'attic': '10.0.0.2:7071'}", "None", stage_hosts="attic"),
    hosts("stage_hosts", "{}", "each node", "None", stage_hosts={}),
    hosts("stage_hosts['attic']", "'nowhere'", "host:port", "1 to 65535", stage_hosts={"attic": "nowhere"}),
    hosts("stage_hosts", HOSTS, "leave compile out", "or stage_hosts", stage_hosts=HOSTS, compile=True),
    hosts("stage_hosts", HOSTS, "leave timeline out", "or stage_hosts", stage_hosts=HOSTS, timeline=True),
    case(
        lambda _: relations.refuse_spread(HOSTS),
        "stage_hosts",
        HOSTS,
        "more in flight",
        "leave stage_hosts out",
        name="stage_hosts of a spread run",
    ),
    case(
        lambda _: planned_devices.stages_elsewhere(None, HOSTS, emulated=False),
        "stage_hosts",
        HOSTS,
        "give plan",
        name="stage_hosts without a plan",
    ),
    case(
        lambda _: relations.workers_as_planned(1, planned(0, 1), emulated=False, hosts={"bax": "a:1"}, nodes=1),
        "stage_hosts",
        {"bax": "a:1"},
        "'bax'",
        "'box'",
        "did you mean 'box'?",
        name="stage_hosts of another node",
    ),
]

PLANS = [
    of_plan("in_flight", planned(0, 2), "in_flight", "4", "3", "leave in_flight out", "'auto'", in_flight=4),
    of_plan("stages", planned(0, 2), "stages", [2, 3], "2", "leave stages out", "'auto'", stages=[2, 3]),
    of_plan("weights", planned(0, 2), "weights", "'pipeoptim'", "'stash'", "leave weights out", weights="pipeoptim"),
    case(lambda _: planned(0, 2, in_flight=1001), "in_flight", "1001", "at most 1000", name="plan too many in flight"),
    of_plan("spread, compile", SPREAD, "compile", "", "spread run", "leave compile out", compile="eager"),
    of_plan("spread, recompute", SPREAD, "recompute", "", "spread run", "leave recompute out", recompute=True),
    of_plan(
        "spread, two virtual workers",
        replace(on_nodes(("a", "a"), ("b", "b")), spread=True),
        "MLP",
        "2",
        "one virtual worker",
        "plan anew",
    ),
    case(
        lambda _: replace(planned(0, 2), clock_distance=-1),
        "clock_distance", "-1", "at least 0", name="plan clock_distance",
    ),
    from_file(None, "plan", "plan.json", "No such file", "give another file"),
    from_file("[1", "plan", "plan.json", "no JSON", "give another file"),
    from_file("{}", "plan", "plan.json", "schema_version", "plan.json that hetpipe-plan has saved"),
    case(unrunnable_file, "plan", "plan.json", "virtual_workers[0].stages[1]", "plan anew", name="plan with a gap"),
    as_planned(
        "with other virtual_workers", planned(0, 3), "virtual_workers", "3", "1", "leave virtual_workers out",
        virtual_workers=3,
    ),
    as_planned(
        "over several nodes", on_nodes(("a", "b")), "virtual worker", "a, b", "Trainer(num_nodes=2)", "NODE_RANK=0",
        "hetpipe-host", "stage_hosts={'a': '10.0.0.2:7071'}", "the cluster",
    ),
    as_planned(
        "spread over nodes", on_nodes(("a", "b"), spread=True), "spread run", "a and b", "one node", "more in flight",
        nodes=2,
    ),
    as_planned(
        "with nodes that alternate", on_nodes(("a", "a"), ("b", "b"), ("a", "a")), "MLP", "a, b, a",
        "one after another", nodes=2,
    ),
]  # fmt: skip

WSP = [
    *[wsp("clock_distance", value, "at least 0") for value in (-1, 1.5, True)],
    wsp("clock_distance", 1 << 64, "at most 1000000000"),
    *[wsp("wave", value, "at least 1", "'auto'") for value in (0, 1.5, "long")],
    wsp("wave", 1 << 64, "at most 1000000000"),
    *[wsp("shares", value, "'equal'", "'auto'", "[4, 8]") for value in NO_SHARES],
    of_wsp("shares[1]", 0, "at least 1", shares=[4, 0]),
    wsp("shares", [4, 8], "wave=4", "leave wave out", wave=4),
    wsp("aggregate", "max", "'sum'", "'mean'"),
    wsp("update_dtype", "int8", "'bfloat16'", "'float16'", "'float32'"),
    wsp("placement", "near", "'size'", "'round_robin'", "'local'"),
    *[wsp("servers", value, "list of addresses", "['10.0.0.1:5000']", "None") for value in NO_SERVERS],
    *[
        of_wsp("servers[0]", value, "host:port", "1 to 65535", "'10.0.0.1:5000'", servers=[value])
        for value in ("nowhere", "here:99999", "here:0", 7000)
    ],
    of_wsp("servers", "'here:1'", "once", servers=["here:1", "here:1"]),
    of_wsp("security.secure", "", "did you mean security.insecure?", security={"secure": True}),
    of_wsp("security.x", "", "ca", "certificate", "key", "token", "insecure", security={"x": True}),
    of_wsp("security", "'high'", "mapping", "ca", "certificate", "key", "token", "insecure", security="high"),
    of_wsp("security.insecure", "'no'", "True", "False", security={"insecure": "no"}),
    of_wsp("security.ca", 3, "text", "None", security={"ca": 3}),
    of_wsp("security.token", "", "text", "None", security={"token": 3}),
    *[wsp("lease", value, *YEAR_OF_SECONDS) for value in (0, float("inf"))],
    wsp("lease", "long", *TIME),
    wsp("join_timeout", -1, *YEAR_OF_SECONDS),
    wsp("join_timeout", "long", *TIME),
    wsp("end_timeout", -1.0, *YEAR_OF_SECONDS),
    wsp("end_timeout", "long", *TIME),
    wsp("restarts", -1, "at least 0"),
]

CASES = [*STRATEGY, *PLANS, *WSP]
