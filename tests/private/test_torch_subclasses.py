"""Private names of torch for subclasses of Tensor that hold no memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer
from torch.utils import _foreach_utils

from lightning_hetpipe.torch_private.tensors import (
    address_of,
    as_plain,
    exchange,
    make_without_memory,
    take_in_foreach,
)
from tests.private.guarding import guards
from tests.support.accelerator import NAME


class Named(Tensor):
    """Notes the operators that run on it, and does nothing else."""

    ran: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with as_plain():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args[0].ran.append(func.name())
        return args[0]


@guards("_make_wrapper_subclass")
def test_a_tensor_without_memory_is_its_operators() -> None:
    like = torch.empty(3, 2, dtype=torch.float64).t()
    made = make_without_memory(Named, like, torch.device("cpu"))
    made.ran = []
    assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), like.dtype)
    assert address_of(made) is None, "weights at a host would be taken for weights in this process"
    assert address_of(like) == like.data_ptr()
    with torch.no_grad():
        made.mul_(2)
    assert made.ran == ["aten::mul_.Tensor"], "what is computed with weights at a host would not reach it"


@guards("_foreach_supported_types", "_foreach_utils")
@pytest.mark.usefixtures("accelerator")
def test_optimizers_take_lists_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (optimizer, _foreach_utils):
        monkeypatch.setattr(module, "_foreach_supported_types", [torch.Tensor, nn.Parameter])
    made: Any = make_without_memory(Named, torch.empty(3), torch.device(NAME, 0))
    for known in (False, True):
        if known:
            take_in_foreach(Named)
        _, steps = optimizer._default_to_fused_or_foreach([made], differentiable=False)
        clips = _foreach_utils._has_foreach_support([made], made.device)
        assert steps == clips == known, "a step would take one message for each weight, with other bits than here"


def test_tensors_are_exchanged_for_whoever_refers_to_them() -> None:
    """Hooks stay, which torch's own function gives away with what they are for."""
    one: Any = nn.Parameter(torch.ones(2))  # torch has no types for hooks
    other, seen = nn.Parameter(torch.zeros(3)), list[Any]()
    one.register_hook(seen.append)
    one.register_post_accumulate_grad_hook(seen.append)
    held = [one]
    exchange(one, other)
    assert held[0].shape == (3,)
    assert other.shape == (2,)
    (held[0] * 2).sum().backward()
    assert len(seen) == 2, "a user's hook on a weight would not run once the weight is at a host"
