"""A ResNet, written as people write it, trained as a pipeline of three stages: `python examples/resnet.py`."""

import argparse
from collections.abc import Sequence

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.demo import Digits


class BasicBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        y: Tensor = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += identity
        z: Tensor = self.relu(y)
        return z


class ResNet(nn.Module):
    """Images (N, 1, H, W) to logits (N, classes)."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(BasicBlock(width, width), BasicBlock(width, width))
        self.layer2 = nn.Sequential(BasicBlock(width, 2 * width, stride=2), BasicBlock(2 * width, 2 * width))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer1(x)
        x = self.layer2(x)
        x = torch.flatten(self.avgpool(x), 1)
        logits: Tensor = self.fc(x)
        return logits


class Classifier(L.LightningModule):
    def __init__(self, lr: float = 0.003) -> None:
        super().__init__()
        self.lr = lr
        self.model = ResNet()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("test_acc", (self.model(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-steps", type=int, default=300)
    max_steps: int = parser.parse_args(arguments).max_steps

    L.seed_everything(1)
    model, data = Classifier(), Digits()
    strategy = HetPipeStrategy(stages=3, in_flight=4)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", max_steps=max_steps, logger=False, enable_checkpointing=False
    )
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data)
    print(strategy.last_run)


if __name__ == "__main__":
    main()
