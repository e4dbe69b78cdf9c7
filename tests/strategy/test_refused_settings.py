"""Refused settings of the strategy and of the Trainer: one sentence with the setting, its value and a way out."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_hetpipe import Cluster, Device, HetPipeStrategy, Node, WSPCallback
from lightning_hetpipe.strategy import settings
from tests.placement.test_plans import planned
from tests.support.small import Learner, assert_clean, assert_refused, batches, layers, refused
from tests.support.trainers import quiet_trainer


@pytest.mark.parametrize("name", ["stages", "in_flight"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, False, "many", None])
def test_counts(name: str, value: Any) -> None:
    arguments: Any = {name: value}
    with refused(f"{name}={value!r}", "a whole number of at least 1, or 'auto'"):
        HetPipeStrategy(**arguments)


@pytest.mark.parametrize("name", ["stages", "in_flight"])
def test_counts_that_would_take_too_many_threads(name: str) -> None:
    arguments: Any = {name: 100_000}
    with refused(f"{name}=100000 is more than 1000", "set fewer"):
        HetPipeStrategy(**arguments)


@pytest.mark.parametrize(
    "value", [0, -1, 0.0, -2.5, timedelta(0), timedelta(seconds=-1), float("nan"), float("inf"), 1e9]
)
def test_a_timeout_that_is_no_time(value: Any) -> None:
    with refused(f"timeout={value!r}", "must be positive, and at most a year"):
        HetPipeStrategy(timeout=value)


@pytest.mark.parametrize("value", [0, -1, timedelta(0)])
def test_a_capture_timeout_that_is_no_time(value: Any) -> None:
    with refused(f"capture_timeout={value!r}", "must be positive"):
        HetPipeStrategy(capture_timeout=value)


@pytest.mark.parametrize("value", ["5 minutes", None, True, [5]])
def test_a_timeout_of_another_type(value: Any) -> None:
    with refused(f"timeout={value!r}", "must be a datetime.timedelta, or a number of seconds"):
        HetPipeStrategy(timeout=value)


@pytest.mark.parametrize("value", [0, 1, "yes", None])
def test_a_switch_of_another_type(value: Any) -> None:
    with refused(f"recompute={value!r}", "must be True or False"):
        HetPipeStrategy(recompute=value)


@pytest.mark.parametrize(("value", "seconds"), [(3, 3.0), (0.5, 0.5), (timedelta(minutes=2), 120.0)])
def test_timeouts(value: Any, seconds: float) -> None:
    assert HetPipeStrategy(timeout=value).timeout == seconds


@pytest.mark.parametrize("value", [[], (), ["net", 3], [None], 5, {"net": 1}])
def test_a_module_that_is_no_name(value: Any) -> None:
    with refused(f"module={value!r}", "must be the name of a module, or a list of names"):
        HetPipeStrategy(module=value)


@pytest.mark.parametrize("value", ["stach", None, 3])
def test_weight_policies_that_there_are_not(value: Any) -> None:
    near = "; did you mean 'stash'?" if value == "stach" else ""
    with refused(
        f"weights={value!r} must be one of 'auto', 'stash', 'sync', '2bw', 'spectrain', 'xpipe', 'pipeoptim'{near}"
    ):
        HetPipeStrategy(weights=value)


@pytest.mark.parametrize("value", [0, -3, 1.5, True, "theorem"])
def test_numbers_of_updates_with_lower_rates(value: Any) -> None:
    with refused(f"lr_correction={value!r} must be a whole number of at least 1, 'auto', or None"):
        HetPipeStrategy(lr_correction=value)


def test_an_allocation_is_that_of_a_plan() -> None:
    with refused("allocation='ed' is decided when", "there is none", "hetpipe-plan cluster=... strategy.allocation=ed"):
        HetPipeStrategy(allocation="ed")
    with refused("allocation='ed' is decided when", "has 'np'"):
        HetPipeStrategy(allocation="ed", plan=replace(planned(0, 1), allocation="np"))
    HetPipeStrategy(allocation="np", plan=replace(planned(0, 1), allocation="np"))
    for plan in (None, planned(0, 1)):
        with refused("allocation='edd' must be one of 'np', 'ed', 'hd', 'placed', 'auto'; did you mean 'ed'?"):
            HetPipeStrategy(allocation="edd", plan=plan)


def test_refusals_are_misconfigurations() -> None:
    """Lightning's users already catch it."""
    with pytest.raises(MisconfigurationException):
        HetPipeStrategy(stages=0)


