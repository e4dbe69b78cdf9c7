"""Program of two virtual workers with two limited devices each; writes what was planned and taken of these.

python -m tests.accelerator.limited_workers FOLDER UPDATE_DTYPE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetpipe import HetPipeStrategy, WSPCallback
from lightning_hetpipe.pipeline.engine import Engine
from tests.oracle import Batch, Outputs
from tests.support.accelerator import TestAccelerator, set_limit, show
from tests.support.models import ADAMW, Learner
from tests.support.trainers import quiet_trainer

WIDTH, LIMIT = 192, 8 << 20


class Eight(Learner):
    def __init__(self) -> None:
        super().__init__(ADAMW)
        torch.manual_seed(7)
        self.net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)])

    def compute(self, batch: Batch) -> Outputs:
        (x,) = batch
        return {"loss": F.mse_loss(self.net(x), x.roll(1, -1))}


def main(folder: str, update_dtype: str | None) -> None:
    show()
    for index in range(4):
        set_limit(index, LIMIT)
    wsp = WSPCallback(clock_distance=0, update_dtype=update_dtype)
    strategy = HetPipeStrategy(virtual_workers=2, stages=2, in_flight=2, weights="stash", wsp=wsp)
    planned = dict[int, int]()
    begin = Engine.begin

    def noting(engine: Engine, *args: Any, **kwargs: Any) -> None:
        for stage in engine.stages:
            assert stage.memory.planned is not None
            planned[stage.device.index] = stage.memory.planned.total
        begin(engine, *args, **kwargs)

    setattr(Engine, "begin", noting)  # noqa: B010  # which has the plans
    rows = DataLoader(TensorDataset(torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(3))), 4)
    trainer = quiet_trainer(strategy, accelerator=TestAccelerator(), devices=4)
    trainer.fit(Eight(), rows)
    taken = {index: torch.accelerator.max_memory_allocated(index) for index in planned}
    Path(folder, f"{strategy.global_rank}.json").write_text(
        json.dumps([[planned[each], taken[each]] for each in planned])
    )


if __name__ == "__main__":
    main(sys.argv[1], None if sys.argv[2] == "None" else sys.argv[2])
