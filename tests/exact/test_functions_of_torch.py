"""Functions and buffers in models with which graphs, or modes around operators, used to fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.data import DataLoader

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.errors import SettingError
from tests.support.small import Learner, Step, batches, plain_step
from tests.support.trainers import quiet_trainer


class Net(nn.Module):
    mean: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.d = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("steps", torch.zeros(()))

    def between(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(torch.relu(self.b(self.between(torch.relu(self.a(x))))))
        return y


class DecidesByFunctions(Net):
    def between(self, h: Tensor) -> Tensor:
        found: Tensor = torch.cond(h.sum() > 3, lambda v: v.sin(), lambda v: v.cos(), (h,))
        return found


class DecidesByWeights(Net):
    def between(self, h: Tensor) -> Tensor:
        found: Tensor = torch.cond(h.mean() > 0.3, lambda v: F.linear(v, self.d.weight), lambda v: v * 2, (h,))
        return found


class InPlace(Net):
    def between(self, h: Tensor) -> Tensor:
        self.mean.lerp_(h.detach().mean(0), 0.1)
        self.steps.add_(1)
        return (h - self.mean) / (1 + 0.01 * self.steps)


class Assigned(Net):
    def between(self, h: Tensor) -> Tensor:
        self.mean = torch.lerp(self.mean, h.detach().mean(0), 0.1)
        self.steps += 1
        return (h - self.mean) / (1 + 0.01 * self.steps)


class AssignedWithoutGradients(Net):
    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean = torch.lerp(self.mean, h.mean(0), 0.1)
            self.steps += 1
        return (h - self.mean) / (1 + 0.01 * self.steps)


class ByData(Net):
    def between(self, h: Tensor) -> Tensor:
        self.mean.data.copy_(torch.lerp(self.mean, h.detach().mean(0), 0.1))
        self.steps.data.add_(1)
        return (h - self.mean) / (1 + 0.01 * self.steps)


class ReadsBefore(Net):
    """The backward needs what the buffer was before it was assigned."""

    def between(self, h: Tensor) -> Tensor:
        scaled = h * (1 + self.mean)
        self.mean = torch.lerp(self.mean, h.detach().mean(0), 0.1)
        return scaled * (1 + self.mean)


class AssignedBeneath(Net):
    """torch.export does not see it."""

    def between(self, h: Tensor) -> Tensor:
        self._buffers["mean"] = torch.lerp(self.mean, h.detach().mean(0), 0.1)
        return h - self.mean


class ViewOfActivation(Net):
    def between(self, h: Tensor) -> Tensor:
        self.mean = h.detach()[0]
        return h - self.mean


class ViewOfInput(Net):
    """A comparison with the graph wrote the buffer's earlier value into the batch."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x[:2].flatten()[:8]
        y: Tensor = super().forward(x)
        return y

    def between(self, h: Tensor) -> Tensor:
        return h - self.mean


class DataOfInput(ViewOfInput):
    """As a view of the input, without another tensor."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data = x[:2].flatten()[:8]
        return Net.forward(self, x)


class ViewOfBuffer(Net):
    """Stages had a copy of each, of which one did not follow."""

    first: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", self.mean[:1])

    def between(self, h: Tensor) -> Tensor:
        self.mean += 0.1
        return h + self.first


class GivesBuffer(Net):
    """A comparison put the buffer back, and took it for what the module gave."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.mean

    def between(self, h: Tensor) -> Tensor:
        self.mean.lerp_(h.detach().mean(0), 0.1)
        return h


def test_a_buffer_that_is_given() -> None:
    def step(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        logits, mean = module.net(x)
        return F.cross_entropy(logits + mean[:3], y)

    found = list[list[Tensor]]()
    for strategy in ("auto", pipelined("sync"), pipelined("stash"), pipelined("stash")):
        L.seed_everything(0, verbose=False)
        module = Learner(step, net=GivesBuffer())
        quiet_trainer(strategy).fit(module, batches())
        found.append([*module.state_dict().values()])
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[2], found[3]))


