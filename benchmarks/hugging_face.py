"""`python -m benchmarks.hugging_face`: which of Hugging Face's architectures are captured, as a table in Markdown.

Each is small and random, and is updated five times: plainly, with one minibatch in flight, and as three stages with
four in flight, which is compared with the oracle's plain loop.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from torch import nn

from benchmarks.hugging_face_models import ARCHITECTURES, Batch
from benchmarks.model_fits import equality, fit
from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.errors import SettingError
from tests import oracle
from tests.support.models import ADAMW

UPDATES = 5


class Module(L.LightningModule):
    """Any of Hugging Face's models that gives its loss."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = make().train()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ADAMW.optimizer(self)


def fitted(make: Callable[[], nn.Module], batches: list[Batch], strategy: Any) -> dict[str, torch.Tensor]:
    module = Module(make)
    fit(module, batches, strategy)
    return {name: weight.detach() for name, weight in module.named_parameters()}


def row(name: str) -> str:
    """The line of the table for one architecture."""
    make, batch = ARCHITECTURES[name]
    torch.manual_seed(1)
    batches = [batch() for _ in range(UPDATES)]
    alone, ahead = HetPipeStrategy(stages=3, in_flight=1), HetPipeStrategy(stages=3, in_flight=4)
    try:
        one, several = fitted(make, batches, alone), fitted(make, batches, ahead)
    except SettingError as error:
        return f"| {name} | no: {error} | | | |"
    layers = sum(len(stage.layers) for stage in alone.last_run.stages)
    plain = fitted(make, batches, "auto")

    def step(module: Module, batch: Batch) -> oracle.Outputs:
        return {"loss": module.training_step(batch, 0)}

    expected = oracle.train(Module(make), step, [batches], ADAMW, 4).states[-1].weights
    return f"| {name} | yes | {layers} | {equality(plain, one)} | {equality(expected, several)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, or the rows of the architectures that were named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hugging_face", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(ARCHITECTURES)}")
    names: list[str] = parser.parse_args(arguments).names
    if unknown := [name for name in names if name not in ARCHITECTURES]:
        parser.error(f"there is no architecture {unknown[0]}")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print("| architecture | captured | layers | Nm = 1, against a plain Trainer | k = 3, Nm = 4, against the oracle |")
    print("| --- | --- | --- | --- | --- |")
    for name in names or ARCHITECTURES:
        print(row(name), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