# What only the model tells.


@pytest.mark.parametrize(("net", "layers_there"), [(None, 4), (nn.Sequential(nn.Linear(6, 3)), 1)])
def test_more_stages_than_layers(net: nn.Sequential | None, layers_there: int) -> None:
    plural = "s" if layers_there > 1 else ""
    assert_refused(
        Learner(net=net or layers()),
        f"stages=5 is more than the {layers_there} layer{plural}",
        f"set stages to at most {layers_there}",
        strategy=HetPipeStrategy(stages=5),
    )


def test_an_unknown_module() -> None:
    strategy = HetPipeStrategy(module="nte")
    assert_refused(Learner(), "module='nte' is not a module of Learner; did you mean 'net'?", strategy=strategy)


def test_an_unknown_module_that_resembles_none() -> None:
    strategy = HetPipeStrategy(module=["net", "zzzzzz"])
    module = Learner(head=nn.Linear(3, 3))
    assert_refused(module, "module='zzzzzz' is not a module of Learner; its modules are net, head", strategy=strategy)


def test_a_named_module_that_is_not_called() -> None:
    module = Learner(head=nn.Sequential(nn.Linear(3, 3)))
    strategy = HetPipeStrategy(module="head")
    assert_refused(module, "module=['head'] names 'head', which training_step did not call", strategy=strategy)


# The Trainer's settings.


def test_several_nodes_without_an_address_to_meet_at() -> None:
    assert_refused(Learner(), "num_nodes=2 needs MASTER_ADDR and MASTER_PORT; set MASTER_ADDR to the", num_nodes=2)


def test_stages_of_each_are_counted_when_all_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_RANK", "1")
    stages = [1, 2, 3, 4, 5, 6]
    with refused("stages=[1, 2, 3, 4, 5, 6] has 6 entries, but there are virtual_workers=2 on this node, of 4 in all"):
        quiet_trainer(HetPipeStrategy(virtual_workers=2, stages=stages), num_nodes=2)
    of_all, of_node = (HetPipeStrategy(virtual_workers=2, stages=stages[:count]) for count in (4, 2))
    for strategy in (of_all, of_node):
        quiet_trainer(strategy, num_nodes=2)
    assert (of_all.stages, of_node.stages) == (3, 1)


def test_sync_batchnorm() -> None:
    assert_refused(Learner(), "sync_batchnorm=True", "leave it out", sync_batchnorm=True)


def test_an_unknown_precision() -> None:
    class Special(Precision):
        pass

    assert_refused(Learner(), "the precision plugin Special is not supported", "'bf16-mixed'", plugins=[Special()])