class AssignsOutput(Net):
    """The buffer was taken for a copy."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        self.mean = y.detach()[0]
        return y, self.mean

    def between(self, h: Tensor) -> Tensor:
        return h + self.mean[0]


@pytest.mark.parametrize("net", [GivesBuffer, AssignsOutput])
def test_a_buffer_that_is_changed_where_it_is_given(net: type[nn.Module]) -> None:
    """Stages had buffers of their own, or wrote into what the step had changed."""

    def step(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        logits, mean = module.net(x)
        mean *= 0.5
        return F.cross_entropy(logits, y)

    assert all(map(torch.equal, trained(net, pipelined("sync"), step), trained(net, "auto", step)))
    with pytest.raises(SettingError, match=r"'net.mean'.*weights='sync'"):
        trained(net, pipelined("stash"), step)


def test_a_buffer_that_a_later_call_changes() -> None:
    def step(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        (one, mean), (other, _) = module.net(x), module.net(x)
        return F.cross_entropy(one + other + mean[:3], y)

    with pytest.raises(SettingError, match=r"'net' shares the memory of its buffer 'net.mean'.* a clone\(\)"):
        trained(GivesBuffer, pipelined("sync"), step)


def trained(net: type[nn.Module], strategy: Any, step: Step = plain_step) -> list[Tensor]:
    L.seed_everything(0, verbose=False)
    module = Learner(step, net=net())
    quiet_trainer(strategy).fit(module, batches())
    return [tensor.detach() for tensor in module.state_dict().values()]


def pipelined(weights: str) -> HetPipeStrategy:
    return HetPipeStrategy(stages=2, in_flight=3, weights=weights)


STASHED: dict[type[nn.Module], list[Tensor]] = {}


def stashed(net: type[nn.Module]) -> list[Tensor]:
    """Result of ``trained`` with stashed weights, once for all tests."""
    if net not in STASHED:
        STASHED[net] = trained(net, pipelined("stash"))
    return STASHED[net]


OTHERS = [DecidesByFunctions, DecidesByWeights, ReadsBefore, ViewOfActivation, ViewOfInput, DataOfInput]
BUFFERS = [InPlace, Assigned, AssignedWithoutGradients, ByData]


@pytest.mark.parametrize("net", [*OTHERS, *BUFFERS])
def test_they_train_as_in_a_plain_run(net: type[nn.Module]) -> None:
    """Errors of torch's tracer stayed in the process, so that plain runs after them failed, too."""
    synchronous, plain = trained(net, pipelined("sync")), trained(net, "auto")
    assert all(map(torch.equal, synchronous, plain))
    assert all(map(torch.equal, stashed(net), trained(net, pipelined("stash"))))


@pytest.mark.parametrize("net", [AssignedBeneath, ViewOfBuffer])
def test_what_no_graph_can_do_runs_as_user_code(net: type[nn.Module]) -> None:
    assert all(map(torch.equal, trained(net, pipelined("sync")), trained(net, "auto")))
    with pytest.raises(SettingError, match=r"'net.mean'.*weights='sync'"):
        trained(net, pipelined("stash"))


@pytest.mark.parametrize("net", [ViewOfInput, DataOfInput])
def test_data_stay_as_they_were(net: type[nn.Module]) -> None:
    """A buffer that is a view of the data is none for the stages, which write to buffers in place."""
    data: Any = [(torch.randn(4, 6), torch.randint(0, 3, (4,))) for _ in range(5)]
    before = [x.clone() for x, _ in data]
    module = Learner(net=net())
    quiet_trainer(pipelined("sync"), max_epochs=2).fit(module, DataLoader(data, batch_size=None))
    assert all(map(torch.equal, (x for x, _ in data), before))


@pytest.mark.parametrize("net", BUFFERS[1:])
def test_buffers_are_as_with_changes_in_place(net: type[nn.Module]) -> None:
    """They were "outside the pipelined modules", or made one layer of all."""
    assert all(map(torch.equal, stashed(net), stashed(InPlace)))


def test_whole_numbers_of_the_size_of_a_tensor_with_a_gradient() -> None:
    """A stage ended with "derivative for aten::randint_like is not implemented"."""

    class Noisy(Net):
        def between(self, h: Tensor) -> Tensor:
            return h + 0.1 * torch.randint_like(h, 0, 3)

    assert all(map(torch.equal, trained(Noisy, pipelined("stash")), trained(Noisy, pipelined("stash"))))


def test_flex_attention_in_a_validation() -> None:
    """Dynamo traced a mode of ours."""

    class Attends(Net):
        def between(self, h: Tensor) -> Tensor:
            q = h[:, None, None].expand(-1, 1, 16, -1)
            found: Tensor = flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s - 0.1 * (i - j).abs())
            return found.mean((1, 2))

    class Validates(Learner):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def validated(strategy: Callable[[], Any]) -> Any:
        L.seed_everything(0, verbose=False)
        return quiet_trainer(strategy()).validate(Validates(net=Attends()), batches(), verbose=False)

    assert validated(lambda: pipelined("stash")) == validated(lambda: "auto")


def test_torch_forgets_what_it_could_not_compile() -> None:
    """A branch function that was imported before the fit is refused, and a plain run trains it afterwards."""
    cond = torch.cond

    class Imported(Net):
        def between(self, h: Tensor) -> Tensor:
            found: Tensor = cond(h.mean() > 0.3, lambda v: self.b(v), lambda v: v * 2, (h,))
            return found

    with pytest.raises(Exception, match=r"could not compile .*; call torch.cond by that name, .*, or set in_flight=1$"):
        trained(Imported, pipelined("stash"))
    assert trained(Imported, "auto")
