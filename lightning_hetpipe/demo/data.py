"""The demo's data in parts for train, val and test: handwritten digits, and the source of the standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Annotated, Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.settings import Bounds, Size, read

CLASSES = 10
_Share = Annotated[float, Bounds(0.01, 0.98)]


class _Parts(L.LightningDataModule):
    """Data in the parts train, val and test, which `setup` fills in. Only batches of the training are shuffled."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.parts: dict[str, TensorDataset] = {}

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.parts["train"], batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.parts["val"], batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.parts["test"], batch_size=self.batch_size)


class Digits(_Parts):
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
        super().__init__(batch_size)
        if val_share + test_share > 0.99:
            raise SettingError(f"val_share + test_share={val_share + test_share} must be at most 0.99")
        self.val_share = val_share
        self.test_share = test_share
        self.split_seed = split_seed

    def setup(self, stage: str) -> None:
        if not self.parts:
            found = split_by_class(
                *load_images(), val_share=self.val_share, test_share=self.test_share, seed=self.split_seed
            )
            self.parts = dict(zip(("train", "val", "test"), found, strict=True))


def load_images() -> tuple[Tensor, Tensor]:
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


def split_by_class(
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


class SourceText(_Parts):
    """Windows over the standard library's source, as bytes.

    A batch is `(inputs, targets)`, both of shape (N, context) and int64 in 0..255. A target is the byte after its
    input. Validation and test take the last files, so none of their windows was trained on.

    Args:
        context: bytes per window.
        batch_size: windows per batch.
        max_bytes: bytes of text read, over all parts.
        val_share: share of the text for validation, 0..1. The test gets an equal share.
        folder: folder of the `*.py` files, by default this interpreter's standard library.

    Raises:
        SettingError: for a size below 1, or in `setup` if the folder has too little source for one batch of each part.
    """

    def __init__(
        self,
        context: Size = 96,
        batch_size: Size = 16,
        max_bytes: Size = 600_000,
        val_share: Annotated[float, Bounds(0.001, 0.45)] = 0.05,
        folder: str | None = None,
    ) -> None:
        read(SourceText, locals())
        super().__init__(batch_size)
        self.context = context
        self.max_bytes = max_bytes
        self.val_share = val_share
        self.folder = folder

    def setup(self, stage: str) -> None:
        if self.parts:
            return
        folder = Path(self.folder or sysconfig.get_paths()["stdlib"])
        text = read_source(folder, self.max_bytes)
        held_out = int(len(text) * self.val_share)
        lengths = [len(text) - 2 * held_out, held_out, held_out]
        for name, part in zip(("train", "val", "test"), torch.split(text, lengths), strict=True):
            if len(part) <= self.context:
                raise SettingError(
                    f"{folder} holds {len(text)} bytes of Python source, too little for {name} windows of "
                    f"{self.context} bytes: set data.folder to a folder with more *.py files, or data.context lower."
                )
            self.parts[name] = windows(part, self.context)


def read_source(folder: Path, max_bytes: int) -> Tensor:
    """Read the folder's `*.py` files in order of their names, joined, up to `max_bytes`, as uint8 of shape (bytes,)."""
    chunks: list[bytes] = []
    size = 0
    for path in sorted(folder.glob("*.py")):
        if size >= max_bytes:
            break
        chunks.append(path.read_bytes()[: max_bytes - size])
        size += len(chunks[-1])
    return torch.tensor(list(b"".join(chunks)), dtype=torch.uint8)


def windows(text: Tensor, context: int) -> TensorDataset:
    """Divide text of shape (bytes,) into inputs and targets of shape (windows, context), without overlap."""
    count = (len(text) - 1) // context
    ids = text[: count * context + 1].long()
    return TensorDataset(ids[:-1].view(count, context), ids[1:].view(count, context))
