"""Why a module has no graph is said in one sentence, with the user's line; and capturing leaves no trace."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from lightning_hetpipe.capture.effects import FrozenValues
from lightning_hetpipe.capture.export import graph_of
from lightning_hetpipe.errors import SettingError

X = torch.randn(4, 3)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)


class Decides(Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if y.sum() > 0:
            return -y
        return y


class Averages(Linear):
    def __init__(self, momentum: float | None = None) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x))
        return y


class Counts(Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * x.max().item()
        return y


class Numpy(Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + torch.from_numpy(np.abs(x.detach().numpy()))
        return y


class Rolls(Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * random.random()
        return y


class RollsNumpy(Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * float(np.random.rand())
        return y


class Pools(Linear):
    """Adds rows up by groups, of which there are as many as the data says, unless that is given."""

    def forward(self, x: Tensor, group: Tensor, size: int | None = None) -> Tensor:
        y = self.linear(x)
        groups = int(group.max()) + 1 if size is None else size
        sums: Tensor = y.new_zeros(groups, y.shape[1]).index_add(0, group, y)
        return sums


def test_the_remedy_for_a_size_that_is_computed_from_data() -> None:
    group = torch.tensor([0, 1, 1, 2])
    with pytest.raises(SettingError, match=r"`groups = int\(.*; give it that number as an argument \(a size, say"):
        graph_of("model", Pools(), (X, group), {})
    graph_of("model", Pools(), (X, group, 3), {})


class WithLoss(Linear):
    """Computes its loss, if it is given labels, and in a way that has no graph."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        y = self.linear(x)
        if labels is None:
            return y
        return F.cross_entropy(y, labels) * labels.numpy().size


def test_the_remedy_for_a_loss_in_the_model() -> None:
    labels = torch.arange(len(X)) % 2
    with pytest.raises(
        SettingError, match=r"; if that is in its loss, call it without labels, and compute the loss in"
    ):
        graph_of("model", WithLoss(), (X,), {"labels": labels})
    with pytest.raises(SettingError) as refused:
        graph_of("model", Numpy(), (X,), {})
    assert "labels" not in str(refused.value)
    graph_of("model", WithLoss(), (X,), {})


