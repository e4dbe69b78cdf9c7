"""Real text that every Python installation has: the source of its standard library."""

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


class SourceText(L.LightningDataModule):
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
        super().__init__()
        self.context = context
        self.batch_size = batch_size
        self.max_bytes = max_bytes
        self.val_share = val_share
        self.folder = folder
        self.parts: dict[str, TensorDataset] = {}

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

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.parts["train"], batch_size=self.batch_size, shuffle=True, drop_last=False)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.parts["val"], batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.parts["test"], batch_size=self.batch_size)


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
