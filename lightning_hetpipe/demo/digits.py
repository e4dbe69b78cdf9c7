"""Handwritten digits: 1797 real images that ship inside scikit-learn."""

from __future__ import annotations

from typing import Annotated, Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.settings import Bounds, Size, read

CLASSES = 10
_Share = Annotated[float, Bounds(0.01, 0.98)]


class Digits(L.LightningDataModule):
    """scikit-learn's digits as images of shape (N, 1, 8, 8), float32 in 0..1, with labels of shape (N,), int64.

    The split into train, val and test keeps the share of each class and depends on `split_seed` only.

    Args:
        batch_size: images per batch.
        val_share, test_share: shares of all images for validation and for the test, 0..1.

    Raises:
        SettingError: for a batch size below 1, for shares that leave a part empty, or in `setup` without scikit-learn.
    """

    def __init__(
        self, batch_size: Size = 32, val_share: _Share = 0.15, test_share: _Share = 0.2, split_seed: int = 0
    ) -> None:
        read(Digits, locals())
        super().__init__()
        if val_share + test_share > 0.99:
            raise SettingError(f"val_share + test_share={val_share + test_share} must be at most 0.99")
        self.batch_size = batch_size
        self.val_share = val_share
        self.test_share = test_share
        self.split_seed = split_seed
        self.parts: dict[str, TensorDataset] = {}

    def setup(self, stage: str) -> None:
        if not self.parts:
            found = split(*load(), val_share=self.val_share, test_share=self.test_share, seed=self.split_seed)
            self.parts = dict(zip(("train", "val", "test"), found, strict=True))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.parts["train"], batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.parts["val"], batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.parts["test"], batch_size=self.batch_size)


def load() -> tuple[Tensor, Tensor]:
    """Load all images (1797, 1, 8, 8), scaled to 0..1, and their labels (1797,)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SettingError(
            'The digits come with scikit-learn, which is not installed: pip install "lightning-hetpipe[examples]".'
        ) from error
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(digits.target, dtype=torch.int64)


def split(
    images: Tensor, labels: Tensor, *, val_share: float, test_share: float, seed: int
) -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Split into disjoint parts train, val and test, each class by the same shares."""
    generator = torch.Generator().manual_seed(seed)
    parts: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for label in range(CLASSES):
        indices = (labels == label).nonzero().flatten()
        indices = indices[torch.randperm(len(indices), generator=generator)]
        val, test = round(len(indices) * val_share), round(len(indices) * test_share)
        for part, chosen in zip(parts, torch.split(indices, [len(indices) - val - test, val, test]), strict=True):
            part.append(chosen)
    train, val_set, test_set = (
        TensorDataset(images[chosen], labels[chosen]) for chosen in (torch.cat(part) for part in parts)
    )
    return train, val_set, test_set
