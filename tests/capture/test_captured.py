"""A graph is used again for calls that it fits, and for no others; what it creates is as where it was captured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.capture.captured import Captured
from lightning_hetpipe.capture.effects import FrozenValues
from lightning_hetpipe.errors import PipelineRefusal

X = torch.arange(12.0).reshape(4, 3) / 10


class Tells(nn.Module):
    """Computes something else for each kind of argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, scale: Any) -> Tensor:
        y: Tensor = self.linear(x)
        if isinstance(scale, (bool, str)):
            return y * len(str(scale))
        return y + 7 if scale != scale else y * math.copysign(2, scale) + (5 if isinstance(scale, int) else scale)


def run(captured: Captured, *args: Any) -> Any:
    """Output that the stages compute for a call of the module."""
    value: Any = captured.value(args, {})
    for layer in captured.layers:
        value = layer.module(value)
    return value


def captured(module: nn.Module, *args: Any) -> Captured:
    return Captured("net", module, args, {}, FrozenValues(module))


@pytest.mark.parametrize("scale", ["nan", "-0.0", "1.5"])
def test_a_call_with_the_same_number_needs_no_other_graph(scale: str) -> None:
    graphs = captured(Tells(), X, float(scale))
    for _ in range(20):
        assert graphs.value((X, float(scale)), {})[0] == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [(math.nan, "nan"), (math.nan, "NaN"), (True, 1), (1, 1.0), (False, 0), (0.0, -0.0)],
)
def test_arguments_that_are_alike_have_graphs_of_their_own(first: Any, second: Any) -> None:
    module = Tells()
    graphs = captured(module, X, first)
    for scale in (first, second, first):
        assert torch.equal(run(graphs, X, scale), module(X, scale))


def graphs_of(module: nn.Module, graphs: Captured, *shapes: tuple[int, ...]) -> list[int]:
    """Number of the graph for inputs of each shape, whose output is compared with the module's."""
    found = []
    for shape in shapes:
        x = torch.randn(shape)
        found.append(graphs.value((x,), {})[0])
        torch.testing.assert_close(run(graphs, x), module(x), rtol=0, atol=0)
    return found


def test_the_first_graph_is_for_its_sizes_and_the_second_for_all() -> None:
    module = nn.Linear(3, 3)
    graphs = captured(module, X)
    assert graphs_of(module, graphs, (4, 3), (5, 3), (6, 3), (4, 3), (9, 3)) == [0, 1, 1, 0, 1]
    for _ in range(3):
        graphs.capture_again()
        assert graphs_of(module, graphs, (4, 3), (5, 3)) == [0, 0]


def test_sizes_of_images_vary_in_the_third_graph() -> None:
    module = nn.Conv2d(1, 2, 3)
    graphs = captured(module, torch.randn(4, 1, 6, 6))
    shapes = (4, 1, 6, 6), (5, 1, 6, 6), (6, 1, 6, 6), (6, 1, 7, 7), (3, 1, 9, 8)
    assert graphs_of(module, graphs, *shapes) == [0, 1, 1, 2, 2]


class LooksUp(nn.Module):
    """Looks a tensor up by the number of rows, which must not vary in a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scales = {str(rows): rows / 2 for rows in range(20)}

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        y: Tensor = self.linear(x) * factor * self.scales[f"{x.shape[0]:d}"]
        return y


def test_sizes_that_cannot_vary_have_graphs_of_their_own() -> None:
    module = LooksUp()
    graphs = captured(module, X)
    assert graphs_of(module, graphs, (5, 3), (6, 3), (5, 3), (4, 3), (7, 3)) == [1, 2, 1, 0, 3]
    with pytest.raises(PipelineRefusal, match=r"at test_captured.py:\d+, `.*self.scales.*x.shape"):
        graphs_of(module, graphs, *((rows, 3) for rows in range(2, 20)))


def test_numbers_that_change_with_sizes_that_cannot_vary() -> None:
    """The number is an input, and not to blame for the sizes."""
    module = LooksUp()
    graphs = captured(module, X, 0.5)
    for number in range(20):
        x = torch.randn(5 if number % 2 else 4, 3)
        assert torch.equal(run(graphs, x, number / 3), module(x, number / 3))
    assert graphs.value((X, 0.1), {})[0] < 5


class Creates(nn.Module):
    """Makes tensors without naming a dtype: of whole numbers, of others, and in a region of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            region = torch.ones(3) / 3 + torch.linspace(0, 1, 3)
        return self.linear(x) * region, torch.full((3,), 1 / 3) + torch.zeros(3), torch.arange(3) + torch.full((3,), 2)


@pytest.fixture
def default_dtype() -> Iterator[None]:
    """Set back to what it was."""
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.usefixtures("default_dtype")
def test_tensors_are_created_of_the_dtype_where_they_were_captured(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    module, x = Creates(), X.to(dtype)
    expected = module(x)
    graphs = captured(module, x)
    torch.set_default_dtype(torch.float32)  # as in another thread, at another moment
    found = run(graphs, x)
    assert [tensor.dtype for tensor in found] == [dtype, dtype, torch.int64]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
