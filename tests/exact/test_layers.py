"""Layers with habits of their own: buffers, parametrizations, modes, unused weights, strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.exact.pipelines import Pinned, even
from tests.exact.running import assert_equal, expect, fit
from tests.oracle import Batch, Outputs, Recipe
from tests.support.marks import quick, slow_except
from tests.support.models import ADAMW, CLASSES, SGD, Pieces, Task, convnet, images, vectors

LENGTH = 5  # batches of an epoch of 18 samples in fours


class Centred(nn.Module):
    """Follows the mean of its inputs in a buffer, which its backward pass needs, too."""

    mean: Tensor

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.in_place:
                self.mean.lerp_(x.mean(0), 0.1)
            else:
                self.mean = torch.lerp(self.mean, x.mean(0), 0.1)
        return x * self.mean


class Sometimes(nn.Module):
    """Uses one of two branches, as its input has it, and a third one never: no gradient is not a zero gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.left(x) if x.sum() > 0 else self.right(x)
        return y


class Strided(nn.Module):
    """Leaves its values where they are and their strides otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        return x.t().contiguous().t()


class Noted(nn.Module):
    """A layer with a parameter that stands alone, a constant that is no buffer, and a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))
        self.factor = 0.5

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.gain * self.factor

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        return self.scaled(x) + self.scaled(x) if again else x


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "buffer changed in place": lambda: [Centred(in_place=True)],
    "buffer replaced": lambda: [Centred(in_place=False)],
    "cumulative batch norm": lambda: [nn.BatchNorm1d(8, momentum=None), nn.ReLU()],
    "batch norm without statistics": lambda: [nn.BatchNorm1d(8, track_running_stats=False)],
    "weight norm": lambda: [nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))],
    "spectral norm": lambda: [nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))],
    "unused weights": lambda: [Sometimes()],
    "strides": lambda: [Strided(), nn.Linear(8, 8), Strided(), nn.ReLU(inplace=True)],
    "views": lambda: [nn.Unflatten(1, (2, 4)), nn.Flatten(), nn.ReLU(inplace=True)],
    "in place after a linear layer": lambda: [nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Identity()],
    "own code": lambda: [Noted()],
}


def with_layers(name: str, recipe: Recipe = ADAMW) -> Task:
    layers = LAYERS[name]()
    return Task(nn.Sequential(nn.Linear(6, 8), *layers, nn.Tanh(), nn.Linear(8, CLASSES)), recipe)


@quick("4-buffer replaced", "4-cumulative batch norm", "4-weight norm", "4-unused weights", "4-views", "4-own code")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("in_flight", [1, 4])
def test_layers(name: str, in_flight: int) -> None:
    task, loader = with_layers(name), vectors(18, 4)
    expected = expect(task, loader, in_flight, clip_norm=1.0)
    layers = len(task.net) - (2 if name == "strides" else 0)  # export has each Strided in the layer before it
    record = fit(task, loader, strategy=even(layers, layers, in_flight), gradient_clip_val=1.0)
    assert_equal(expected, record)


def test_unused_weights_stay_as_they_are() -> None:
    # AdamW would decay them if they were given gradients of zeros.
    task, loader = with_layers("unused weights"), vectors(18, 4)
    before = task.get_parameter("net.1.never.weight").detach().clone()
    record = fit(task, loader, strategy=even(4, 2, 3))
    assert torch.equal(before, task.get_parameter("net.1.never.weight"))
    used = [
        {name.split(".")[2] for name in gradients if name.startswith("net.1.")}
        for gradients in record.gradients.values()
    ]
    assert {"left"} in used
    assert {"right"} in used


class Frozen(Task):
    """Freezes the statistics of a BatchNorm after the first epoch, as fine-tuning does."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            freeze(LENGTH, self)


def freeze(p: int, task: Task) -> None:
    if p == LENGTH:
        task.net[1].eval()


@pytest.mark.parametrize("in_flight", slow_except([1, 4], 4))
def test_a_layer_that_goes_to_eval_mode(in_flight: int) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))
    task, loader = Frozen(net, SGD), vectors(18, 4)
    expected = expect(task, loader, in_flight, edit=freeze)
    assert_equal(expected, fit(task, loader, strategy=even(4, 3, in_flight)))


@pytest.mark.parametrize("in_flight", slow_except([1, 4], 4))
def test_channels_last(in_flight: int) -> None:
    """Strides of weights and inputs choose kernels, which differ in the last bits."""

    class ChannelsLast(Task):
        def compute(self, batch: Batch) -> Outputs:
            x, y = batch
            return super().compute((x.to(memory_format=torch.channels_last), y))

    task, loader = ChannelsLast(convnet().net, SGD), images(18, 4)
    for parameter in task.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    strides = {name: parameter.stride() for name, parameter in task.named_parameters()}
    assert_equal(expect(task, loader, in_flight), fit(task, loader, strategy=even(9, 3, in_flight)))
    assert {name: parameter.stride() for name, parameter in task.named_parameters()} == strides


class Shared(Pieces):
    """One layer stands in the encoder and in the decoder."""

    def __init__(self) -> None:
        super().__init__(ADAMW)
        layer = nn.Linear(8, 8)
        self.encoder.append(layer)
        self.decoder.insert(0, layer)


@quick("cuts1", "cuts3")
@pytest.mark.parametrize("cuts", [(0,), (0, 4), (0, 2, 5), (0, 3, 5, 6)])
def test_a_layer_shared_by_two_pieces(cuts: tuple[int, ...]) -> None:
    task, loader = Shared(), vectors(18, 4)
    assert_equal(expect(task, loader, 3), fit(task, loader, strategy=Pinned(cuts, 3)))


def test_the_number_of_torch_threads_does_not_depend_on_the_stages() -> None:
    """Sums over many values differ between one thread and two; runs on any number of stages must not."""
    torch.set_num_threads(2)
    results: list[Any] = []
    for stages in (1, 3):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES))
        results.append(fit(Task(net), vectors(1024, 256), strategy=even(5, stages, 3)))
        assert torch.get_num_threads() == 2
    assert_equal(results[0], results[1])
