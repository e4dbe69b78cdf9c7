"""Relations between settings, and of settings to the model, the data, the devices and the other virtual workers."""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint, Timer
from omegaconf import OmegaConf
from torch import nn

from lightning_hetpipe import Cluster, HetPipeStrategy, Node, WSPCallback, accelerator
from lightning_hetpipe.capture.pieces import named_pieces
from lightning_hetpipe.cli import plan_inputs
from lightning_hetpipe.errors import VirtualWorkerLost, of_import
from lightning_hetpipe.launch import launcher, parent_watch
from lightning_hetpipe.launch.ranks import Rank, Role
from lightning_hetpipe.pipeline.split.split_segment import check_divided
from lightning_hetpipe.placement import device_placement
from lightning_hetpipe.placement.decision import Decision, parts_of
from lightning_hetpipe.placement.device_placement import DevicePlacement
from lightning_hetpipe.rules.channel_layouts import ChannelCounts
from lightning_hetpipe.rules.versions import STASH
from lightning_hetpipe.run import run_settings
from lightning_hetpipe.run.around_step import check_hooks
from lightning_hetpipe.run.extensions import waves_and_cuts
from lightning_hetpipe.run.first_minibatch import FirstMinibatch, check_memory
from lightning_hetpipe.run.prediction import prediction_of
from lightning_hetpipe.run.together import check_returning, check_shares, check_steps, check_together
from lightning_hetpipe.strategy.profiling_strategy import profile as profile_model
from lightning_hetpipe.strategy.virtual_workers import VirtualWorkers
from lightning_hetpipe.workers import collectives
from lightning_hetpipe.workers.group import Group
from lightning_hetpipe.workers.seats import SeatMissed
from lightning_hetpipe.workers.shared_data import Shares
from lightning_hetpipe.workers.synchroniser import Synchroniser
from tests.golden.cases import Case, Place, case
from tests.run.test_cuts import fit as fit_with_others
from tests.support.small import Learner, Wraps
from tests.support.trainers import quiet_trainer

OWN_SHARES = Shares(0, 2, (3, 4))
EQUAL = "WSPCallback(shares='equal')"
OTHER_COUNTS = "4 and 6"


def check(run: Callable[[], object], setting: str, value: object, *way_out: str) -> Case:
    return case(lambda _: run(), setting, value, *way_out, name=f"{setting} {value} {way_out[0]}"[:80])


def with_shares(**trainers: Any) -> None:
    check_shares(quiet_trainer(**trainers), OWN_SHARES)


def validating() -> None:
    known = {"current_epoch": 0, "max_epochs": 1, "accumulate_grad_batches": 1, "enable_validation": True}
    check_shares(cast(Any, SimpleNamespace(callbacks=[], check_val_every_n_epoch=None, **known)), OWN_SHARES)


TOGETHER = [
    check(lambda: check_together(quiet_trainer(val_check_interval="00:00:00:10")), "val_check_interval", "10 s",
          "number of batches", "part of an epoch"),
    check(lambda: check_returning(quiet_trainer(callbacks=[LearningRateFinder()]), 1), "virtual worker 1",
          "LearningRateFinder", "leave restarts out", "program of its own"),
    check(lambda: with_shares(max_time={"hours": 1}), "max_time", "", "leave them out", EQUAL),
    check(lambda: with_shares(callbacks=[Timer(timedelta(hours=1))]), "Timer", "", "leave them out", EQUAL),
    check(lambda: with_shares(min_steps=9), "min_steps", "9", "min_epochs", EQUAL),
    check(lambda: with_shares(accumulate_grad_batches=2), "shares", "[3, 4]", "accumulate_grad_batches=2",
          "multiples of 2"),
    check(lambda: check_steps(Shares(0, 1, (3,), adapts=True), 2), "shares", "[3]", "accumulate_grad_batches=2",
          "GradientAccumulationScheduler"),
    check(validating, "check_val_every_n_epoch", "None", "leave it out", EQUAL),
    check(lambda: fit_with_others((6, 3), val_check_interval=0.5), "val_check_interval", "0.5", OTHER_COUNTS,
          "number of batches"),
    check(lambda: fit_with_others((6, 2), val_check_interval=2, check_val_every_n_epoch=None),
          "check_val_every_n_epoch", "None", OTHER_COUNTS, "leave it out", "the same number"),
    check(lambda: fit_with_others((6, 6), ModelCheckpoint(every_n_train_steps=3, save_top_k=0)),
          "ModelCheckpoint(every_n_train_steps=...)", OTHER_COUNTS, "every_n_epochs", "the same number"),
    check(lambda: HetPipeStrategy(virtual_workers=2, wsp=WSPCallback(shares=[1, 2, 3]))._workers.check_shares(),
          "shares", "[1, 2, 3]", "2 virtual workers", "one for each", "leave shares out"),
]  # fmt: skip


class Others:
    """Virtual workers that take part in every gather."""

    def gather(self, value: Any, what: str) -> list[Any]:
        return [value, value]


GROUP = cast(Group, Others())


