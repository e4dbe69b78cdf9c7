"""Virtual workers keep copies of their weights on their devices, which plans count."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_hetpipe import WSPCallback
from lightning_hetpipe.run.driver import TrainerRun
from lightning_hetpipe.workers.synchroniser import Synchroniser
from lightning_hetpipe.workers.weight_copies import copies_kept
from tests.accelerator.four_devices import MARGIN
from tests.support.accelerator import TestAccelerator
from tests.support.equality import assert_same
from tests.workers.test_synchroniser import OnlyOne


@pytest.mark.slow
@pytest.mark.parametrize("update_dtype", ["None", "bfloat16"])
def test_devices_hold_no_more_than_planned(update_dtype: str, accelerator: TestAccelerator, tmp_path: Path) -> None:
    """The copies of the last synchronisation, and of roundings, made a plan of little room one that ran out of it."""
    program = [sys.executable, "-m", "tests.accelerator.limited_workers", str(tmp_path), update_dtype]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for planned, taken in [stage for stages in found for stage in stages]:
        assert 0.8 * planned <= taken <= MARGIN * planned, found


@pytest.mark.parametrize("update_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("frozen", [False, True])
def test_copies_on_a_device(frozen: bool, update_dtype: str | None, accelerator: TestAccelerator) -> None:
    """An update of a weight is rounded before the next one is computed; all of them together took two copies more."""
    module = L.LightningModule()
    module.weights = nn.ParameterList([torch.ones(64, 64) for _ in range(32)])
    if frozen:  # until after the first synchronisation
        module.weights.requires_grad_(False)
    group: Any = OnlyOne(SimpleNamespace(_run=TrainerRun()))
    group._meet = lambda where: None
    group.settings = WSPCallback(update_dtype=update_dtype).settings
    group.enter_fit = lambda named, *_: [weight.detach().cpu() for _, weight in named]
    group.synchronise = lambda update, **_: [torch.ones(64, 64) + each.float().cpu() for each in update]
    gc.collect()
    others = torch.accelerator.memory_allocated(1)  # what tests of failures have left
    module.to("testacc:1")
    held = torch.accelerator.memory_allocated(1)
    weights = held - others
    group.update_buffers = lambda: [torch.empty(64, 64) for _ in module.weights]
    synchroniser = Synchroniser(group, module)
    synchroniser.enter([])
    assert torch.accelerator.memory_allocated(1) == held + (0 if frozen else 1 + (update_dtype is not None)) * weights
    module.weights.requires_grad_(True)
    with torch.no_grad():
        for weight in module.weights:
            weight += 0.5
    torch.accelerator.reset_peak_memory_stats(1)
    synchroniser.synchronise(nullcontext)
    taken = torch.accelerator.max_memory_allocated(1) - held
    assert taken / weights <= 1.05 * copies_kept(update_dtype)
    assert_same([torch.full((64, 64), 1.5)] * 32, [weight.detach() for weight in module.weights])
