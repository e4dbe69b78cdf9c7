"""Which virtual worker a process is, by whoever started it, and which devices it holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import (
    KubeflowEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.launch import ranks
from lightning_hetpipe.launch.parent_watch import LaunchedChild, pair
from lightning_hetpipe.launch.ranks import Rank, Role, WorkerRange, announce, devices_of, find_rank

NAMES = ("NODE_RANK", "GROUP_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No environment but what the test sets."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ranks, "this_child", lambda: None)


def put(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def torchrun(monkeypatch: pytest.MonkeyPatch, node: int, local: int, processes: list[int]) -> ClusterEnvironment:
    """As torchrun sets it for one process, where so many processes run on each node."""
    put(monkeypatch, RANK=sum(processes[:node]) + local, LOCAL_RANK=local, WORLD_SIZE=sum(processes))
    put(monkeypatch, GROUP_RANK=node, LOCAL_WORLD_SIZE=processes[node], GROUP_WORLD_SIZE=len(processes))
    return TorchElasticEnvironment()


def slurm(monkeypatch: pytest.MonkeyPatch, process: int, node: int, local: int, **more: object) -> ClusterEnvironment:
    put(monkeypatch, SLURM_PROCID=process, SLURM_NODEID=node, SLURM_LOCALID=local, SLURM_JOB_NAME="train", **more)
    return SLURMEnvironment()


def test_a_process_that_a_user_started_is_the_first_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_rank(1, 1, LightningEnvironment()) == Rank(0, 1, 0, 0, 1, 1, Role.FIRST)
    assert find_rank(3, 1, LightningEnvironment()) == Rank(0, 3, 0, 0, 3, 1, Role.FIRST)
    put(monkeypatch, NODE_RANK=1)
    assert find_rank(3, 2, LightningEnvironment()) == Rank(3, 6, 1, 0, 3, 2, Role.FIRST, (3, 3))
    with pytest.raises(SettingError, match="NODE_RANK=1 is beyond num_nodes=1; set num_nodes"):
        find_rank(3, 1, LightningEnvironment())


def test_a_node_rank_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, NODE_RANK="one")
    with pytest.raises(SettingError, match="NODE_RANK=one must be a whole number"):
        find_rank(3, 2, LightningEnvironment())


def test_a_process_that_our_launcher_started(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, childs = pair()
    with ours, childs:
        monkeypatch.setattr(ranks, "this_child", lambda: LaunchedChild(2, 3, childs))
        put(monkeypatch, NODE_RANK=1, LOCAL_RANK=2)
        assert find_rank(3, 2, LightningEnvironment()) == Rank(5, 6, 1, 2, 3, 2, Role.CHILD, (3, 3))
        with pytest.raises(SettingError, match="virtual_workers=1, but the processes of this program are 3 virtual"):
            find_rank(1, 2, LightningEnvironment())


def test_a_range_has_seats_that_others_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process starts the fewest; on several nodes each starts those of its own."""
    some = WorkerRange(2, 4)
    rank = find_rank(some, 1, LightningEnvironment())
    assert rank == Rank(0, 4, 0, 0, 4, 1, Role.FIRST, (), 2)
    assert (rank.started, rank.has_room) == (2, True)
    put(monkeypatch, LOCAL_RANK=3)
    assert find_rank(some, 1, LightningEnvironment()) == Rank(3, 4, 0, 3, 4, 1, Role.EXTERNAL, (), 2)
    put(monkeypatch, LOCAL_RANK=4)
    with pytest.raises(SettingError, match=r"LOCAL_RANK=4 is beyond virtual_workers=\[2, 4\] on this node"):
        find_rank(some, 1, LightningEnvironment())
    monkeypatch.delenv("LOCAL_RANK")
    put(monkeypatch, NODE_RANK=1)
    rank = find_rank(some, 2, LightningEnvironment())
    assert rank == Rank(2, 4, 1, 0, 2, 2, Role.FIRST, (2, 2), 2)
    assert (rank.started, rank.has_room) == (2, False)
    with pytest.raises(SettingError, match="all 3 nodes, of which each has as many; give a maximum that is a multiple"):
        find_rank(some, 3, LightningEnvironment())


