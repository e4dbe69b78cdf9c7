"""Tensors at hosts that have them on an accelerator: the same bits, and each looks as this process has it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.hosts.remote_tensor import RemoteTensor, local, remote
from lightning_hetpipe.torch_private.tensors import exchange
from tests.hosts.test_remote_tensors import ONES, OPTIMIZERS, TWOS, Table, assert_alike, gradients, net
from tests.support.accelerator import NAME

pytestmark = pytest.mark.usefixtures("accelerator")

START = torch.arange(12.0).view(3, 4).sub(5)


@pytest.fixture
def table() -> Table:
    return Table(f"{NAME}:1")


@pytest.mark.parametrize("number", range(len(ONES)))
def test_operators_on_one(number: int, table: Table) -> None:
    plain, there = START.clone(), remote(START, table.memory)
    assert_alike(ONES[number](plain), ONES[number](there))
    assert_alike(plain, there)


@pytest.mark.parametrize("number", range(len(TWOS)))
@pytest.mark.parametrize("both", [True, False])
def test_operators_on_two(number: int, both: bool, table: Table) -> None:
    """The other one is there, too, or in this process."""
    plain = [START.clone(), START * 2]
    there = [remote(START, table.memory), remote(START * 2, table.memory) if both else plain[1].clone()]
    assert_alike(TWOS[number](*plain), TWOS[number](*there))
    assert_alike(plain, there)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, table: Table) -> None:
    plain, there = net(), net()
    for parameter in there.parameters():
        exchange(parameter, nn.Parameter(remote(parameter, table.memory)))
    steps = [OPTIMIZERS[name](each.parameters()) for each in (plain, there)]
    for seed in range(3):
        for module, optimizer in zip((plain, there), steps, strict=True):
            gradients(module, seed)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    for mine, other in zip(there.parameters(), plain.parameters(), strict=True):
        assert torch.equal(local(mine).cpu(), other)
    assert all(each.device == table.held.device for each in table.held._held.values())


def test_they_look_as_on_the_cpu(table: Table) -> None:
    weight = remote(START, table.memory)
    for each in (weight, torch.zeros_like(weight, device="cpu"), weight.new_zeros(2), weight[0].sum(), weight.detach()):
        assert isinstance(each, RemoteTensor)
        assert each.device.type == "cpu"
    assert local(weight).device.type == "cpu"
    assert type(weight.to("cpu")) is RemoteTensor
    assert type(weight.to(f"{NAME}:1")) is Tensor


def test_what_an_operator_is_given_goes_to_a_host_with_an_accelerator(table: Table) -> None:
    """Wherever most bytes are: on the CPU it would have other bits than on a GPU."""
    weight, large = remote(START[0], table.memory), torch.ones(100, 4)
    assert isinstance(large @ weight, RemoteTensor)


def test_streams_use_nothing_of_them(table: Table) -> None:
    """A stream that uses a tensor of this process is told to its memory; the values of others are not asked for."""
    weight = remote(START, table.memory)
    weight.record_stream(torch.Stream(torch.device(NAME, 0)))
    table.memory.flush()
    assert not any(each.method == "bring" for each in table.sent)
