"""Traces of ours in a module, seen from outside: none may remain."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn

Shape = dict[str, dict[str, Any]]


def shape_of(root: nn.Module) -> Shape:
    """Every attribute of every module in ``root``, by identity: dicts and lists one level deep."""
    return {
        path: {name: _identities(value) for name, value in vars(module).items()}
        for path, module in root.named_modules(remove_duplicate=False)
    }


def ours_in(root: nn.Module) -> list[str]:
    """The attributes of modules in ``root`` that hold an object of this package, and hooks that are its functions."""
    found: list[str] = []
    for path, module in root.named_modules():
        for name, value in vars(module).items():
            held = [value, *(value.values() if isinstance(value, dict) else ())]
            if any(_is_ours(item) for item in held):
                found.append(f"{path}.{name}" if path else name)
    return found


def chance() -> list[Any]:
    """The default random states of torch, Python and numpy, comparable with ``==``."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return [torch.get_rng_state().tolist(), random.getstate(), kind, np.asarray(keys).tolist(), *rest]


def _identities(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: id(item) for key, item in value.items()}
    if isinstance(value, list):
        return [id(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else id(value)


def _is_ours(value: Any) -> bool:
    modules = [getattr(type(value), "__module__", ""), getattr(value, "__module__", "")]
    return any(str(module).startswith("lightning_hetpipe") for module in modules)
