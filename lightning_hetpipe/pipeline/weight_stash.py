"""A stage's versions of its weights (law L1).

A version is tensors: the layers themselves exist once for each stage, as a copy of the live ones, and a pass binds the
tensors of its version to their parameters. Nm version buffers are allocated once; publishing a version copies the live
weights into a free one in one fused call. A version whose weights did not change shares its predecessor's buffer. Nm
buffers are enough: ``rules.versions.last_reader``.

Parameters are bound through ``.data``: whoever holds a parameter (an RNN's list of its weights, a plain list, the graph
of a forward whose backward is still to come) sees the version that is bound last. A backward therefore binds its
forward's version again. It takes 0.16 us for each parameter (*measured*), a hundredth of what a layer takes, and a
stage with Nm = 1 never binds anything.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.stage_messages import Flags
from lightning_hetpipe.pipeline.streams import StreamEvent
from lightning_hetpipe.pipeline.values import all_equal
from lightning_hetpipe.rules.versions import last_reader
from lightning_hetpipe.torch_private import foreach_copy_, version_counter


class VersionBuffer:
    """Room for the weights of one version at a time.

    Attributes:
        tensors: One for each parameter.
        flags: What the version says of parameters and modules.
        published: The event behind which the tensors are computed.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self.flags = Flags((), ())
        self.published: StreamEvent | None = None

    def fill(self, live: Sequence[Tensor], flags: Flags) -> None:
        """Copies the live weights and flags."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                foreach_copy_(self.tensors, live)
        else:
            foreach_copy_(self.tensors, live)
        self.flags = flags


class WeightStash:
    """A copy of a stage's ``live`` layers on ``device``, and ``size`` version buffers for its weights.

    Publishing belongs to Lightning's thread, and touches only buffers that no minibatch in flight uses; binding belongs
    to the stage's thread.
    """

    def __init__(self, live: nn.ModuleList, size: int, device: torch.device) -> None:
        self.layers = copy_of(live, device)
        self.parameters = list(self.layers.parameters())
        self._modules = list(self.layers.modules())
        # Weights of a copy each, as layers may want theirs in one block of memory (CUDA's RNNs).
        copies = [self.layers, *(copy_of(live, device) for _ in range(size - 1))]
        self.buffers = [VersionBuffer([parameter.data for parameter in each.parameters()]) for each in copies]
        self.bytes = [parameter.nbytes for parameter in self.parameters]
        self._total_bytes = sum(self.bytes)
        self._versions: dict[int, VersionBuffer] = {}
        self._counters: list[int] = []
        self._bound = self.buffers[0]
        self._bound_flags = self._bound.flags

    @property
    def held_bytes(self) -> int:
        """Bytes of the buffers that hold a version."""
        return self._total_bytes * len(set(map(id, self._versions.values())))

    def begin(self, version: int, live: Sequence[Tensor], flags: Flags) -> None:
        """Forgets every version and publishes ``version``: the pipeline starts empty."""
        self._versions.clear()
        self.publish(version, live, flags)

    def publish(self, version: int, live: Sequence[Tensor], flags: Flags) -> None:
        """Copies the ``live`` weights as ``version``, where they differ from the version before."""
        while self._versions and last_reader(oldest := next(iter(self._versions)), len(self.buffers)) <= version:
            del self._versions[oldest]  # they stand in order
        counters = [version_counter(p) for p in live]
        last = self._versions.get(version - 1)
        if last is not None and self._same(last, live, flags, counters):
            self._versions[version] = last
            return
        used = set(map(id, self._versions.values()))
        free = next(buffer for buffer in self.buffers if id(buffer) not in used)
        free.fill(live, flags)
        self._versions[version] = free
        self._counters = counters

    def bind(self, version: int) -> None:
        """Lets the layers be those of ``version``: their weights, what is frozen, and their modes."""
        buffer = self._versions[version]
        if buffer is not self._bound:
            for parameter, tensor in zip(self.parameters, buffer.tensors, strict=True):
                parameter.data = tensor
            self._bound = buffer
        if buffer.flags is not self._bound_flags:
            if buffer.flags != self._bound_flags:
                for parameter, wanted in zip(self.parameters, buffer.flags.requires_grad, strict=True):
                    parameter.requires_grad_(wanted)
                for module, training in zip(self._modules, buffer.flags.training, strict=True):
                    module.training = training
            self._bound_flags = buffer.flags

    def let_go(self) -> None:
        """Gives the memory of all buffers back, whoever still holds the layers."""
        for buffer in self.buffers:
            buffer.tensors.clear()
        for parameter in self.parameters:
            parameter.data = parameter.data.new_empty(0)

    def buffer(self, version: int) -> VersionBuffer:
        """The buffer that holds ``version``."""
        return self._versions[version]

    def parameter(self, index: int, version: int) -> nn.Parameter:
        """A new leaf with the weights of ``version`` of the live parameter number ``index``."""
        buffer = self._versions[version]
        return nn.Parameter(buffer.tensors[index].detach(), buffer.flags.requires_grad[index])

    def _same(self, last: VersionBuffer, live: Sequence[Tensor], flags: Flags, counters: list[int]) -> bool:
        """Return True if ``last`` still equals the ``live`` weights. Counters miss changes through ``.data``."""
        if last.flags != flags or counters != self._counters:
            return False
        return all_equal([(held, now.detach().to(held.device)) for held, now in zip(last.tensors, live, strict=True)])


M = TypeVar("M", bound=nn.Module)


def copy_of(live: M, device: torch.device | None) -> M:
    """A copy of ``live`` on ``device``; with None one of scratch, whose parameters share the live ones' memory, but
    not the hooks that users have put on them.

    Raises:
        SettingError: where a layer holds what cannot be copied.
    """
    # What torch.nn.utils computes from parameters before each forward (as weight norm does) is no leaf, and only leaves
    # can be deep-copied; the copy computes its own.
    computed = [v for m in live.modules() for v in vars(m).values() if isinstance(v, Tensor) and not v.is_leaf]
    copies: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in computed}
    if device is None:
        for parameter in live.parameters():
            copies[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
    try:
        made = copy.deepcopy(live, copies)
        return made if device is None else made.to(device)
    except Exception as error:
        raise SettingError(
            f"the pipelined layers cannot be copied for weight stashing ({error}); give them only attributes that"
            " copy.deepcopy can copy"
        ) from error