def test_a_second_fit_after_a_refusal() -> None:
    """Whoever takes the way out goes on in the same process, with the same module."""
    module = Learner()
    assert_refused(module, "stages=5", strategy=HetPipeStrategy(stages=5))
    strategy = HetPipeStrategy(stages=4)
    trainer = quiet_trainer(strategy)
    trainer.fit(module, batches())
    assert trainer.global_step == 5
    assert strategy.last_run.stages
    assert_clean(trainer, module)


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ({"virtual_workers": 0}, ["virtual_workers=0", "at least 1"]),
        ({"virtual_workers": (3, 2)}, ["virtual_workers=[3, 2]", "the fewest", "and then the most, not fewer"]),
        ({"virtual_workers": (0, 2)}, ["virtual_workers=[0, 2]", "at least 1"]),
        ({"virtual_workers": (1, 2, 3)}, ["virtual_workers=[1, 2, 3]", "as (1, 3)"]),
        ({"virtual_workers": (1, "2")}, ["virtual_workers=[1, '2']", "as (1, 3)"]),
        ({"virtual_workers": (1, 1001)}, ["virtual_workers=[1, 1001]", "at most 1000"]),
        ({"virtual_workers": "1-3"}, ["virtual_workers='1-3'", "as (1, 3)"]),
        ({"virtual_workers": (1, 2), "cluster": Cluster([Node("a", [Device("d")])])}, ["cluster", "there are 2"]),
        ({"virtual_workers": 1001}, ["virtual_workers=1001 is more than 1000", "set fewer"]),
        ({"virtual_workers": True}, ["virtual_workers=True", "at least 1"]),
        ({"virtual_workers": 2, "stages": [2, 3, 4]}, ["stages=[2, 3, 4] has 3 entries", "virtual_workers=2"]),
        ({"virtual_workers": 2, "stages": [2, 0]}, ["stages=0"]),
        ({"wsp": object()}, ["wsp=", "must be a WSPCallback"]),
    ],
)
def test_virtual_workers(arguments: dict[str, Any], fragments: list[str]) -> None:
    with refused(*fragments):
        HetPipeStrategy(**arguments)


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ({"clock_distance": -1}, ["clock_distance=-1", "at least 0"]),
        ({"clock_distance": 1.5}, ["clock_distance=1.5"]),
        ({"clock_distance": 1 << 64}, [f"clock_distance={1 << 64} is more than 1000000000", "set fewer"]),
        ({"wave": 0}, ["wave=0", "at least 1"]),
        ({"wave": 1 << 64}, [f"wave={1 << 64} is more than 1000000000"]),
        ({"shares": "fair"}, ["shares='fair' must be 'equal', 'auto'", "such as [4, 8]"]),
        ({"shares": []}, ["shares=[]"]),
        ({"shares": 4}, ["shares=4"]),
        ({"shares": [4, 0]}, ["shares[1]=0", "at least 1"]),
        ({"shares": [4, 8], "wave": 4}, ["wave=4 and shares=[4, 8]", "leave wave out"]),
        ({"aggregate": "max"}, ["aggregate='max'", "'sum' or 'mean'"]),
        ({"update_dtype": "int8"}, ["update_dtype='int8'", "'bfloat16'"]),
        ({"servers": "10.0.0.1:5"}, ["servers='10.0.0.1:5'", "list of addresses"]),
        ({"servers": []}, ["servers=[]"]),
        ({"servers": 7000}, ["servers=7000 must be a list of addresses"]),
        ({"placement": "near"}, ["placement='near'"]),
        ({"security": {"secure": True}}, ["security['secure'] is not known", "give a mapping of ca, certificate"]),
        ({"security": "high"}, ["security='high' is no mapping", "insecure"]),
        ({"security": {"insecure": "no"}}, ["security['insecure']='no' must be True or False"]),
        ({"security": {"ca": 3}}, ["security['ca']=3 must be a text, or None"]),
        ({"security": {"token": 3}}, ["security['token'] must be a text, or None"]),
        ({"lease": 0}, ["lease=0"]),
        ({"join_timeout": -1}, ["join_timeout=-1"]),
        ({"lease": float("inf")}, ["lease=inf", "at most a year"]),
        ({"end_timeout": -1.0}, ["end_timeout=-1.0", "positive"]),
        ({"servers": ["here:7000", "nowhere"]}, ["servers[1]='nowhere' is not", "host:port"]),
        ({"servers": ["here:99999"]}, ["servers[0]='here:99999'", "from 1 to 65535"]),
        ({"servers": ["here:0"]}, ["servers[0]='here:0'", "from 1 to 65535"]),
        ({"servers": [7000]}, ["servers[0]=7000 is not", "host:port"]),
        ({"servers": ["here:1", "here:1"]}, ["holds 'here:1' twice", "name each server once"]),
    ],
)
def test_settings_of_the_synchronisation(arguments: dict[str, Any], fragments: list[str]) -> None:
    with refused(*fragments):
        WSPCallback(**arguments)


def test_windows_is_refused_by_name() -> None:
    settings.check_platform(1, "win32")
    settings.check_platform(2, "darwin")
    with refused("virtual_workers=2 needs processes that inherit sockets, which Windows does not have; train in WSL 2"):
        settings.check_platform(2, "win32")


def test_one_wsp_callback_is_enough() -> None:
    """The second one's settings used to be dropped without a word."""
    given = WSPCallback(clock_distance=1)
    assert settings.only_wsp([given]) is given
    assert settings.only_wsp([]).settings.clock_distance == 0
    with refused("this run has 2 WSPCallbacks; give one, to HetPipeStrategy(wsp=...) or among"):
        settings.only_wsp([given, WSPCallback()])
