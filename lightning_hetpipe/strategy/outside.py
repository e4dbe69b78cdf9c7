"""What lies outside the pieces must not change while minibatches are in flight (laws L1 and L9).

Parameters and buffers of the LightningModule that no stage owns have no versions: ``training_step`` reads the live
ones. That is exact as long as nobody changes them in between; where somebody does, training stops and says who.
"""

from __future__ import annotations

from collections.abc import Collection

import lightning as L
from torch import Tensor
from torchmetrics import Metric

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.private import version_counter


class Outside:
    """The parameters and buffers of ``module`` outside every piece, and how often each was changed so far."""

    def __init__(self, module: L.LightningModule) -> None:
        metrics = {id(part) for m in module.modules() if isinstance(m, Metric) for part in m.modules()}
        self._tensors: dict[str, Tensor] = {}
        for prefix, part in module.named_modules():
            if id(part) not in metrics:  # their changes are recorded, and replayed
                for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
                    self._tensors[f"{prefix}.{name}" if prefix else name] = tensor
        self._changes: dict[str, int] = {}
        self.begin()

    def begin(self) -> None:
        """Everything is as it should be now."""
        self._changes = {name: version_counter(tensor) for name, tensor in self._tensors.items()}

    def leave_out(self, inside: Collection[int]) -> None:
        """Forgets tensors (by ``id``) that stages own."""
        self._tensors = {name: tensor for name, tensor in self._tensors.items() if id(tensor) not in inside}

    def check_step(self) -> None:
        """Refuses what ``training_step`` itself has changed since :meth:`begin`."""
        self._check("was changed by training_step")

    def check(self, minibatch: int) -> None:
        """Refuses what was changed since :meth:`begin`, while later minibatches had read it already."""
        self._check(f"was changed after minibatch {minibatch}")

    def _check(self, what: str) -> None:
        for name, tensor in self._tensors.items():
            if version_counter(tensor) != self._changes[name]:
                raise SettingError(
                    f"'{name}', which lies outside the pipelined modules, {what} while later minibatches are in flight,"
                    " so that they would see it at a moment that depends on timing; set in_flight=1, or move it into"
                    " the pipelined nn.Sequential"
                )