def raised(error: BaseException) -> None:
    raise error


def unpickled() -> None:
    buffer = io.BytesIO()
    torch.save(("what", Learner), buffer)
    collectives._loaded(bytearray(buffer.getvalue()), 1)


def other_number(place: Place) -> None:
    place.patch.setattr(launcher, "_launch_of_job", lambda: SimpleNamespace(processes=2, failed=False))
    launcher.check_processes(Rank(0, 3, 0, 0, 3, 1, Role.FIRST))


def stages_of_nodes(place: Place) -> None:
    place.environment(NODE_RANK=1)
    quiet_trainer(HetPipeStrategy(virtual_workers=2, stages=[1, 2, 3, 4, 5, 6]), num_nodes=2)


def within_a_step(place: Place) -> None:
    place.patch.setattr(waves_and_cuts, "in_a_step", lambda _: True)
    cuts = SimpleNamespace(_running=True, trainer=SimpleNamespace(interrupted=False))
    waves_and_cuts.WavesAndCuts._on_save(cast(Any, cuts), cast(Any, None))


def ahead_of_the_loop(place: Place) -> None:
    place.patch.setattr(collectives, "runs_ahead", lambda _: True)
    VirtualWorkers.together(cast(Any, SimpleNamespace(group=GROUP, _in_flight=lambda: 3)), "all_gather")


def within_a_wave(_: Place) -> None:
    class Meets(Synchroniser):
        def __init__(self) -> None: ...

        def meet(self) -> bool:
            return False

    workers = SimpleNamespace(group=GROUP, _in_flight=lambda: 1, synchroniser=Meets())
    VirtualWorkers.together(cast(Any, workers), "barrier")


def agreed_on_several(_: Place) -> None:
    """Virtual workers agree on several in flight, after this one's first minibatch has waited for the others."""
    decision = Decision((0,), [torch.device("cpu")], 1, [0.0])
    decides: Any = SimpleNamespace(
        settings=SimpleNamespace(resumed=None),
        trainer=SimpleNamespace(accumulate_grad_batches=1),
        synchroniser=SimpleNamespace(agree=lambda *_: (2, STASH), wave=None),
        _waited="all_gather",
    )
    FirstMinibatch._agreed(decides, cast(Any, SimpleNamespace(pieces=[])), decision)


def nothing_to_come_back_to(place: Place) -> None:
    child = SimpleNamespace(outlasts=True, variables={parent_watch.AGAIN: "1"})
    place.patch.setattr(parent_watch, "this_child", lambda: child)
    error = Group._is_lost(cast(Any, SimpleNamespace(_has_taken_part=False, index=1)))
    assert error is not None
    raise error


def without_a_seat(_: Place) -> None:
    raise SeatMissed(2.0)


WORKERS = [
    check(lambda: collectives.reduce(GROUP, torch.tensor(3.0), "median"), "reduce_op", "'median'", "'mean'", "'sum'",
          "'max'", "'min'", "'product'"),
    check(lambda: collectives.all_gather(GROUP, torch.ones(2, requires_grad=True), sync_grads=True), "all_gather",
          "sync_grads=True", "leave out sync_grads", "another strategy"),
    case(ahead_of_the_loop, "all_gather", "", "on_train_batch_end", "in_flight=1",
            name="a collective ahead of the loop"),
    case(within_a_wave, "barrier", "", "end of an epoch", "on_step=False, on_epoch=True", EQUAL,
         name="a collective within a wave"),
    case(agreed_on_several, "all_gather", "", "on_train_batch_end", "in_flight=1",
         name="a collective in a first minibatch of several"),
    case(nothing_to_come_back_to, "virtual worker 1", "", "first fit", "start all of them anew",
            error=VirtualWorkerLost,
         name="nothing to come back to"),
    case(without_a_seat, "lease", "2 s", "WSPCallback(lease=...)", error=VirtualWorkerLost,
            name="a seat that is missed"),
    case(within_a_step, "checkpoint", "", "on_train_batch_end", "end of an epoch", name="a checkpoint within a step"),
    check(unpickled, "virtual worker 1", "", "tensors, numbers, strings, None, and lists, tuples and dicts", "convert"),
    case(other_number, "virtual_workers", "3", "virtual_workers=2", "another strategy", "another program",
         name="another number of virtual workers"),
    case(stages_of_nodes, "stages", "[1, 2, 3, 4, 5, 6]", "virtual_workers=2", "4 in all", "one for each",
         "one number for all", name="stages of the virtual workers of several nodes"),
]  # fmt: skip


WEIGHT = [nn.Parameter(torch.ones(2))]
NET = nn.Sequential(nn.Linear(2, 2), nn.Tanh())


