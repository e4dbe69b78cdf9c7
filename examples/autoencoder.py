"""The autoencoder of Lightning's docs, two modules in one pipeline of two stages: `python examples/autoencoder.py`."""

import argparse
from collections.abc import Sequence

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.demo import Digits


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l1 = nn.Sequential(nn.Linear(8 * 8, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.l1(x)
        return z


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l1 = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8 * 8))

    def forward(self, z: Tensor) -> Tensor:
        x: Tensor = self.l1(z)
        return x


class LitAutoEncoder(L.LightningModule):
    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, _ = batch
        x = x.view(x.size(0), -1)
        z = self.encoder(x)
        x_hat = self.decoder(z)
        loss = F.mse_loss(x_hat, x)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, _ = batch
        x = x.view(x.size(0), -1)
        x_hat = self.decoder(self.encoder(x))
        self.log("test_loss", F.mse_loss(x_hat, x))
        # 1 is what the mean image of the batch would get, and 0 is perfect.
        self.log("test_unexplained", F.mse_loss(x_hat, x) / F.mse_loss(x.mean(0).expand_as(x), x))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Staleness in a pipeline acts as momentum: hence the low first beta.
        return torch.optim.Adam(self.parameters(), lr=1e-3, betas=(0.5, 0.999))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-steps", type=int, default=2000)
    max_steps: int = parser.parse_args(arguments).max_steps

    L.seed_everything(1)
    model, data = LitAutoEncoder(Encoder(), Decoder()), Digits()
    strategy = HetPipeStrategy(stages=2, in_flight=3)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", max_steps=max_steps, logger=False, enable_checkpointing=False
    )
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data)
    print(strategy.last_run)


if __name__ == "__main__":
    main()
