"""Tensors at a host: whatever is computed with them has the bits that it has here, and they are seen to be tensors."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_hetpipe.hosts import orders
from lightning_hetpipe.hosts.host_memory import HeldTensors, HostMemory
from lightning_hetpipe.hosts.remote_tensor import RemoteTensor, local, remote
from lightning_hetpipe.hosts.wire import CODE
from lightning_hetpipe.pipeline.plain_code import NotPlain
from lightning_hetpipe.pipeline.user.user_section import ProcessState, own_state
from lightning_hetpipe.torch_private.tensors import exchange
from tests.support.marks import explores


class Table:
    """A host's table at the other end of messages that are bytes, and the memory that this process sees."""

    def __init__(self, device: str = "cpu") -> None:
        self.held = HeldTensors()
        self.held.device = torch.device(device)
        self.sent: list[Any] = []
        self.memory = HostMemory(self._send, lambda result: result.result(), accelerates=device != "cpu")

    def _send(self, order: Any) -> None:
        order = _copied(order)
        self.sent.append(order)
        with own_state(ProcessState.seeded(9, 0, "another process")):
            result = getattr(self.held, order.method)(*order.arguments)
        if order.number is not None:
            self.memory.answered(_copied(orders.Brought(order.number, result)))


def _copied(message: Any) -> Any:
    text, tensors = CODE.write(message)
    rest = iter([bytes(each) for each in tensors])
    return CODE.read(text, lambda length: torch.frombuffer(bytearray(next(rest)), dtype=torch.uint8))


@pytest.fixture
def table() -> Table:
    return Table()


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Conv1d(1, 2, 3), nn.LayerNorm(5), nn.Embedding(4, 3))


def moved(module: nn.Module, tables: list[Table]) -> None:
    """Have the parameters of ``module`` at hosts in turn; where ``tables`` ends, one stays here."""
    for number, parameter in enumerate(module.parameters()):
        place = number % (len(tables) + 1)
        if place < len(tables):
            exchange(parameter, nn.Parameter(remote(parameter, tables[place].memory)))


def gradients(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parameters: list[Any] = [*module.parameters()]
    for parameter in parameters:
        value = torch.randn(parameter.shape, generator=generator)
        memory = getattr(parameter, "handle", None) and parameter.handle.memory
        parameter.grad = value if memory is None else remote(value, memory)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
    "radam": lambda p: torch.optim.RAdam(p, 0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, centered=True, momentum=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.1),
    "asgd": lambda p: torch.optim.ASGD(p, 0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
}


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, hosts: int) -> None:
    """Clipping, too; some of the weights are in this process."""
    plain, there = net(), net()
    moved(there, [Table() for _ in range(hosts)])
    steps = [OPTIMIZERS[name](each.parameters()) for each in (plain, there)]
    for seed in range(4):
        for module, optimizer in zip((plain, there), steps, strict=True):
            gradients(module, seed)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            nn.utils.clip_grad_value_(module.parameters(), 0.2)
            optimizer.step()
    for mine, other in zip(there.parameters(), plain.parameters(), strict=True):
        assert torch.equal(local(mine), other)
    for mine, other in zip(steps[1].state.values(), steps[0].state.values(), strict=True):
        for key, value in other.items():
            assert torch.equal(local(mine[key]), value) if isinstance(value, Tensor) else mine[key] == value


@pytest.mark.parametrize("scale", [2.0, float("inf")])
def test_a_loss_scaler_sees_what_is_not_finite(scale: float) -> None:
    plain, there = net(), net()
    moved(there, [Table()])
    found = []
    for module in (plain, there):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        scaler.scale(torch.zeros(()))
        gradients(module, 0)
        first = next(module.parameters())  # is at the host
        assert first.grad is not None
        first.grad.mul_(scale)
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    assert found[0] == found[1]
    for mine, other in zip(there.parameters(), plain.parameters(), strict=True):
        assert torch.equal(local(mine), other)


ONES: list[Callable[[Any], Any]] = [
    lambda a: a + 1,
    lambda a: a.mul_(3),
    lambda a: a.t() @ a,
    lambda a: a[1:],
    lambda a: a.view(-1).sum(),
    lambda a: torch.cat([a, a]),
    lambda a: a.topk(2),
    lambda a: torch.linalg.vector_norm(a),
    lambda a: a.clone().zero_().add_(a, alpha=2),
    lambda a: a.max().item(),
    lambda a: torch.complex(a, -a).sum().item(),
    lambda a: a[a > 0],
    torch.unique,
    lambda a: torch.split(a, 2),
    lambda a: a.to(torch.float64),
    lambda a: torch.where(a > 0, a, 0.0),
    lambda a: (a == a).all().item(),
    lambda a: a.std(unbiased=False),
    lambda a: torch.zeros_like(a, device="cpu"),
    lambda a: a.new_full((2,), 3.0),
    lambda a: a.tolist(),
    lambda a: a.numpy().sum(),
    lambda a: float(a.mean()),
    lambda a: copy.deepcopy(a),
    lambda a: a.argsort(),
    lambda a: a.expand(2, *a.shape),
]
TWOS: list[Callable[[Tensor, Tensor], Any]] = [
    lambda a, b: a + b,
    lambda a, b: a.copy_(b),
    lambda a, b: torch.stack([a, b]),
    lambda a, b: torch.equal(a, b),
    lambda a, b: torch.lerp(a, b, 0.3),
    lambda a, b: a.addcmul_(b, b, value=0.5),
    lambda a, b: torch._foreach_add([a, b], 1.0),
    lambda a, b: torch._foreach_mul_([a, b], [2.0, 3.0]),
    lambda a, b: torch._foreach_copy_([a, b], [b.clone(), a.clone()]),
    lambda a, b: torch.addmm(a @ a.t(), a, b.t()),
    lambda a, b: torch.maximum(a, b, out=torch.empty_like(a)),
]


