"""States of optimizers lie where parameters do: moved one at a time, and never in somebody else's memory."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.placement.spread import follow_parameters, load_state
from lightning_hetpipe.torch_private.modes import ThreadDispatchMode
from lightning_hetpipe.torch_private.tensors import pytree


def stepped(kind: Any = torch.optim.AdamW, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """An optimizer of three parameters that has stepped once."""
    parameters = [nn.Parameter(torch.ones(4, dtype=dtype)) for _ in range(3)]
    optimizer = kind(parameters, lr=0.1, **settings)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = sum((parameter.sin().sum() for parameter in parameters), torch.zeros(()))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)
    return optimizer


def to_meta(optimizer: Any, *indices: int) -> list[nn.Parameter]:
    """Move parameters elsewhere, as layers move: the same objects on another device."""
    parameters: list[nn.Parameter] = optimizer.param_groups[0]["params"]
    for index in indices:
        grad, parameters[index].grad = parameters[index].grad, None
        del grad
        moved = nn.Parameter(parameters[index].to("meta"))
        torch.utils.swap_tensors(parameters[index], moved)  # type: ignore[no-untyped-call]
    return parameters


def test_states_go_to_their_parameters_and_counters_stay() -> None:
    optimizer = stepped()
    kept, gone, again = to_meta(optimizer, 1, 2)
    before = dict(optimizer.state[kept])
    follow_parameters(optimizer)
    assert all(optimizer.state[kept][name] is state for name, state in before.items())
    for parameter in (gone, again):
        devices = {name: state.device.type for name, state in optimizer.state[parameter].items()}
        assert devices == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


@pytest.mark.parametrize("setting", ["capturable", "fused"])
def test_a_counter_that_the_device_needs_goes_along(setting: str) -> None:
    optimizer = stepped()
    optimizer.param_groups[0][setting] = True
    _, gone, _ = to_meta(optimizer, 1)
    follow_parameters(optimizer)
    assert optimizer.state[gone]["step"].is_meta


def test_it_is_what_torch_does_where_it_loads_a_state() -> None:
    for kind in (torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adagrad, torch.optim.LBFGS):
        optimizer, loaded = stepped(kind), stepped(kind)
        for each in (optimizer, loaded):
            to_meta(each, 0, 1, 2)
        follow_parameters(optimizer)
        loaded.load_state_dict(loaded.state_dict())
        found, expected = (
            pytree.tree_map_only(Tensor, lambda t: (t.device, t.dtype, t.shape), each.state_dict()["state"])
            for each in (optimizer, loaded)
        )
        assert found == expected, kind


def test_dtypes_stay() -> None:
    """Torch's loading makes a state what its parameter is, which rounds one of higher precision."""
    optimizer = stepped(dtype=torch.bfloat16)
    first = to_meta(optimizer, 0)[0]
    optimizer.state[first]["exp_avg"] = torch.ones(4)
    follow_parameters(optimizer)
    assert optimizer.state[first]["exp_avg"].dtype == torch.float32


class Copies(ThreadDispatchMode):
    """At each copy, how many of ``tensors`` are alive."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.tensors = [weakref.ref(tensor) for tensor in tensors]
        self.alive: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "copy" in str(func):
            self.alive.append(sum(tensor() is not None for tensor in self.tensors))
        return func(*args, **(kwargs or {}))


def test_one_at_a_time() -> None:
    """The one that was there is gone before the next one comes, so that a device with little room is enough."""
    optimizer = stepped(torch.optim.SGD, momentum=0.9)
    parameters = to_meta(optimizer, 0, 1, 2)
    copies = Copies([optimizer.state[parameter]["momentum_buffer"] for parameter in parameters])
    with copies:
        follow_parameters(optimizer)
    assert copies.alive == [3, 2, 1]


def test_nothing_stays_in_the_memory_of_what_was_loaded() -> None:
    saved = stepped().state_dict()
    optimizer = stepped()
    expected = {name: value.clone() for name, value in saved["state"][0].items()}
    load_state(optimizer, saved)
    for state in saved["state"].values():
        for value in state.values():
            value.fill_(7)
    found = optimizer.state[optimizer.param_groups[0]["params"][0]]
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class Adds(torch.optim.SGD):
    """Loads in its own way, for which it needs its state."""

    def load_state_dict(self, state_dict: Any) -> None:
        self.seen = len(self.state)
        self.state[self.param_groups[0]["params"][0]]["momentum_buffer"] = state_dict["buffer"]


def test_an_optimizer_that_loads_in_its_own_way_does() -> None:
    optimizer, buffer = stepped(Adds, momentum=0.9), torch.ones(4)
    load_state(optimizer, {"buffer": buffer})
    assert optimizer.seen == 3
    buffer.zero_()
    assert torch.equal(optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"], torch.ones(4))
