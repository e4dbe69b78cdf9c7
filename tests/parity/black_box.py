"""Runs code that knows nothing of this package under the plain strategy, and under ours as its users' suites do.

Those suites choose the strategy by the environment (``PL_TRAINER_STRATEGY``). A *story* is a function of an empty
folder that makes Trainers without naming a strategy, and tells what it saw; everything else that a process shows is
noted beside it. Nothing may differ.
"""

from __future__ import annotations

import io
import logging
import os
import random
import re
import shutil
import signal
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor

from lightning_hetpipe import HetPipeStrategy
from tests.parity.describing import chance, digest
from tests.parity.warning_caches import forget_warnings
from tests.support.equality import assert_same
from tests.support.trainers import QUIET

Story = Callable[[Path], Any]

PLAIN = {"PL_TRAINER_ACCELERATOR": "cpu"}
OURS = {**PLAIN, "PL_TRAINER_STRATEGY": HetPipeStrategy.strategy_name}

OUR_WARNINGS = ("the pipelined module is one layer", "there is one device, so HetPipeStrategy")
"""That there is nothing to pipeline is said once; it is the only difference."""


def trainer(folder: Path, **settings: Any) -> L.Trainer:
    """A Trainer that names no strategy, for four batches in each of two epochs unless ``settings`` say otherwise."""
    short = {"max_epochs": 2, "limit_train_batches": 4, "limit_val_batches": 2}
    return L.Trainer(**{"default_root_dir": folder, **QUIET, **short, **settings})


def fitted(folder: Path, module: L.LightningModule, **settings: Any) -> dict[str, Any]:
    """All that is to be seen after ``fit``, and its error if there was one."""
    made = trainer(folder, **settings)
    error: BaseException | None = None
    try:
        made.fit(module)
    except (Exception, SystemExit) as raised:
        error = raised
    return {"error": describe(error), **end(made, module)}


def end(made: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
    """State that a run leaves in the Trainer and the module."""
    loops = (made.fit_loop, made.fit_loop.epoch_loop, made.fit_loop.epoch_loop.val_loop)
    found: dict[str, Any] = {
        "weights": module.state_dict(),
        "gradients": {name: parameter.grad for name, parameter in module.named_parameters()},
        "modes": [each.training for each in module.modules()],
        "attributes": [sorted(vars(each)) for each in (module, *module.children(), *loops)],
        "counters": [made.global_step, made.current_epoch, str(made.state), made.should_stop, made.interrupted],
        "loops": made.fit_loop.state_dict(),
        "metrics": [dict(made.callback_metrics), dict(made.logged_metrics), dict(made.progress_bar_metrics)],
        "optimizers": [optimizer.state_dict() for optimizer in made.strategy.optimizers],
        "models": [made.model is module, made.lightning_module is module, made.strategy.model is module],
        "processes": [made.world_size, made.global_rank, made.num_devices, made.num_nodes, made.device_ids],
        "device": [str(module.device), str(made.strategy.root_device)],
    }
    described: dict[str, Any] = describe(found)
    return described


def describe(value: Any) -> Any:
    """``value`` as nested dicts and lists of plain values, a tensor by its bits."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Tensor):
        return f"{digest(value)} {value.device} {value.requires_grad} {value.grad_fn is None}"
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if isinstance(value, float):
        return repr(value)  # so that NaN equals NaN
    return type(value).__name__


def assert_as_plain(story: Story, folder: Path, ours: Mapping[str, str] = OURS) -> dict[str, Any]:
    """``story`` ends alike under both strategies, which includes how it fails; gives what it was."""
    plain, other = (_witnessed(story, folder / "run", environment) for environment in (PLAIN, ours))
    assert_same(plain, other, "run", ordered=True)
    return plain


def _witnessed(story: Story, folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    folder.mkdir()  # the same for each run, so that its name is no difference
    forget_warnings()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    text, before, where = io.StringIO(), dict(os.environ), Path.cwd()
    handler, logger = logging.StreamHandler(text), logging.getLogger("lightning.pytorch")
    interrupt = signal.getsignal(signal.SIGINT)
    logger.addHandler(handler)
    os.environ.update(environment)
    os.chdir(folder)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            told = describe(story(folder))
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "tfevents" not in path.name)
        kept = signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGINT, interrupt)  # where setup is interrupted, Lightning itself leaves it ignored
        os.chdir(where)
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        logger.removeHandler(handler)
        shutil.rmtree(folder)
    warned = [f"{each.category.__name__}: {each.message}" for each in caught]
    return {
        "told": told,
        "warned": sorted(_addressless(each) for each in warned if not any(own in each for own in OUR_WARNINGS)),
        "said": [_addressless(line) for line in text.getvalue().splitlines()],
        "files": files,
        "signals": kept,
        "threads": torch.get_num_threads(),
        "random": chance(),
    }


def _addressless(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", text)


class Model(BoringModel):
    """Lightning's own smallest model; ``seen`` collects what a variant notes down."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(describe([outputs, batch, batch_idx, self.trainer.global_step]))


Body = Callable[[Any, Any, int], Any]


def model_of(body: Body) -> Model:
    """A model whose ``training_step`` is ``body``."""

    class Varied(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return body(self, batch, batch_idx)

    return Varied()
