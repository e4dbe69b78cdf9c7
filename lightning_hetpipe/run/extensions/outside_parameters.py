"""Tensors outside the pieces, which must not change while minibatches are in flight (laws L1 and L9).

Buffers and frozen parameters of the LightningModule that no stage owns have no versions: ``training_step`` reads the
live tensors. If they change, training stops with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.run.lifecycle import Extension
from lightning_hetpipe.torch_private.tensors import version_counter

MOST_NAMED = 12
"""Largest number of modules that a message names."""

States = Mapping[str, tuple[Tensor, int, float]]
"""Tensors by name, with a count of in-place changes, and a sum of values: ``.data`` hides changes from the count."""


@dataclass(eq=False)
class OutsideParameters(Extension):
    """The parameters and buffers of ``module`` outside the ``pieces``, and their changes so far. Metrics are left out:
    their changes are recorded and replayed. ``versioned`` returns the ``id`` of each tensor that has versions. The
    error ends with ``way_out``."""

    module: L.LightningModule
    pieces: Collection[nn.Module] = ()
    versioned: Callable[[], Collection[int]] = tuple
    is_in_flight: Callable[[], bool] = lambda: True
    way_out: str = "set in_flight=1"

    def __post_init__(self) -> None:
        self._inside = {id(part) for piece in self.pieces for part in piece.modules()}
        self._names = [name for name, part in self.module.named_modules() if part in self.pieces]
        self._begin()

    def check_step(self, before: States) -> None:
        """Refuse changes by ``training_step`` itself since ``before``. A move to another device is no change."""
        self._check(before, "was changed by training_step", in_step=True)

    def continues(self, version: int) -> None:
        """Refuse changes of tensors that later minibatches had read already."""
        if self.is_in_flight():
            self._check(self.seen, f"was changed after minibatch {version}")
        else:
            self._begin()

    def emptied(self, version: int) -> None:
        """Take the present tensors as unchanged. Modules may differ from before."""
        self._begin()

    def _begin(self) -> None:
        self._exempt = self.versioned()
        self._owners = [
            (name, part)
            for name, part in self.module.named_modules()
            if id(part) not in self._inside and not isinstance(part, Metric)
        ]
        self.seen = self._states()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, part in self._owners:
            for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
                if id(tensor) not in self._exempt:
                    yield (f"{prefix}.{name}" if prefix else name), tensor

    def _states(self) -> States:
        found = dict(self._tensors())
        sums = _fetched([_sum(tensor) for tensor in found.values()])
        return {
            name: (tensor, version_counter(tensor), value)
            for (name, tensor), value in zip(found.items(), sums, strict=True)
        }

    def _check(self, before: States, what: str, *, in_step: bool = False) -> None:
        changed = {
            name: tensor
            for name, (tensor, *numbers) in self._states().items()
            if name not in before or tensor is not before[name][0] or numbers != [*before[name][1:]]
        }
        if changed:
            owners = {name: self._owner(name) for name in changed}
            name = next((each for each in changed if not owners[each]), next(iter(changed)))  # the worst comes first
            if owners[name]:
                way_out = self._naming(set(owners.values()))
                if in_step and isinstance(changed[name], nn.Parameter):
                    way_out = f"change it in on_train_batch_end, and {way_out}"
            else:
                way_out = "move it into a pipelined module"
            raise SettingError(
                f"'{name}', which lies outside the pipelined modules, {what} while later minibatches are in flight,"
                f" so that they would see it at a moment that depends on timing; {self.way_out}, or {way_out}"
            )

    def _naming(self, owners: Collection[str]) -> str:
        """Describe how to pipeline the modules at the paths ``owners`` as well."""
        also = [name for name, _ in self.module.named_modules() if name in owners]
        modules = [*self._names, *also]
        named = f" (module={modules!r})" if len(modules) <= MOST_NAMED else ""
        return (
            f"pipeline {' and '.join(map(repr, also))}, too{named}, if training_step calls"
            f" {'them' if len(also) > 1 else 'it'}; averages of weights belong in a callback, such as Lightning's"
            " EMAWeightAveraging"
        )

    def _owner(self, name: str) -> str:
        """Return the outermost module with the tensor ``name`` that can be a further piece, or an empty string."""
        parts = name.split(".")[:-1]
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            if not any(f"{piece}.".startswith(f"{path}.") for piece in self._names):
                return path if any(True for _ in self.module.get_submodule(path).parameters()) else ""
        return ""


def _sum(tensor: Tensor) -> Tensor:
    """Sum all values of a small tensor, or some thousands of a large one: most changes concern the whole tensor."""
    flat = tensor.detach().flatten() if tensor.is_contiguous() else tensor.detach()[:1].flatten()
    some = flat[:: max(1, flat.numel() // 4096)]
    weights = torch.arange(1, some.numel() + 1, device=some.device)
    value = (some if some.dtype in (torch.float64, torch.int64) else some.float()) * weights
    return value.nan_to_num().sum()


def _fetched(sums: Sequence[Tensor]) -> list[float]:
    """Fetch the values of ``sums``, with one wait for each device."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, value in enumerate(sums):
        alike.setdefault((value.device, value.dtype), []).append(index)
    found = [0.0] * len(sums)
    for indices in alike.values():
        for index, value in zip(indices, torch.stack([sums[index] for index in indices]).tolist(), strict=True):
            found[index] = value
    return found
