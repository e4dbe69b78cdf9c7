"""VGG-19 and ResNet-152, the HetPipe paper's models, and AlexNet: work and bytes of layers, counted, not computed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from lightning_hetpipe.planning.model.catalogue import gpus as catalogue
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times, UserBytes
from lightning_hetpipe.torch_private.modes import ThreadDispatchMode
from lightning_hetpipe.torch_private.tensors import pytree

BATCH = 32
"""Images in a minibatch, as in the paper."""

SIZE, CLASSES = 224, 1000

VGG_19 = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))
"""Channels and convolutions of each block; a pooling follows each."""

ALEXNET = ((64, 11, 4, True), (192, 5, 1, True), (384, 3, 1, False), (256, 3, 1, False), (256, 3, 1, True))
"""Channels, kernel and stride of each convolution, and whether a pooling follows."""

RESNET_152 = ((64, 3), (128, 8), (256, 36), (512, 3))
"""Channels and bottleneck blocks of each group; all but the first begin with a stride of 2."""

EXPANSION = 4
"""Ratio of a bottleneck block's outputs to its channels."""

PRECISION = "32"

MOVED_BY_STEP = 5
"""Weights, gradients and momentum are read, weights and momentum written."""


class Bottleneck(nn.Module):
    """Residual block of three convolutions, the second with the stride, as torchvision has it."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * channels
        self.inner = nn.Sequential(
            *_normalised(inputs, channels, 1),
            nn.ReLU(inplace=True),
            *_normalised(channels, channels, 3, stride),
            nn.ReLU(inplace=True),
            *_normalised(channels, outputs, 1),
        )
        changes = stride > 1 or inputs != outputs
        self.shortcut = nn.Sequential(*_normalised(inputs, outputs, 1, stride)) if changes else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu_(self.inner(inputs) + self.shortcut(inputs))


class Counted(NamedTuple):
    """A layer: its bytes, the FLOP of its forward and of its backward, and the bytes that both move, for one minibatch.

    Moved are the inputs and outputs of each operator, as without fusion and caches.
    """

    layer: LayerBytes
    forward: int
    backward: int
    moved: int


class _Moved(ThreadDispatchMode):
    """Counts the bytes of inputs and outputs of all operators but views."""

    nbytes = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = operator(*args, **(kwargs or {}))
        if not operator.is_view:
            self.nbytes += sum(
                each.nbytes for each in pytree.tree_leaves((args, kwargs, output)) if isinstance(each, Tensor)
            )
        return output


def _normalised(inputs: int, outputs: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return (
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


def vgg_19() -> nn.Sequential:
    """VGG-19 on the current default device; a layer is a convolution or a Linear with what follows it."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    inputs = 3
    for block, (channels, count) in enumerate(VGG_19, start=1):
        for number in range(1, count + 1):
            parts: list[nn.Module] = [nn.Conv2d(inputs, channels, 3, padding=1), nn.ReLU(inplace=True)]
            layers[f"conv{block}_{number}"] = nn.Sequential(*parts, *[nn.MaxPool2d(2)] * (number == count))
            inputs = channels
    layers |= _classifier(inputs * (SIZE >> len(VGG_19)) ** 2)
    return nn.Sequential(layers)


def alexnet() -> nn.Sequential:
    """AlexNet, as torchvision has it, on the current default device; layers as VGG-19's."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    inputs = 3
    for number, (channels, kernel, stride, pooled) in enumerate(ALEXNET, start=1):
        conv = nn.Conv2d(inputs, channels, kernel, stride, kernel // 2 if stride == 1 else 2)
        layers[f"conv{number}"] = nn.Sequential(conv, nn.ReLU(inplace=True), *[nn.MaxPool2d(3, 2)] * pooled)
        inputs = channels
    layers |= _classifier(inputs * 6**2)
    return nn.Sequential(layers)


def _classifier(inputs: int) -> OrderedDict[str, nn.Module]:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (width, outputs) in enumerate(pairwise((inputs, 4096, 4096, CLASSES)), start=6):
        before = [nn.Flatten()] * (number == 6)
        after = [nn.ReLU(inplace=True), nn.Dropout()] * (outputs != CLASSES)
        layers[f"fc{number}"] = nn.Sequential(*before, nn.Linear(width, outputs), *after)
    return layers


def resnet_152() -> nn.Sequential:
    """ResNet-152 on the current default device; a layer is a residual block, or what is before and behind them."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["stem"] = nn.Sequential(*_normalised(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    inputs = 64
    for group, (channels, count) in enumerate(RESNET_152, start=2):
        for number in range(1, count + 1):
            layers[f"conv{group}_{number}"] = Bottleneck(inputs, channels, 2 if number == 1 and group > 2 else 1)
            inputs = EXPANSION * channels
    layers["head"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))
    return nn.Sequential(layers)


MODELS: dict[str, Callable[[], nn.Sequential]] = {"VGG-19": vgg_19, "ResNet-152": resnet_152}
"""Those of the paper."""

OTHERS: dict[str, Callable[[], nn.Sequential]] = {"AlexNet": alexnet}


@cache
def counted(model: str) -> tuple[Counted, ...]:
    """Count the layers of ``model`` on tensors without data."""
    with torch.device("meta"):
        layers = (MODELS | OTHERS)[model]()
        values = torch.empty(BATCH, 3, SIZE, SIZE)
    found = []
    for index, (name, layer) in enumerate(layers.named_children()):
        each, values = _counted(name, layer, values.requires_grad_(index > 0), is_first=index == 0)
        found.append(each)
    return tuple(found)


def profile(model: str, gpus: Sequence[str]) -> Profile:
    """Profile of ``model`` on ``gpus`` of the catalogue, all of whose times are estimates.

    A layer takes its FLOP over what :meth:`~lightning_hetpipe.planning.model.catalogue.Gpu.speed` says; a step of SGD
    with momentum moves :data:`MOVED_BY_STEP` times the bytes of the weights.
    """
    layers = counted(model)
    times = {}
    for name in gpus:
        gpu = catalogue()[name]
        times[name] = [
            Times(
                each.forward / gpu.speed(PRECISION),
                each.backward / gpu.speed(PRECISION),
                MOVED_BY_STEP * each.layer.parameters / gpu.bandwidth,
            )
            for each in layers
        ]
    images, scores = BATCH * 3 * SIZE**2 * 4, BATCH * CLASSES * 4
    return Profile(model, BATCH, [each.layer for each in layers], times, {}, user=UserBytes(batch=images, loss=scores))


def _counted(name: str, layer: nn.Module, given: Tensor, is_first: bool) -> tuple[Counted, Tensor]:
    weights = {id(each.untyped_storage()) for each in layer.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in weights:
            kept[id(storage)] = storage
        return tensor

    keep(given)
    moved = _Moved()
    with FlopCounterMode(display=False) as forward, moved, saved_tensors_hooks(keep, lambda each: each):
        output = keep(layer(given))
    gradient = torch.empty_like(output)
    with FlopCounterMode(display=False) as backward, moved:
        torch.autograd.backward([output], [gradient])
    counted = LayerBytes(
        name,
        sum(each.nbytes for each in layer.parameters()),
        sum(storage.nbytes() for storage in kept.values()),
        output.nbytes,
        given.nbytes if is_first else 0,
        any(isinstance(each, nn.BatchNorm2d) for each in layer.modules()),
    )
    return Counted(counted, forward.get_total_flops(), backward.get_total_flops(), moved.nbytes), output.detach()
