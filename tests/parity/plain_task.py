"""A task that needs nothing of ours, and a program that resumes it where ``import lightning_hetpipe`` fails."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    sys.modules["lightning_hetpipe"] = None  # type: ignore[assignment]  # whoever imports it fails

import lightning as L


class PlainTask(L.LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def plain_loader() -> DataLoader[Any]:
    chance = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(22, 6, generator=chance), torch.randint(3, (22,), generator=chance)), 4)


def resume(checkpoint: str, **settings: Any) -> L.Trainer:
    """Trains the epoch after the one that ``checkpoint`` ends."""
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(PlainTask(width=12), plain_loader(), ckpt_path=checkpoint)
    return trainer


if __name__ == "__main__":
    try:
        import lightning_hetpipe  # noqa: F401
    except ImportError:
        pass
    else:
        raise AssertionError("this is to show what works without it")
    checkpoint, resumed = sys.argv[1:]
    torch.set_num_threads(1)
    contents = torch.load(checkpoint, weights_only=True)
    module = PlainTask.load_from_checkpoint(checkpoint)
    assert module.hparams["width"] == 12
    assert all(torch.equal(value, contents["state_dict"][name]) for name, value in module.state_dict().items())
    resume(checkpoint).save_checkpoint(resumed)
