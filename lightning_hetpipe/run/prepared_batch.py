"""Batches that have gone through all transfer hooks ahead of Lightning's own transfer."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.plugins.precision import Precision

from lightning_hetpipe.lightning_private import move_before_transfer
from lightning_hetpipe.redirect import Redirect


class ReadyBatch:
    """A batch that has gone through all transfer hooks already; Lightning's own transfer lets it pass.

    Not a dataclass: Lightning would look into it.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch


def prepared(batch: Any, dataloader_idx: int, trainer: L.Trainer, precision: Precision) -> Any:
    """``batch`` on the devices, with all hooks, as Lightning would do it."""
    batch = precision.convert_input(batch)
    batch = move_before_transfer(trainer.lightning_module, batch, dataloader_idx)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)


def before_transfer(redirect: Redirect, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """The redirected hook before a transfer, which a batch that was transferred ahead has had."""
    return batch if isinstance(batch, ReadyBatch) else redirect.original(batch, *args, **kwargs)
