"""Decisions by values of inputs are answered as they were seen; a call with other answers has a graph of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.capture import variant
from lightning_hetpipe.capture.captured import Captured, graph_layer
from lightning_hetpipe.capture.effects import FrozenValues
from lightning_hetpipe.errors import SettingError
from tests.support.marks import quick

X = torch.arange(12.0).reshape(4, 3) / 10


def captured(module: nn.Module, *args: Any) -> Captured:
    """As after a watched step."""
    frozen = FrozenValues(module)
    with frozen.answers.noted():
        module(*args)
    return Captured("net", module, args, {}, frozen)


def variant_and_output(graphs: Captured, *args: Any) -> tuple[int, Any]:
    value: Any = graphs.value(args, {})
    number = value[0]
    for layer in graphs.layers:
        value = layer.module(value)
    return number, value


class Asks(nn.Module):
    """Asks a question of its input, and of what it is."""

    def __init__(self, asks: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(3, 3), nn.Linear(3, 3)
        self.asks = asks
        self.register_buffer("limit", torch.tensor(0.5))
        self.register_buffer("seen", torch.tensor(0.0))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        answer = self.asks(self, x)
        y: Tensor = self.out(torch.relu(self.linear(x)))
        return y * 2 if answer else y


def twice(module: Asks, x: Tensor) -> bool:
    """The second question is asked where the first one's answer is yes."""
    return bool((x > 0).any()) and bool((x[0] > 0).all())


def in_place(module: Asks, x: Tensor) -> bool:
    flags = torch.zeros(len(x), dtype=torch.bool)
    flags[0] = True
    flags[1:].logical_or_(x[1:, 0] > 0)
    return flags.all().item() is True


ASKS: dict[str, Callable[[Any, Tensor], Any]] = {
    "bool": lambda module, x: (x > 0).all(),
    "item": lambda module, x: (x > 0).all().item(),
    "a buffer": lambda module, x: (x < module.limit).any(),
    "without gradients": torch.no_grad()(lambda module, x: bool((x * 2 > 0).all())),
    "two": twice,
    "in place": in_place,
}


@quick("bool", "a buffer", "without gradients", "in place")
@pytest.mark.parametrize("name", ASKS)
def test_each_answer_has_its_graph(name: str) -> None:
    module = Asks(ASKS[name])
    graphs = captured(module, X)
    numbers = []
    for x in (X, -X, X + 1, X, -X, X - 0.05):
        number, output = variant_and_output(graphs, x)
        assert torch.equal(output, module(x))
        numbers.append(number)
    assert numbers[0] == numbers[3] == 0
    assert numbers[1] == numbers[4]
    assert len(set(numbers)) <= 3, "one for each answer"


def test_a_buffer_is_read_as_it_is() -> None:
    module = Asks(ASKS["a buffer"])
    graphs = captured(module, X)
    module.get_buffer("limit").fill_(-1.0)
    assert torch.equal(variant_and_output(graphs, X)[1], module(X))


def changes_a_buffer(module: Any, x: Tensor) -> Any:
    module.seen += x.sum()
    return module.seen > 5


BY_MORE: list[Callable[[Any, Tensor], Any]] = [
    lambda module, x: (module.linear(x) > 0).all(),
    lambda module, x: (module.dropout(x) > 0).all(),
    changes_a_buffer,
]


@pytest.mark.parametrize("asks", BY_MORE)
def test_decisions_by_more_than_inputs(asks: Callable[[Any, Tensor], Any]) -> None:
    with pytest.raises(SettingError, match=r"'net' decides by the values of its data .* at test_data_checks.py:\d+, `"):
        captured(Asks(asks), X)


def test_checks_of_distributions_are_named() -> None:
    # Not by default: torch.compile turns it off for the whole process.
    checks = Asks(lambda module, x: torch.distributions.Normal(module.linear(x), 1.0, validate_args=True))
    if hasattr(torch.distributions.distribution, "_all_true_or_runtime_assert"):  # torch 2.15 puts it into the graph
        with pytest.raises(RuntimeError, match="to satisfy its distribution constraint"):
            variant_and_output(captured(checks, X), X * float("nan"))
    else:
        with pytest.raises(SettingError, match=r"decides by .* at distribution.py:.*; give the distribution validate_"):
            captured(checks, X)
    unchecked = captured(
        Asks(lambda module, x: torch.distributions.Normal(module.linear(x), 1.0, validate_args=False)), X
    )
    assert variant_and_output(unchecked, X)[0] == 0


def test_a_check_that_fails_later_says_what_the_module_says() -> None:
    def refuses(module: Any, x: Tensor) -> None:
        if (x < 0).any():
            raise ValueError("x is negative")

    graphs = captured(Asks(refuses), X)
    with pytest.raises(SettingError, match=r"'net' cannot be captured .* at test_data_checks.py:.* \(x is negative\)"):
        variant_and_output(graphs, -X)
    assert variant_and_output(graphs, X + 1)[0] == 0


class Shrinks(nn.Module):
    """Asks until the answer is yes; where ``also`` holds, in a second loop."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        while not bool((x.abs() < 1).all()):
            x = x / 2
        if (x < 0).any():
            while not bool((x > -0.1).all()):
                x = x / 2
        y: Tensor = self.linear(x)
        return y


@pytest.mark.parametrize("size", [0.5, 7.0, 15.0])
def test_a_loop_that_goes_on_longer_than_it_was_seen(size: float) -> None:
    """It was traced for ever."""
    module = Shrinks()
    graphs, x = captured(module, torch.full((2, 3), 3.0)), torch.full((2, 3), size)
    assert torch.equal(variant_and_output(graphs, x)[1], module(x))


def test_a_loop_that_was_never_seen_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variant, "UNSEEN", 8)
    graphs = captured(Shrinks(), torch.full((2, 3), 3.0))
    with pytest.raises(
        SettingError, match=r"'net' decides by the values of its data .* at test_data_checks.py:\d+, `w"
    ):
        variant_and_output(graphs, -torch.full((2, 3), 3.0))


def test_nothing_of_it_remains_in_the_graph() -> None:
    asked, plain = captured(Asks(ASKS["bool"]), X), captured(Asks(lambda module, x: False), X)
    texts = [[graph_layer(layer).code.graphs[0].text for layer in graphs.layers] for graphs in (asked, plain)]
    assert texts[0] == texts[1]


CAUSAL = nn.Transformer.generate_square_subsequent_mask(4)
PADDING = torch.tensor([[False, False, True, True]]).expand(2, 4)


@quick("mask0")
@pytest.mark.parametrize("mask", [CAUSAL, torch.eye(4) * -1e9, CAUSAL == 0])
def test_masks_of_torchs_transformers(mask: Tensor) -> None:
    torch.manual_seed(5)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    module, x = nn.TransformerEncoder(layer, 1), torch.randn(2, 4, 8)
    graphs = captured(module, x, mask)
    for other in (mask, CAUSAL, torch.zeros(4, 4), mask):
        assert torch.equal(variant_and_output(graphs, x, other)[1], module(x, other))
