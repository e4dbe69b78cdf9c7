"""Values as plain data that can be compared, bit for bit, with those of another run."""

from __future__ import annotations

import ctypes
import enum
import functools
import hashlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from torch import Tensor, nn


def describe(value: Any, folder: Path | None = None) -> Any:
    """``value`` as nested dicts and lists of numbers, texts and digests; a place in ``folder`` whatever that is.

    A run is described thousands of times: plain values, which are the most, come first.
    """
    kind = type(value)
    if kind is int or kind is bool or value is None:
        return value
    if kind is str and folder is None:
        return value
    if kind is float:
        return repr(value)  # so that NaN equals NaN
    if kind is Tensor or isinstance(value, Tensor):
        return digest(value)
    if kind is dict or isinstance(value, Mapping):
        return {
            key if type(key) is str and folder is None else str(describe(key, folder)): describe(item, folder)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [kind.__name__, *[describe(item, folder) for item in value]]
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, (str, Path)):
        return str(value).replace(str(folder), "<folder>") if folder is not None else str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, int):
        return value
    if isinstance(value, (torch.device, torch.dtype, np.generic)):
        return str(value)
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    return type(value).__name__


def digest(tensor: Tensor) -> str:
    """Differs where a bit, the shape or the type of ``tensor`` does."""
    if not (tensor.is_contiguous() and tensor.layout is torch.strided) or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().to_dense().resolve_conj().resolve_neg().contiguous()
    return _digest(tensor.dtype, tensor.shape, ctypes.string_at(tensor.data_ptr(), tensor.nbytes))


@functools.lru_cache(4096)
def _digest(dtype: torch.dtype, shape: torch.Size, data: bytes) -> str:
    return f"{dtype}{(*shape,)}{hashlib.blake2b(data, digest_size=6).hexdigest()}"


MT19937 = 625 * 4
"""Size of the state of numpy's default generator, in bytes: 624 words, and the place in them."""


def chance() -> str:
    """The default random states of torch, Python and numpy (read where it lies, as its own copy of it is slow)."""
    numpy = cast(Any, np.random).get_bit_generator().ctypes.state_address
    return _chance(digest(torch.get_rng_state()), random.getstate(), ctypes.string_at(numpy, MT19937))


@functools.lru_cache(256)
def _chance(*states: Any) -> str:
    return hashlib.blake2b(repr(states).encode(), digest_size=6).hexdigest()


def counts(trainer: L.Trainer) -> dict[str, Any]:
    """Progress of a run, as ``training_step`` may ask for it."""
    return {
        "global_step": trainer.global_step,
        "current_epoch": trainer.current_epoch,
        "stage": str(trainer.state.stage),
        "batch_idx": trainer.fit_loop.batch_idx,
        "total_batch_idx": trainer.fit_loop.total_batch_idx,
    }


def loops(loop: _Loop) -> dict[str, Any]:
    """Content of its ``state_dict``, which copies each number for itself."""
    found: dict[str, Any] = {"state_dict": describe(loop.on_save_checkpoint())}
    for name, value in vars(loop).items():
        if isinstance(value, _BaseProgress):
            found[name] = progress(value)
        elif isinstance(value, _Loop):
            found[name] = loops(value)
    return found


def progress(value: Any) -> Any:
    return {name: progress(item) for name, item in vars(value).items()} if isinstance(value, _BaseProgress) else value


def sight(trainer: L.Trainer, module: nn.Module, metrics: bool) -> dict[str, Any]:
    """All that a hook can see of a run; of metrics only if told, since looking computes them."""
    seen = counts(trainer)
    seen["status"] = [str(trainer.state.fn), str(trainer.state.status), trainer.should_stop, trainer.is_last_batch]
    seen["loops"] = loops(trainer.fit_loop)
    weights = dict(module.named_parameters())
    seen["weights"] = {name: digest(weight) for name, weight in weights.items()}
    seen["buffers"] = {name: digest(buffer) for name, buffer in module.named_buffers()}
    seen["gradients"] = {name: describe(weight.grad) for name, weight in weights.items()}
    seen["trained"] = {name: weight.requires_grad for name, weight in weights.items()}
    seen["modes"] = {name: part.training for name, part in module.named_modules()}
    seen["optimizers"] = describe([optimizer.state_dict() for optimizer in trainer.optimizers])
    seen["schedulers"] = describe([config.scheduler.state_dict() for config in trainer.lr_scheduler_configs])
    seen["torch"] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), str(torch.get_default_dtype())]
    seen["chance"] = chance()
    if metrics:
        seen["callback_metrics"] = describe(trainer.callback_metrics)
        seen["logged_metrics"] = describe(trainer.logged_metrics)
        seen["progress_bar_metrics"] = describe(trainer.progress_bar_metrics)
    return seen