def test_all_of_a_range_that_torchrun_has_started_begin_together(monkeypatch: pytest.MonkeyPatch) -> None:
    some = WorkerRange(1, 4)
    expected = Rank(1, 4, 0, 1, 4, 1, Role.EXTERNAL, (), 3)
    assert find_rank(some, 1, torchrun(monkeypatch, 0, 1, [3])) == expected
    assert find_rank(some, 1, torchrun(monkeypatch, 1, 0, [2, 2])) == Rank(2, 4, 1, 0, 2, 2, Role.EXTERNAL, (2, 2), 4)
    with pytest.raises(SettingError, match="5 processes were started, and this one, process 4 of node 0, is beyond"):
        find_rank(some, 1, torchrun(monkeypatch, 0, 4, [5]))


def test_processes_that_a_user_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, LOCAL_RANK=1, NODE_RANK=1)
    assert find_rank(2, 2, LightningEnvironment()) == Rank(3, 4, 1, 1, 2, 2, Role.EXTERNAL, (2, 2))
    with pytest.raises(SettingError, match="LOCAL_RANK=1 is beyond virtual_workers=1 on this node"):
        find_rank(1, 2, LightningEnvironment())


def test_slurms_plugin_in_a_process_that_srun_has_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_NTASKS", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    put(monkeypatch, SLURM_JOB_ID=7)
    assert find_rank(1, 1, SLURMEnvironment()) == Rank(0, 1, 0, 0, 1, 1, Role.FIRST)
    put(monkeypatch, SLURM_NTASKS=1)  # as salloc sets it for a shell
    assert find_rank(3, 1, SLURMEnvironment()) == Rank(0, 3, 0, 0, 3, 1, Role.FIRST)


@pytest.mark.parametrize(("node", "local", "index"), [(0, 0, 0), (0, 2, 2), (1, 0, 3), (2, 1, 5)])
def test_torchrun_may_start_unequal_numbers(monkeypatch: pytest.MonkeyPatch, node: int, local: int, index: int) -> None:
    processes = [3, 1, 2]
    expected = Rank(index, 6, node, local, processes[node], 3, Role.EXTERNAL)
    assert find_rank(1, 1, torchrun(monkeypatch, node, local, processes)) == expected
    assert find_rank(processes[node], 3, torchrun(monkeypatch, node, local, processes)) == expected


def test_what_torchrun_started_must_not_contradict_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = torchrun(monkeypatch, 0, 0, [2, 2])
    with pytest.raises(SettingError, match=r"virtual_workers=3, but 2 processes were started on this node.*start 3"):
        find_rank(3, 1, environment)
    with pytest.raises(SettingError, match="num_nodes=3, but processes were started on 2; leave num_nodes out"):
        find_rank(2, 3, environment)


@pytest.mark.parametrize(("process", "node", "local", "here"), [(0, 0, 0, 2), (3, 1, 1, 2), (4, 2, 0, 1)])
def test_slurm(monkeypatch: pytest.MonkeyPatch, process: int, node: int, local: int, here: int) -> None:
    started = {"SLURM_NTASKS": 5, "SLURM_NTASKS_PER_NODE": 2, "SLURM_NNODES": 3, "SLURM_TASKS_PER_NODE": "4(x9)"}
    environment = slurm(monkeypatch, process, node, local, SLURM_STEP_TASKS_PER_NODE="2(x2),1", **started)
    assert find_rank(1, 1, environment) == Rank(process, 5, node, local, here, 3, Role.EXTERNAL)


def test_an_environment_that_says_only_how_many_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, RANK=2, WORLD_SIZE=3)
    assert find_rank(1, 3, KubeflowEnvironment()) == Rank(2, 3, 2, 0, 1, 3, Role.EXTERNAL)
    with pytest.raises(SettingError, match="num_nodes=2 does not divide the 3 processes"):
        find_rank(1, 2, KubeflowEnvironment())


@given(st.integers(1, 9), st.integers(1, 9))
def test_accelerators_are_divided_in_order(count: int, workers: int) -> None:
    devices = [torch.device("cuda", number) for number in range(count)]
    if count < workers:
        with pytest.raises(SettingError, match=f"virtual_workers={workers} on a node need a device each"):
            devices_of(devices, 0, workers)
        return
    blocks = [devices_of(devices, local, workers) for local in range(workers)]
    assert [device for block in blocks for device in block] == devices
    sizes = [len(block) for block in blocks]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_virtual_workers_share_the_cpu() -> None:
    cpu = torch.device("cpu")
    assert [devices_of([cpu], local, 2) for local in range(2)] == [[cpu], [cpu]]
    assert [devices_of([cpu] * 3, local, 2) for local in range(2)] == [[cpu, cpu], [cpu]]


