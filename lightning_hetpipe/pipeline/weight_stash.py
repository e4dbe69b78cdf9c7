"""A stage's versions of its weights (law L1).

Nm places ("slots") are made once. Each holds a copy of the stage's layers; publishing a version copies the live weights
into a free slot in one fused call. A version whose weights did not change shares its predecessor's slot. Nm slots are
enough: ``rules.versions.last_reader``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.stage_messages import Flags
from lightning_hetpipe.pipeline.values import all_equal
from lightning_hetpipe.rules.versions import last_reader
from lightning_hetpipe.torch_private import foreach_copy_, version_counter


class VersionBuffer:
    """One copy of a stage's layers, with the weights of one version at a time."""

    def __init__(self, live: nn.ModuleList, device: torch.device) -> None:
        self.layers = copy_of(live, device)
        self.modules = list(self.layers.modules())
        self.parameters = list(self.layers.parameters())
        self.flags: Flags | None = None

    def take(self, live: Sequence[Tensor], flags: Flags) -> None:
        """Copies the live weights, and where they changed the flags."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                foreach_copy_(self.parameters, live)
        else:
            foreach_copy_(self.parameters, live)
        if self.flags != flags:
            for parameter, wanted in zip(self.parameters, flags.requires_grad, strict=True):
                parameter.requires_grad_(wanted)
            for module, training in zip(self.modules, flags.training, strict=True):
                module.training = training
            self.flags = flags


class WeightStash:
    """The versions of one stage, over ``slots`` copies of its ``live`` layers on ``device``.

    Publishing belongs to Lightning's thread, and touches only slots that no minibatch in flight uses.
    """

    def __init__(self, live: nn.ModuleList, slots: int, device: torch.device) -> None:
        self.slots = [VersionBuffer(live, device) for _ in range(slots)]
        self.bytes = [parameter.nbytes for parameter in self.slots[0].parameters]
        self._slot_bytes = sum(self.bytes)
        self._place: dict[int, int] = {}
        self._counters: list[int] = []

    @property
    def held_bytes(self) -> int:
        """Of the slots that hold a version."""
        return self._slot_bytes * len(set(self._place.values()))

    def begin(self, version: int, live: Sequence[Tensor], flags: Flags) -> None:
        """Forgets every version and publishes ``version``: the pipeline starts empty."""
        self._place.clear()
        self.publish(version, live, flags)

    def publish(self, version: int, live: Sequence[Tensor], flags: Flags) -> None:
        """Copies the ``live`` weights as ``version``, where they differ from the version before."""
        while self._place and last_reader(oldest := next(iter(self._place)), len(self.slots)) <= version:
            del self._place[oldest]  # they stand in order
        counters = [version_counter(p) for p in live]
        last = self._place.get(version - 1)
        if last is not None and self._same(last, live, flags, counters):
            self._place[version] = last
            return
        free = next(index for index in range(len(self.slots)) if index not in self._place.values())
        self.slots[free].take(live, flags)
        self._place[version] = free
        self._counters = counters

    def let_go(self) -> None:
        """Gives the slots' memory back, whoever still holds their modules."""
        for slot in self.slots:
            for parameter in slot.parameters:
                parameter.data = parameter.data.new_empty(0)

    def place(self, version: int) -> int:
        """The index of the slot that holds ``version``."""
        return self._place[version]

    def parameter(self, index: int, version: int) -> nn.Parameter:
        """The copy of the live parameter number ``index`` in ``version``."""
        return self.slots[self._place[version]].parameters[index]

    def _same(self, last: int, live: Sequence[Tensor], flags: Flags, counters: list[int]) -> bool:
        """Whether the ``live`` weights are still what slot ``last`` holds. Counters miss changes through ``.data``."""
        slot = self.slots[last]
        if slot.flags != flags or counters != self._counters:
            return False
        pairs = zip(slot.parameters, live, strict=True)
        return all_equal([(held.detach(), now.detach().to(held.device)) for held, now in pairs])


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
