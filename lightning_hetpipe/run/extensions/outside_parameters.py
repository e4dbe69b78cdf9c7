"""Tensors outside the pieces, which must not change while minibatches are in flight (laws L1 and L9).

Buffers and frozen parameters of the LightningModule that no stage owns have no versions: ``training_step`` reads the
live ones. That is exact as long as nobody changes them in between; where somebody does, training stops and says who.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.run.lifecycle import Extension
from lightning_hetpipe.torch_private.tensors import version_counter

MOST_NAMED = 12
"""Most modules that a message names."""


class OutsideParameters(Extension):
    """The parameters and buffers of ``module`` outside every piece, and how often each was changed so far.

    Those of metrics are left out: their changes are recorded, and replayed.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        self._inside: set[int] = set()
        self._pieces: list[str] = []
        self._owners: list[tuple[str, nn.Module]] = []
        self._versioned: Callable[[], Collection[int]] = tuple
        self._is_in_flight: Callable[[], bool] = lambda: True
        self._way_out = "set in_flight=1"
        self._begin()

    def leave_out(
        self,
        roots: Collection[nn.Module],
        versioned: Callable[[], Collection[int]],
        is_in_flight: Callable[[], bool],
        way_out: str,
    ) -> None:
        """Forget what is inside ``roots``, the pieces, and what is ``versioned``: the ``id`` of each such tensor.

        ``is_in_flight`` tells whether minibatches are in flight, ``way_out`` what lets such tensors change.
        """
        self._versioned, self._is_in_flight, self._way_out = versioned, is_in_flight, way_out
        self._exempt = versioned()
        self._inside = {id(part) for root in roots for part in root.modules()}
        self._pieces = [name for name, part in self._module.named_modules() if part in roots]
        self._owners = [(name, part) for name, part in self._owners if id(part) not in self._inside]

    def check_step(self) -> None:
        """Refuse what ``training_step`` itself has changed since this was made; another device is no change."""
        self._check("was changed by training_step", in_step=True)
        self._seen = self._states()

    def continues(self, version: int) -> None:
        """Refuse what was changed while later minibatches had read it already."""
        if self._is_in_flight():
            self._check(f"was changed after minibatch {version}")
        else:
            self._begin()

    def emptied(self, version: int) -> None:
        """Take all as it is now; there may be other modules than before."""
        self._begin()

    def _begin(self) -> None:
        self._exempt = self._versioned()
        self._owners = [
            (name, part)
            for name, part in self._module.named_modules()
            if id(part) not in self._inside and not isinstance(part, Metric)
        ]
        self._seen = self._states()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, part in self._owners:
            for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
                if id(tensor) not in self._exempt:
                    yield (f"{prefix}.{name}" if prefix else name), tensor

    def _states(self) -> dict[str, tuple[int, int, float]]:
        """States that tell of each tensor whether it was replaced or changed.

        As changes through ``.data`` are not counted, a sum of values is part of that.
        """
        found = dict(self._tensors())
        sums = _fetched([_sum(tensor) for tensor in found.values()])
        self._held = found  # so that no other tensor can have the id of one
        return {
            name: (id(tensor), version_counter(tensor), value)
            for (name, tensor), value in zip(found.items(), sums, strict=True)
        }

    def _check(self, what: str, *, in_step: bool = False) -> None:
        now = self._states()
        if changed := [(name, self._held[name]) for name, state in now.items() if state != self._seen.get(name)]:
            owners = {name: self._owner(name) for name, _ in changed}
            name, tensor = next((each for each in changed if not owners[each[0]]), changed[0])  # the worst comes first
            if owners[name]:
                way_out = self._naming(set(owners.values()))
                if in_step and isinstance(tensor, nn.Parameter):
                    way_out = f"change it in on_train_batch_end, and {way_out}"
            else:
                way_out = "move it into a pipelined module"
            raise SettingError(
                f"'{name}', which lies outside the pipelined modules, {what} while later minibatches are in flight,"
                f" so that they would see it at a moment that depends on timing; {self._way_out}, or {way_out}"
            )

    def _naming(self, owners: Collection[str]) -> str:
        """Say how to pipeline ``owners``, paths of modules, as well."""
        also = [name for name, _ in self._module.named_modules() if name in owners]
        modules = [*self._pieces, *also]
        named = f" (module={modules!r})" if len(modules) <= MOST_NAMED else ""
        return (
            f"pipeline {' and '.join(map(repr, also))}, too{named}, if training_step calls"
            f" {'them' if len(also) > 1 else 'it'}; averages of weights belong in a callback, such as Lightning's"
            " EMAWeightAveraging"
        )

    def _owner(self, name: str) -> str:
        """The outermost module with the tensor ``name`` that can be a further piece; empty if there is none."""
        parts = name.split(".")[:-1]
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            if not any(f"{piece}.".startswith(f"{path}.") for piece in self._pieces):
                return path if any(True for _ in self._module.get_submodule(path).parameters()) else ""
        return ""


def _sum(tensor: Tensor) -> Tensor:
    """Sum all values of a small tensor, some thousand of a large one: changes are of the whole, as a rule."""
    flat = tensor.detach().flatten() if tensor.is_contiguous() else tensor.detach()[:1].flatten()
    some = flat[:: max(1, flat.numel() // 4096)]
    weights = torch.arange(1, some.numel() + 1, device=some.device)
    value = (some if some.dtype in (torch.float64, torch.int64) else some.float()) * weights
    return value.nan_to_num().sum()


def _fetched(sums: Sequence[Tensor]) -> list[float]:
    """Fetch the values of ``sums``; each device is waited for once, and not for each tensor."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, value in enumerate(sums):
        alike.setdefault((value.device, value.dtype), []).append(index)
    found = [0.0] * len(sums)
    for indices in alike.values():
        for index, value in zip(indices, torch.stack([sums[index] for index in indices]).tolist(), strict=True):
            found[index] = value
    return found
