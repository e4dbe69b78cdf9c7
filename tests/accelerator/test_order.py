"""The test accelerator refuses, each time, what a GPU would compute too early, or in memory that was given away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline import streams, values
from lightning_hetpipe.pipeline.values import DeviceComparison, unequal
from tests.exact.pipelines import Pinned, even
from tests.exact.running import assert_same_run, fit
from tests.exact.test_captured import CASES, made
from tests.exact.test_devices import Evaluates
from tests.support.accelerator import NAME, TestAccelerator
from tests.support.accelerator.build import extension
from tests.support.models import CLASSES, SGD, Task, mlp, vectors, whole_batches
from tests.support.trainers import quiet_trainer

pytestmark = pytest.mark.usefixtures("accelerator")


def place(index: int) -> torch.device:
    return torch.device(NAME, index)


class On:
    """Within it, this thread computes on ``stream``."""

    def __init__(self, stream: torch.Stream) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before = torch.accelerator.current_stream(self.stream.device)
        torch.accelerator.set_stream(self.stream)

    def __exit__(self, *exception: object) -> None:
        torch.accelerator.set_stream(self.before)


def test_a_stream_waits_for_what_it_reads() -> None:
    """By an event, and by one that was recorded on a third stream after that."""
    main, side, third = (torch.Stream(place(1)) for _ in range(3))
    with On(main):
        a = torch.ones(4, device=place(1))
    with (
        On(side),
        pytest.raises(RuntimeError, match=r"a wait is missing: aten::add on stream \d+ of testacc:1 reads memory that"),
    ):
        a + 1
    third.wait_event(main.record_event())
    side.wait_event(third.record_event())
    with On(side):
        assert (a + 1).tolist() == [2] * 4


def test_a_stream_waits_before_it_overwrites_what_another_reads() -> None:
    main, side = torch.Stream(place(0)), torch.Stream(place(0))
    with On(main):
        a = torch.ones(4, device=place(0))
    side.wait_event(main.record_event())
    with On(side):
        b = a + 1
    with On(main):
        with pytest.raises(RuntimeError, match=r"aten::fill_ on .* writes memory that aten::add on .* reads"):
            a.fill_(2)
        main.wait_event(side.record_event())
        a.fill_(2)
    assert b.device == place(0)


def test_the_host_waits_for_whoever_comes_after() -> None:
    """Events, streams, devices and copies to the host have it wait; a question whether something is over does not."""
    waits: list[Callable[[torch.Stream, torch.Event, Tensor], object]] = [
        lambda stream, event, tensor: event.synchronize(),
        lambda stream, event, tensor: stream.synchronize(),
        lambda stream, event, tensor: torch.accelerator.synchronize(2),
        lambda stream, event, tensor: tensor.cpu(),
        lambda stream, event, tensor: tensor[0].item(),
    ]
    for wait in waits:
        main, side = torch.Stream(place(2)), torch.Stream(place(2))
        with On(main):
            a = torch.ones(4, device=place(2))
            event = main.record_event()
            assert event.query()
            with On(side), pytest.raises(RuntimeError, match="a wait is missing"):
                a + 1
            wait(main, event, a)
        with On(side):
            a + 1


def test_pinned_memory_has_the_values_once_the_host_has_waited() -> None:
    a = torch.arange(4.0, device=place(1))
    pinned = torch.zeros(4, pin_memory=True)
    pinned.copy_(a, non_blocking=True)
    a.fill_(5)  # behind the copy
    assert pinned.isnan().all()
    torch.accelerator.current_stream(place(1)).synchronize()
    assert pinned.tolist() == [0, 1, 2, 3]
    assert streams.move(a, torch.device("cpu")).tolist() == [5] * 4


def test_a_copy_orders_the_streams_of_both_devices() -> None:
    """As CUDA's: it runs on the first one's stream once the second one's is there, and that waits for it."""
    a = torch.ones(4, device=place(0))
    b = a.to(place(1))
    assert torch.equal((b + 1).cpu(), torch.full((4,), 2.0))
    a.fill_(3)
    with On(torch.Stream(place(0))), pytest.raises(RuntimeError, match=r"aten::copy_ .* reads memory that aten::fill_"):
        a.to(place(1), non_blocking=True)


def test_memory_is_not_given_away_while_another_stream_uses_it() -> None:
    for recorded in (False, True):
        side = torch.Stream(place(3))
        a = torch.ones(4, device=place(3))
        side.wait_event(torch.accelerator.current_stream(place(3)).record_event())
        with On(side):
            b = a + 1
        if recorded:
            a.record_stream(side)
        del a
        if recorded:
            torch.empty(4, device=place(3))
        else:
            with pytest.raises(
                RuntimeError, match=r"record_stream is missing: stream 0 of testacc:3 .* aten::add used"
            ):
                torch.empty(4, device=place(3))
        assert b.shape == (4,)


