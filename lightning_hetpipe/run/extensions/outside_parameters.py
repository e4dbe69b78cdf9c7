"""What lies outside the pieces must not change while minibatches are in flight (laws L1 and L9).

Buffers and frozen parameters of the LightningModule that no stage owns have no versions: ``training_step`` reads the
live ones. That is exact as long as nobody changes them in between; where somebody does, training stops and says who.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.torch_private import version_counter


class OutsideParameters:
    """The parameters and buffers of ``module`` outside every piece, and how often each was changed so far.

    Those of metrics are left out: their changes are recorded, and replayed.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        self._inside: set[int] = set()
        self.begin()

    def begin(self, versioned: Collection[int] = ()) -> None:
        """Everything is as it should be now; there may be other modules than before.

        Args:
            versioned: The ``id`` of tensors that have versions, and may change.
        """
        self._versioned = versioned
        self._owners = [
            (name, part)
            for name, part in self._module.named_modules()
            if id(part) not in self._inside and not isinstance(part, Metric)
        ]
        self._seen = self._states()

    def leave_out(self, roots: Collection[nn.Module], versioned: Collection[int]) -> None:
        """Forgets what is inside ``roots``, the pieces, and what has versions."""
        self._versioned = versioned
        self._inside = {id(part) for root in roots for part in root.modules()}
        self._owners = [(name, part) for name, part in self._owners if id(part) not in self._inside]

    def check_step(self) -> None:
        """Refuses what ``training_step`` itself has changed since :meth:`begin`."""
        self._check("was changed by training_step")

    def check(self, minibatch: int) -> None:
        """Refuses what was changed since :meth:`begin`, while later minibatches had read it already."""
        self._check(f"was changed after minibatch {minibatch}")

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, part in self._owners:
            for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
                if id(tensor) not in self._versioned:
                    yield (f"{prefix}.{name}" if prefix else name), tensor

    def _states(self) -> dict[str, tuple[Tensor, int, int, float]]:
        """Of each tensor itself, so that no other one can have its id, and what tells whether it was changed.

        As changes through ``.data`` are not counted, that is also a sum of values.
        """
        found = dict(self._tensors())
        sums = _fetched([_sum(tensor) for tensor in found.values()])
        return {
            name: (tensor, version_counter(tensor), tensor.data_ptr(), value)
            for (name, tensor), value in zip(found.items(), sums, strict=True)
        }

    def _check(self, what: str) -> None:
        for name, (tensor, *state) in self._states().items():
            seen, *before = self._seen.get(name, (None,))
            if seen is not tensor or before != state:
                raise SettingError(
                    f"'{name}', which lies outside the pipelined modules, {what} while later minibatches are in flight,"
                    " so that they would see it at a moment that depends on timing; set in_flight=1, or move it into"
                    " a pipelined module"
                )


def _sum(tensor: Tensor) -> Tensor:
    """Of all values in a small tensor, of some thousand in a large one: changes are of the whole, as a rule."""
    flat = tensor.detach().flatten() if tensor.is_contiguous() else tensor.detach()[:1].flatten()
    some = flat[:: max(1, flat.numel() // 4096)]
    weights = torch.arange(1, some.numel() + 1, device=some.device)
    value = (some if some.dtype in (torch.float64, torch.int64) else some.float()) * weights
    return value.nan_to_num().sum()


def _fetched(sums: Sequence[Tensor]) -> list[float]:
    """Their values; each device is waited for once, and not for each tensor."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, value in enumerate(sums):
        alike.setdefault((value.device, value.dtype), []).append(index)
    found = [0.0] * len(sums)
    for indices in alike.values():
        for index, value in zip(indices, torch.stack([sums[index] for index in indices]).tolist(), strict=True):
            found[index] = value
    return found