class Replaces(nn.Module):
    """Puts a tensor of another shape in the place of its buffer, which a graph could not write into it."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = (self.mean + x.detach().mean()).reshape(1)
        return x + self.mean


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            Decides(),
            r"decides by the values of its data .* at test_export.py:\d+, `if y.sum\(\) > 0:`.*; use torch.where",
        ),
        (Numpy(), r"cannot be captured by torch.export at test_export.py:\d+, `y: Tensor .*numpy\(\)"),
        (Rolls(), r"'model' draws random numbers of Python or numpy in forward, .*; draw them with torch"),
        (RollsNumpy(), r"'model' draws random numbers of Python or numpy in forward"),
        (
            Replaces(),
            r"puts another tensor in the place of its buffer 'model.mean' in forward, .*; change the buffer in",
        ),
        (Averages(), r"'model.norm' is a BatchNorm1d with momentum=None, .*; give it a momentum, such as 0.1"),
    ],
)
def test_what_has_no_graph(module: nn.Module, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        graph_of("model", module, (X,), {})


@pytest.mark.parametrize("module", [Averages(0.1), Averages().eval()])
def test_batchnorm_with_a_momentum_has_one(module: nn.Module) -> None:
    graph_of("model", module, (X,), {})


def test_a_refusal_is_all_that_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """Torch printed the whole graph before it, twice."""
    with pytest.raises(SettingError):
        graph_of("model", Decides(), (X,), {})
    assert capfd.readouterr() == ("", "")


def test_lines_of_libraries_whose_names_begin_as_torchs_are_named() -> None:
    file, names = f"{Path(torch.__file__).parent}extra/nets.py", dict[str, Any]()
    exec(compile("def forward(self, x):\n    return x + x.detach().numpy().sum()", file, "exec"), names)
    with pytest.raises(SettingError, match=r"cannot be captured by torch.export at nets.py:2"):
        graph_of("model", type("Net", (Linear,), {"forward": names["forward"]})(), (X,), {})


@torch.fx.wrap
def halved(x: Tensor) -> Tensor:
    return x / 2


class Halves(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return halved(self.linear(x))


def test_functions_that_tracing_replaces_are_no_effect() -> None:
    """Torch puts others for functions of ``torch.fx.wrap`` while it traces."""
    module = Halves()
    frozen = FrozenValues(module)
    with frozen.noted():
        module(X)
    graph_of("model", module, (X,), {}, frozen=frozen)


def test_what_forward_prints_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    class Prints(Linear):
        def forward(self, x: Tensor) -> Tensor:
            print("here", file=sys.stderr)
            y: Tensor = self.linear(x)
            return y

    graph_of("model", Prints(), (X,), {})
    assert "here" in capsys.readouterr().err


def test_no_trace_remains() -> None:
    module = Linear()
    module.forward = lambda x: module.linear(x)  # as a user may patch it
    torch_prune: Any = prune.l1_unstructured  # torch has no types here
    torch_prune(module.linear, "weight", amount=0.5)  # its hook sets an attribute
    before: list[dict[str, Any]] = [dict(vars(part)) for part in module.modules()]
    parameters = dict(module.named_parameters())
    graph, _ = graph_of("model", module, (X,), {})
    assert [dict(vars(part)) for part in module.modules()] == before
    assert all(parameter is parameters[name] for name, parameter in module.named_parameters())
    assert torch.equal(graph((X,), {}), module(X))


def test_sizes_may_vary() -> None:
    class Sums(Linear):
        def forward(self, x: Tensor, *, more: Tensor) -> Tensor:
            y: Tensor = self.linear(x).sum(0) + more.mean(0)
            return y

    module = Sums()
    graph, _ = graph_of("model", module, (X,), {"more": torch.randn(5, 3)})
    x, more = torch.randn(9, 3), torch.randn(2, 3)
    assert torch.equal(graph((x,), {"more": more}), module(x, more=more))


class Remembers(Linear):
    """Sets an attribute: in every call, or in its first one only."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always, self.calls = always, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.always or self.calls == 0:
            self.calls += 1
        y: Tensor = self.linear(x)
        return y


def test_attributes_that_forward_sets() -> None:
    module = Remembers(always=True)
    module(X)
    with pytest.raises(SettingError, match=r"'model' sets its attribute 'calls' \(of Remembers\) in forward"):
        graph_of("model", module, (X,), {})
    assert module.calls == 1
    once = Remembers(always=False)
    once(X)
    assert torch.equal(graph_of("model", once, (X,), {})[0]((X,), {}), once(X))


def test_hooks_of_the_module_itself_are_no_part_of_its_graph() -> None:
    module = nn.Linear(X.shape[-1], 2)
    expected = module(X)
    module.register_forward_hook(lambda module, args, output: output * 100)
    module.register_forward_pre_hook(lambda module, args: (args[0] * 100,))
    assert torch.equal(graph_of("model", module, (X,), {})[0]((X,), {}), expected)
    assert not torch.equal(module(X), expected)


def test_a_module_is_not_told_that_it_is_traced() -> None:
    """Libraries compute by other operators then, whose gradients differ in their last bits."""

    class Tells(Linear):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            return y.tanh() if torch.compiler.is_compiling() or torch.compiler.is_exporting() else y.relu()

    module = Tells()
    graph, _ = graph_of("model", module, (X,), {})
    assert torch.equal(graph((X,), {}), module(X))


def test_a_module_that_can_only_be_traced_where_it_is_told_so() -> None:
    class Tells(Linear):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            if torch.compiler.is_compiling():
                return y.relu()
            return y * torch.from_numpy((y > 0).numpy())

    module = Tells()
    graph, _ = graph_of("model", module, (X,), {})
    assert torch.equal(graph((X,), {}), module(X))