def test_autograd_orders_its_streams() -> None:
    """A backward runs on the streams of its forward, and whoever called it goes on after it."""
    side = torch.Stream(place(1))
    x = torch.ones(4, device=place(1), requires_grad=True)
    side.wait_event(torch.accelerator.current_stream(place(1)).record_event())
    with On(side):
        y = x * 2
    torch.accelerator.current_stream(place(1)).wait_event(side.record_event())
    (y * 3).sum().backward()  # type: ignore[no-untyped-call]  # torch has no types here
    assert x.grad is not None
    assert (x.grad + 0).tolist() == [6] * 4


def normed() -> Task:
    """A model with statistics on each of four stages."""
    torch.manual_seed(3)
    blocks = [each for _ in range(4) for each in (nn.Linear(6, 6), nn.BatchNorm1d(6))]
    return Task(nn.Sequential(*blocks, nn.Linear(6, CLASSES)), SGD)


def without_wait(join: Callable[..., None]) -> Callable[..., None]:
    """A stream's ``join`` that says what it uses, but waits for no event."""
    return lambda self, event, *used: join(self, None, *used)


BROKEN: dict[str, tuple[Any, str, Any, str]] = {
    "a stage does not wait": (
        streams.DeviceStream,
        "join",
        without_wait(streams.DeviceStream.join),
        "a wait is missing",
    ),
    "user code does not wait": (
        streams.UserStream,
        "join",
        without_wait(streams.UserStream.join),
        "a wait is missing",
    ),
    "nobody says what it uses": (streams, "_used", lambda tensor, stream: None, "record_stream is missing"),
}


@pytest.mark.parametrize("name", ["dropout", "norms"])
@pytest.mark.parametrize("what", BROKEN)
def test_a_fit_needs_its_waits(
    accelerator: TestAccelerator, monkeypatch: pytest.MonkeyPatch, what: str, name: str
) -> None:
    """The fits are of a captured model and of a sequence of layers."""
    holder, attribute, broken, said = BROKEN[what]
    monkeypatch.setattr(holder, attribute, broken)
    loader, layers = (vectors(16, 4), 9) if name == "norms" else CASES[name][1:]
    task = normed() if name == "norms" else made(name)
    with pytest.raises(RuntimeError, match=said):
        fit(task, whole_batches(loader), strategy=even(layers, 4, 2), accelerator=accelerator, devices=4)


class HostWaits(L.Callback):
    """Notes how often the host had waited for a device when each batch ends."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.counts.append(extension().host_waits())

    def on_validation_batch_end(self, *_: Any) -> None:
        self.counts.append(extension().host_waits())


@pytest.mark.parametrize(("name", "stages"), [("gpt", 1), ("gpt", 2), ("resnet", 2)])
def test_no_minibatch_makes_the_host_wait(accelerator: TestAccelerator, name: str, stages: int) -> None:
    """In the steady state, only user code makes it wait, as a plain run does."""
    _, loader, layers = CASES[name]
    if (name, stages) != ("gpt", 1):
        loader = whole_batches(loader)
    seen = HostWaits()
    fit(made(name), loader, [seen], strategy=even(layers, stages, 3), accelerator=accelerator, devices=stages)
    steady = seen.counts[len(loader) + 1 :]  # behind the first minibatch of the second epoch
    assert steady == steady[:1] * (len(loader) - 1)


class Teaches(L.Callback):
    """Changes the first frozen weight after each step from ``first`` on, through ``.data`` or in a way torch counts."""

    def __init__(self, first: int, *, counted: bool) -> None:
        self.first, self.counted = first, counted

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step >= self.first:
            frozen = next(each for each in pl_module.parameters() if not each.requires_grad)
            (frozen.detach() if self.counted else frozen.data).mul_(0.9)


def adapted() -> Task:
    """Seven layers, of which every second one is frozen."""
    torch.manual_seed(7)
    task = mlp()
    for index in (0, 4):
        task.net[index].requires_grad_(False)
    return task


@pytest.mark.parametrize("case", ["frozen", "accumulated"])
def test_no_comparison_of_weights_makes_the_host_wait(accelerator: TestAccelerator, case: str) -> None:
    task, every = (adapted(), 1) if case == "frozen" else (mlp(), 4)
    seen = HostWaits()
    loader, strategy = vectors(48, 4), even(7, 2, 3)
    fit(task, loader, [seen], strategy=strategy, accelerator=accelerator, devices=2, accumulate_grad_batches=every)
    steady = seen.counts[len(loader) + 1 :]
    assert steady == steady[:1] * (len(loader) - 1)


@pytest.mark.parametrize(("first", "counted"), [(1, False), (1, True), (6, True)])
def test_changes_of_frozen_weights_by_callbacks(accelerator: TestAccelerator, first: int, counted: bool) -> None:
    """Changes through ``.data`` are exact if they begin with the run: then values are compared in each step."""
    loader, callback = vectors(40, 4), Teaches(first, counted=counted)
    on_host = fit(adapted(), loader, [callback], strategy=even(7, 2, 3))
    on_devices = fit(adapted(), loader, [callback], strategy=even(7, 2, 3), accelerator=accelerator, devices=2)
    assert_same_run(on_host, on_devices)


def test_a_late_change_through_data_is_refused(accelerator: TestAccelerator) -> None:
    """The error comes at the latest when the device has compared all frozen weights by turns."""
    said = "the weight 'weight' of a pipelined Linear was changed through .data after minibatch"
    with pytest.raises(SettingError, match=said):
        fit(
            adapted(),
            vectors(80, 4),
            [Teaches(7, counted=False)],
            strategy=even(7, 2, 3),
            accelerator=accelerator,
            devices=2,
        )


class Validates(Evaluates):
    """Logs nothing, for which Lightning would wait."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.task.compute(batch)