def test_only_rank_zero_speaks(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    announce(Rank(1, 2, 0, 1, 2, 1, Role.CHILD))
    with caplog.at_level("INFO"):
        rank_zero_info("said twice")
    assert caplog.text == ""


def test_which_node_a_virtual_worker_is_on_is_known_of_two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_rank(1, 1, torchrun(monkeypatch, 0, 2, [3, 1])).of_nodes == (3, 1)
    assert find_rank(1, 1, torchrun(monkeypatch, 1, 0, [3, 1])).of_nodes == (3, 1)
    # 1, 2 and 3 are as many as three times 2
    assert find_rank(1, 1, torchrun(monkeypatch, 1, 0, [1, 2, 3])).of_nodes == ()


@pytest.mark.parametrize(("node", "index"), [(0, 0), (1, 2), (2, 3)])
def test_a_plan_says_how_many_each_node_has(monkeypatch: pytest.MonkeyPatch, node: int, index: int) -> None:
    processes = [2, 1, 3]
    put(monkeypatch, NODE_RANK=node)
    expected = Rank(index, 6, node, 0, processes[node], 3, Role.FIRST, (2, 1, 3))
    assert find_rank(1, 3, LightningEnvironment(), processes) == expected
    monkeypatch.delenv("NODE_RANK")
    started = torchrun(monkeypatch, node, 0, processes)
    assert find_rank(1, 1, started, processes) == replace(expected, role=Role.EXTERNAL)
    with pytest.raises(SettingError, match="the plan has 2, 1 and 4 virtual workers on 3 nodes, but 6 proces"):
        find_rank(1, 1, started, [2, 1, 4])


def test_the_nodes_of_a_plan_are_those_of_the_run() -> None:
    with pytest.raises(SettingError, match="num_nodes=3, but the plan has virtual workers on 2 nodes; set num_nodes=2"):
        find_rank(1, 3, LightningEnvironment(), [1, 1])
    with pytest.raises(SettingError, match=r"on 2 nodes, and num_nodes=1; set Trainer\(num_nodes=2\) and start"):
        find_rank(1, 1, LightningEnvironment(), [1, 1])
    assert find_rank(1, 1, LightningEnvironment(), [3]) == Rank(0, 3, 0, 0, 3, 1, Role.FIRST)


def test_a_node_that_a_plan_has_no_virtual_worker_on_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, NODE_RANK=1)
    assert find_rank(1, 2, LightningEnvironment(), [2, 0]) == Rank(2, 2, 1, 0, 0, 2, Role.HOST, (2, 0))
    put(monkeypatch, NODE_RANK=0)
    assert find_rank(1, 2, LightningEnvironment(), [2, 0]) == Rank(0, 2, 0, 0, 2, 2, Role.FIRST, (2, 0))
    with pytest.raises(SettingError, match=r"plan has stages on 2 nodes, and num_nodes=1; set Trainer\(num_nodes=2\)"):
        find_rank(1, 1, LightningEnvironment(), [2, 0])


@pytest.mark.parametrize(
    ("node", "local", "expected"),
    [
        (0, 0, Rank(0, 3, 0, 0, 1, 3, Role.EXTERNAL, (1, 0, 2))),
        (0, 1, Rank(3, 3, 0, 1, 1, 3, Role.HOST, (1, 0, 2))),
        (1, 0, Rank(3, 3, 1, 0, 0, 3, Role.HOST, (1, 0, 2))),
        (2, 1, Rank(2, 3, 2, 1, 2, 3, Role.EXTERNAL, (1, 0, 2))),
    ],
)
def test_processes_that_were_started_where_a_plan_has_no_virtual_worker(
    monkeypatch: pytest.MonkeyPatch, node: int, local: int, expected: Rank
) -> None:
    """They serve; there may be more of them, so that a scheduler may start as many on each node."""
    assert find_rank(1, 1, torchrun(monkeypatch, node, local, [2, 2, 2]), [1, 0, 2]) == expected
    with pytest.raises(SettingError, match="and one on each node without any"):
        find_rank(1, 1, torchrun(monkeypatch, 2, 0, [2, 2, 1]), [1, 0, 2])
