"""One fit of a model in this process, and the comparison of the weights that two fits have come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader


def fit(module: L.LightningModule, batches: Sequence[Any], strategy: Any) -> None:
    """Train ``module`` on each of ``batches`` once, quietly and on the CPU."""
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]  # a list is a dataset


def equality(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    """ "equal" if all tensors of ``expected`` are equal to the bit, else the largest difference."""
    if all(torch.equal(tensor, found[name]) for name, tensor in expected.items()):
        return "equal"
    differs = max((tensor - found[name]).abs().max().item() for name, tensor in expected.items())
    return f"differs by up to {differs:.0e}"