@pytest.mark.parametrize("name", ["gpt", "norms"])
def test_no_batch_of_an_evaluation_makes_the_host_wait(accelerator: TestAccelerator, name: str) -> None:
    seen, strategy = HostWaits(), even(9, 2, 3)
    loader = vectors(20, 4) if name == "norms" else whole_batches(CASES[name][1])
    loader = DataLoader(ConcatDataset([loader.dataset] * 3), loader.batch_size)
    task = Validates(normed() if name == "norms" else made(name))
    quiet_trainer(strategy, accelerator=accelerator, devices=2, callbacks=[seen]).validate(task, loader, verbose=False)
    steady = seen.counts[2:]
    assert len(steady) > 5
    assert steady == steady[:1] * len(steady)


def test_a_device_answers_which_tensors_differ() -> None:
    """NaN equals NaN, and the first difference is found among several dtypes and sizes."""
    nan = float("nan")
    left = [torch.tensor(each, device=place(1)) for each in ([1.0, nan], [], [2], [3.0], [4, 5], True, [0.0] * 300_000)]
    assert DeviceComparison([(each, each.clone()) for each in left]).place() is None
    for changed, value in ((0, 7.0), (2, 7), (3, nan), (4, 7), (5, False), (6, nan)):
        right = [each.clone() for each in left]
        right[changed].view(-1)[-1] = value
        assert DeviceComparison([*zip(left, right, strict=True)]).place() == changed


def test_large_tensors_are_compared_in_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishing a version compares frozen weights, which beside a plan that fits had no room for another quarter."""
    monkeypatch.setattr(values, "_PART", 1 << 12)
    one = torch.zeros(1 << 9, 1 << 9, device=place(1))
    other = one.clone()
    torch.accelerator.reset_peak_memory_stats(1)
    before = torch.accelerator.memory_allocated(1)
    assert unequal([(one, other)]) == []
    assert torch.accelerator.max_memory_allocated(1) - before < 1 << 15
    other.view(-1)[-1] = float("nan")
    assert unequal([(one, other), (one, one)]) == [0]
    assert unequal([(other, other.clone()), (one.t(), other.t())]) == [1]


class ChangesBuffer(L.Callback):
    """Changes a statistic of BatchNorm after a batch, in a way that no counter of torch's sees."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step:
            buffer = next(each for name, each in pl_module.named_buffers() if name.endswith("running_mean"))
            buffer.data.add_(1)


def test_changes_of_buffers_by_callbacks(accelerator: TestAccelerator) -> None:
    """Taken over if no later minibatch is in flight, as in a plain run, and else refused, without a wait."""
    loader, layers = vectors(16, 4), 9

    def run(strategy: Any, step: int = 2, **settings: Any) -> Any:
        return fit(normed(), loader, [ChangesBuffer(step)], strategy=strategy, **settings)

    on_devices: Any = {"accelerator": accelerator, "devices": 2}
    assert_same_run(run(even(layers, 2, 1)), run(even(layers, 2, 1), **on_devices))
    with pytest.raises(
        SettingError, match=r"running_mean' of a pipelined .* was changed outside of forward after mini"
    ):
        run(even(layers, 2, 3), **on_devices)
    with pytest.raises(SettingError, match="was changed outside of forward"):
        run(even(layers, 2, 3), step=len(loader) - 1, **on_devices)  # after which nothing is published in this epoch


@pytest.mark.parametrize("weights", ["stash", "sync", "2bw"])
def test_a_forward_waits_for_those_who_read_earlier_buffers(accelerator: TestAccelerator, weights: str) -> None:
    """In a window, no version is published between minibatches, but buffers are shown."""
    settings: Any = {"accumulate_grad_batches": 4, "max_epochs": 1}
    strategy, on_cpu = (Pinned((0, 2, 4, 6), 3, weights=weights) for _ in range(2))
    record = fit(normed(), vectors(32, 4), strategy=strategy, accelerator=accelerator, devices=4, **settings)
    assert_same_run(fit(normed(), vectors(32, 4), strategy=on_cpu, **settings), record)