def sgd(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(WEIGHT, lr=0.1, **options)


def no_state() -> None:
    class Signs(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any: ...

    weight = nn.Parameter(torch.ones(2))
    optimizer = Signs([weight])
    optimizer.state[weight]["moment"] = torch.zeros(2)
    prediction_of("xpipe", optimizer).moves()


def placement(cluster: Cluster) -> DevicePlacement:
    devices = [torch.device("cpu")]
    return cast(DevicePlacement, SimpleNamespace(cluster=cluster, devices=devices, declared=True))


ONE_NODE = Cluster([Node("box", ["3xcpu"])])
TWO_NODES = Cluster([Node("a", ["cpu"]), Node("b", ["2xcpu"])])
DIVISIBLE = {"net.0": (12,), "net.4": (12,)}


def counts(**splits: tuple[int, ...]) -> None:
    ChannelCounts((1, 1), {name.replace("_", "."): own for name, own in splits.items()}).check(DIVISIBLE)


def no_profile() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_inputs, "_measured", lambda _: (None, None, ()))
        plan_inputs.profile_of(OmegaConf.create({"optimizer": "auto", "profile": None}), None)


def no_memory(place: Place) -> None:
    for name, told in {"accelerates": True, "free_memory": 9, "name_of": "T4"}.items():
        place.patch.setattr(device_placement, name, lambda _, told=told: told)
    place.patch.setattr(device_placement, "LEAST_MEMORY", 1 << 30)
    place.patch.setattr(torch.accelerator, "memory_reserved", lambda _: 0)
    device_placement._discovered(torch.device("cuda", 1))


def no_memory_told(place: Place) -> None:
    place.patch.setattr(accelerator, "device_module", lambda _: SimpleNamespace())
    accelerator.total_memory(torch.device("mps"))


def torchvision(_: Place) -> None:
    error = RuntimeError("operator torchvision::nms does not exist")
    try:
        exec("raise error", {"__name__": "torchvision._meta_registrations", "error": error})
    except RuntimeError as raised_there:
        raise of_import(raised_there) from raised_there


def public_name(place: Place) -> None:
    """Ask for a public name, whose module imports a torchvision of another build."""
    import lightning_hetpipe

    def importing(_: str) -> None:
        exec("raise RuntimeError()", {"__name__": "torchvision"})

    place.patch.setattr(lightning_hetpipe, "import_module", importing)
    lightning_hetpipe.__getattr__("Plan")


MODEL = [
    check(lambda: raised(run_settings.saving_ahead()), "training_step", "checkpoint", "on_train_batch_end",
            "in_flight=1"),
    check(lambda: check_hooks(Wraps(sgd()), "weights='pipeoptim'"), "weights", "'pipeoptim'", "Wraps",
          "torch.optim.Optimizer.__init__", "leave the setting out"),
    check(lambda: prediction_of("xpipe", sgd()), "weights", "'xpipe'", "SGD", "torch.optim.Adam",
          "weights='pipeoptim'", "'stash'"),
    check(lambda: prediction_of("spectrain", sgd(momentum=0.9, nesterov=True)), "weights", "'spectrain'",
          "nesterov=True", "weights='pipeoptim'", "'stash'"),
    check(no_state, "weights", "'xpipe'", "Signs", "weights='pipeoptim'", "'stash'"),
    check(lambda: check_memory(NET, sgd(), {torch.device("cpu"): 1}), "Sequential", "", "24 bytes of weights", "cpu",
          "more devices", "more memory", "fewer weights"),
    check(lambda: named_pieces(Learner(), "net.1"), "module", "'net.1'", "no parameters", "leave it out of module"),
    check(lambda: parts_of({0: (1, 1), 1: (1, 1)}, 2, placement(ONE_NODE)), "split", "4 devices", "there are 3",
          "fewer devices", "set stages", "more devices"),
    check(lambda: parts_of({0: (1, 1)}, 1, placement(TWO_NODES)), "split[0]", "a and b", "one machine",
          "fewer devices", "order the cluster's devices"),
    check(lambda: counts(net_5=(5, 7)), "the plan's splits", "'net.5'", "did you mean 'net.4'?"),
    check(lambda: counts(head=(5, 7)), "the plan's splits", "'head'", "net.0, net.4"),
    check(lambda: counts(net_4=(5, 6)), "the plan's split", "'net.4'", "11 units", "12", "add up"),
    check(lambda: check_divided([None], cast(Any, SimpleNamespace(counts=ChannelCounts((1, 1)))), 1), "stage 1", "",
          "split", "one device"),
    check(lambda: profile_model(quiet_trainer("auto"), Learner()), "strategy", "SingleDeviceStrategy",
          "ProfilingStrategy"),
    check(no_profile, "optimizer", "auto", "optimizer=N", "bytes"),
    case(no_memory, "cuda:1", "T4", "9 bytes free", "end them", "Trainer(devices=...)", name="a GPU that is full"),
    case(no_memory_told, "accelerator", "'mps'", "Trainer(accelerator='cpu')",
            name="an accelerator that tells nothing"),
    case(torchvision, "torchvision", "", "--force-reinstall torch torchvision", "uninstall torchvision",
         name="torchvision of another build"),
    case(public_name, "torchvision", "", "uninstall torchvision", name="a public name and such a torchvision"),
]  # fmt: skip

CASES = [*TOGETHER, *WORKERS, *MODEL]
