"""A Hugging Face model, fine-tuned as a pipeline of three stages: `python examples/hugging_face.py`.

To start from trained weights, replace the small random model by `GPT2LMHeadModel.from_pretrained("gpt2")` and read the
text with that model's tokenizer; nothing else changes.
"""

import argparse
import math
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_hetpipe import HetPipeStrategy

VOCABULARY = 256  # bytes are the tokens


class SourceText(Dataset[dict[str, Tensor]]):
    """Windows over the source of Python's standard library, which every Python has, as Hugging Face models take them.

    Args:
        first: offset of the first byte in all files, joined in the order of their names.
        count: number of windows.
        length: bytes per window.
    """

    def __init__(self, first: int, count: int, length: int = 64) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[first : first + count * length]
        self.ids = torch.tensor(list(text)).view(count, length)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class LanguageModel(L.LightningModule):
    """Any Hugging Face model that returns its own loss."""

    def __init__(self, lr: float = 5e-4) -> None:
        super().__init__()
        self.lr = lr
        self.model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_positions=64,
                n_embd=64,
                n_layer=4,
                n_head=4,
                use_cache=False,
                bos_token_id=None,  # bytes have no such tokens
                eos_token_id=None,
            )
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_bits_per_byte", self.model(**batch).loss / math.log(2))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Staleness in a pipeline acts as momentum: hence the low first beta, and the low rate.
        return torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.5, 0.95))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-steps", type=int, default=400)
    max_steps: int = parser.parse_args(arguments).max_steps

    L.seed_everything(1)
    train: DataLoader[Any] = DataLoader(SourceText(0, 8000), batch_size=16, shuffle=True)
    test: DataLoader[Any] = DataLoader(SourceText(8000 * 64, 500), batch_size=50)
    strategy = HetPipeStrategy(stages=3, in_flight=4)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", max_steps=max_steps, logger=False, enable_checkpointing=False
    )
    model = LanguageModel()
    trainer.fit(model, train)
    trainer.test(model, test)
    print(strategy.last_run)


if __name__ == "__main__":
    main()