@explores(60)
@given(
    st.lists(st.tuples(st.integers(0, len(ONES + TWOS) - 1), st.integers(0, 2), st.integers(0, 2)), max_size=8),
)
def test_operators(calls: list[tuple[int, int, int]]) -> None:
    """Sequences of them on tensors of two hosts and of this process, which they change."""
    start = [torch.arange(12.0).view(3, 4).sub(5 + n) for n in range(3)]
    tables = [Table(), Table()]
    plain = [each.clone() for each in start]
    there = [remote(start[0], tables[0].memory), remote(start[1], tables[1].memory), start[2].clone()]
    for call, one, other in calls:
        if call < len(ONES):
            expected, found = ONES[call](plain[one]), ONES[call](there[one])
        else:
            run = TWOS[call - len(ONES)]
            expected, found = run(plain[one], plain[other]), run(there[one], there[other])
        assert_alike(expected, found)
        for mine, its in zip(there, plain, strict=True):
            assert_alike(its, mine)


def assert_alike(expected: Any, found: Any) -> None:
    if isinstance(expected, Tensor):
        assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
        assert torch.equal(local(found), expected)
    elif isinstance(expected, list | tuple):
        assert len(expected) == len(found)
        for pair in zip(expected, found, strict=True):
            assert_alike(*pair)
    else:
        assert expected == found


def test_random_numbers_are_those_of_this_process(table: Table) -> None:
    plain, there = torch.ones(20), remote(torch.ones(20), table.memory)
    found = []
    for each in (plain, there):
        torch.manual_seed(7)
        found.append([torch.randn_like(each), each.clone().bernoulli_(0.5), nn.functional.dropout(each, 0.5)])
    assert_alike(*found)


def test_autograd_goes_through_them(table: Table) -> None:
    """A regularizer of the user's, or a forward of an evaluation that wants gradients."""
    module, there = nn.Linear(3, 2), nn.Linear(3, 2)
    there.load_state_dict(module.state_dict())
    moved(there, [table])
    for each in (module, there):
        (each(torch.ones(4, 3)).square().sum() + each.weight.norm()).backward()
    assert_alike([each.grad for each in module.parameters()], [each.grad for each in there.parameters()])


def test_what_is_saved_has_values(table: Table) -> None:
    module = nn.Linear(2, 2)
    weight = module.weight.detach().clone()
    moved(module, [table])
    file = io.BytesIO()
    torch.save({**module.state_dict(), "itself": module.weight}, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert type(found["weight"]) is Tensor
    assert torch.equal(found["weight"], weight)
    assert type(found["itself"]) is nn.Parameter
    assert str(local(module.weight)) == str(module.weight)


def test_data_is_given_and_taken(table: Table) -> None:
    weight = nn.Parameter(remote(torch.ones(3), table.memory))
    weight.data = torch.full((3,), 2.0)
    assert weight.tolist() == [2.0, 2.0, 2.0]
    weight.data.mul_(2)
    assert weight.tolist() == [4.0, 4.0, 4.0]
    with pytest.raises(RuntimeError, match="shape"):
        weight.data = torch.ones(4)


def test_the_host_frees_what_nobody_needs(table: Table) -> None:
    weight = remote(torch.ones(3), table.memory)
    for _ in range(300):
        weight.add_(weight * 0)
    table.memory.flush()
    del weight
    remote(torch.ones(1), table.memory).add_(1)
    table.memory.flush()
    assert not table.held._held


def test_operators_that_nothing_waits_for_travel_together(table: Table) -> None:
    weight = remote(torch.ones(3), table.memory)
    for _ in range(20):
        weight.add_(1)
    assert len(table.sent) == 1
    assert weight.sum().item() == 63.0
    assert len(table.sent) <= 4


def test_values_stay_when_the_host_ends(table: Table) -> None:
    weight = remote(torch.ones(3), table.memory)
    weight.add_(1)
    table.memory.close()
    count = len(table.sent)
    weight.add_(1)
    assert (weight * 2).tolist() == [6.0, 6.0, 6.0]
    assert isinstance(weight.add_(0), RemoteTensor)
    assert len(table.sent) == count


def test_only_operators_of_torch_run_at_a_host(table: Table) -> None:
    for name in ("os::system", "prims::no_such", "aten::no_such", "nothing", "aten::__class__", "aten::from_file"):
        with pytest.raises(NotPlain, match="is no operator of torch's own"):
            table.held.run([orders.Run(name, [], {}, [])], [])


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    with torch.random.fork_rng():
        yield
