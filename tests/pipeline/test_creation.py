"""Tensors that are created without a dtype get the one that was asked for, in this thread only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.dtypes import creating
from tests.pipeline.driving import Line, X, assert_gradients

Make = Callable[[], Tensor]
PLACES = torch.arange(5)

AFFECTED: list[Make] = [
    lambda: torch.ones(3),
    lambda: torch.ones((2, 3), requires_grad=True),
    lambda: torch.zeros(3, dtype=None),
    lambda: torch.empty(3).fill_(1 / 3),
    lambda: torch.eye(3),
    lambda: torch.linspace(0, 1, 7),
    lambda: torch.logspace(0, 1, 7),
    lambda: torch.hann_window(7),
    lambda: torch.hamming_window(7),
    lambda: torch.full((2,), 1 / 3),
    lambda: torch.full((2,), fill_value=1 / 3),
    lambda: torch.arange(0.0, 2.0, 0.1),
    lambda: torch.arange(0, 1, step=0.1),
    lambda: torch.tensor(1 / 3),
    lambda: torch.tensor([[1, 1 / 3]]),
    lambda: torch.tensor(data=(1 / 3,)),
    lambda: torch.as_tensor([1 / 3, 2]),
    lambda: torch.scalar_tensor(1 / 3),
    lambda: PLACES / 3,
    lambda: 0.3**PLACES,
    lambda: PLACES.sqrt(),
    lambda: PLACES.sigmoid(),
    lambda: (PLACES > 2) * 0.1,
    lambda: torch.where(PLACES > 2, 0.1, 0.7),
    lambda: torch.where(PLACES > 2, PLACES, 0.7),
    lambda: PLACES.where(PLACES > 2, 0.7),
]
UNAFFECTED: list[Make] = [
    lambda: torch.ones(3, dtype=torch.float16),
    lambda: torch.zeros(3, dtype=torch.long),
    lambda: torch.full((2,), 7),
    lambda: torch.full((2,), True),
    lambda: torch.arange(7),
    lambda: torch.arange(0.0, 7.0, dtype=torch.int32),
    lambda: torch.tensor([1, 2]),
    lambda: torch.tensor([True]),
    lambda: torch.tensor([1 / 3], dtype=torch.float32),
    lambda: torch.as_tensor(np.ones(3, dtype=np.float32)),
    lambda: torch.tensor(np.ones(3)),
    lambda: torch.tensor(torch.ones(3, dtype=torch.float16).tolist(), dtype=torch.float16),
    lambda: torch.as_tensor(X),
    lambda: torch.ones_like(X),
    lambda: X.new_zeros(3),
    lambda: X.new_tensor(1 / 3),
    lambda: torch.randint(5, (3,), generator=torch.Generator().manual_seed(0)),
    lambda: torch.randperm(5, generator=torch.Generator().manual_seed(0)),
    lambda: X * 2 + 1 / 3,
    lambda: nn.functional.one_hot(torch.tensor([0, 1])).float(),
    lambda: PLACES.to(torch.float16) / 3,
    lambda: PLACES.to(X) / 3,
    lambda: PLACES.type(torch.float32),
    lambda: PLACES // 3,
    lambda: PLACES * X[0, 0] + 1 / 3,
    lambda: torch.where(PLACES > 2, X[0, 0], 0.7),
]


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def identical(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and one.requires_grad == other.requires_grad and torch.equal(one, other)


@pytest.mark.parametrize("index", range(len(AFFECTED)))
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_new_tensors_are_those_of_the_default_dtype(dtype: torch.dtype, index: int) -> None:
    make = AFFECTED[index]
    torch.set_default_dtype(dtype)
    expected = make()
    torch.set_default_dtype(torch.float32)
    with creating(dtype):
        found = make()
    assert expected.dtype is dtype
    assert identical(found, expected)
    assert identical(make(), make())
    assert make().dtype is torch.float32


@pytest.mark.parametrize("index", range(len(UNAFFECTED)))
def test_other_tensors_stay_as_they_are(index: int) -> None:
    make = UNAFFECTED[index]
    torch.set_default_dtype(torch.float64)
    expected = make()
    torch.set_default_dtype(torch.float32)
    with creating(torch.float64):
        found = make()
    assert identical(found, expected)


def test_what_cannot_be_made_of_converted_numbers_is_refused() -> None:
    refused = pytest.raises(SettingError, match=r"with mul, .* convert its input first, as with .to\(torch.float64\)")
    with refused, creating(torch.float64):
        PLACES * 1j


def test_random_tensors() -> None:
    for make in (torch.rand, torch.randn):
        torch.set_default_dtype(torch.float64)
        expected = make(3, generator=torch.Generator().manual_seed(1))
        torch.set_default_dtype(torch.float32)
        with creating(torch.float64):
            assert identical(make(3, generator=torch.Generator().manual_seed(1)), expected)


def test_nothing_is_asked_for() -> None:
    torch.set_default_dtype(torch.float64)
    with creating(None):
        assert torch.ones(1).dtype is torch.float64


def test_it_belongs_to_its_thread() -> None:
    found: list[torch.dtype] = []
    with creating(torch.float64):
        thread = threading.Thread(target=lambda: found.append(torch.ones(1).dtype))
        thread.start()
        thread.join()
        assert torch.get_default_dtype() is torch.float32
    assert found == [torch.float32]


def test_it_ends_with_an_error() -> None:
    with pytest.raises(ArithmeticError), creating(torch.float64):
        raise ArithmeticError
    assert torch.ones(1).dtype is torch.float32


def test_layers_in_stages() -> None:
    """Whatever the process's default dtype is meanwhile."""

    class Thirds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.full((4,), 1 / 3) + torch.linspace(0, 1, 4)

    net = nn.Sequential(nn.Linear(4, 4), Thirds(), nn.Linear(4, 4)).double()
    line = Line(net, cuts=(0, 1), in_flight=2, default_dtype=torch.float64)
    x: Any = X.double()
    torch.set_default_dtype(torch.float64)
    expected = line.expected(x)
    torch.set_default_dtype(torch.bfloat16)
    with line.running() as engine:
        engine.submit(1, line.plain(x))
        found = engine.finish(1).gradients
    assert torch.get_default_dtype() is torch.bfloat16
    assert_gradients(line, found, expected)
