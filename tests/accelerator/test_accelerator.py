"""The test accelerator computes what a CPU computes, and refuses what a GPU refuses."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.accelerator import NAME, TestAccelerator, set_limit
from tests.support.equality import assert_same

pytestmark = pytest.mark.usefixtures("accelerator")

MIB = 1 << 20


def place(index: int) -> torch.device:
    return torch.device(NAME, index)


class Recurrent(nn.Module):
    """Both kinds of recurrent layers, after an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.gru = nn.GRU(8, 8, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.gru(self.lstm(self.table(x))[0])[0]
        return out


class Attention(nn.Module):
    """Causal attention of heads, of a mask that is made of booleans, and of a bias that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:2], 4, -1).transpose(1, 2)
        causal = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        masked = F.scaled_dot_product_attention(heads, heads, heads, mask)
        biased = F.scaled_dot_product_attention(heads, heads, heads, self.bias)
        return (causal * masked * biased).transpose(1, 2).flatten(2)


def tokens() -> Tensor:
    return torch.randint(0, 20, (4, 7))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.3), nn.Linear(16, 4)),
        lambda: torch.randn(16, 8),
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
            nn.GroupNorm(2, 4),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        ),
        lambda: torch.randn(4, 3, 8, 8),
    ),
    "attention": (lambda: nn.Sequential(nn.Linear(8, 16), Attention()), lambda: torch.randn(2, 6, 8)),
    "recurrent": (Recurrent, tokens),
    "transformer": (
        lambda: nn.Sequential(nn.Embedding(20, 16), nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)),
        tokens,
    ),
}


def trained(model: nn.Module, inputs: Tensor, device: torch.device, kind: str) -> list[Tensor]:
    """Outputs, gradients and weights of three steps of ``model`` on ``device``; all are on the CPU then."""
    model, inputs = copy.deepcopy(model).to(device), inputs.to(device)
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), foreach=False)
        if kind == "adamw"
        else torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    )
    torch.manual_seed(3)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        output = model(inputs)
        output.square().mean().backward()
        found += [output.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]
        optimizer.step()
    return [tensor.cpu() for tensor in [*found, *model.state_dict().values()]]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_the_bits_of_the_cpu(name: str, kind: str) -> None:
    make, inputs = MODELS[name]
    model, given = make(), inputs()
    assert_same(trained(model, given, torch.device("cpu"), kind), trained(model, given, place(2), kind))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", MODELS)
def test_an_evaluation_computes_the_bits_of_the_cpu(name: str, mode: Callable[[], Any]) -> None:
    make, inputs = MODELS[name]
    model, given = make().eval(), inputs()
    with mode():
        assert torch.equal(model(given), copy.deepcopy(model).to(place(1))(given.to(place(1))).cpu())


@pytest.mark.parametrize("name", ["linear", "convolutions", "attention", "transformer"])
def test_autocast_computes_the_bits_of_the_cpu(name: str) -> None:
    make, inputs = MODELS[name]
    model, given = make().eval(), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(given)
    with torch.autocast(NAME, torch.bfloat16):
        found = model.to(place(1))(given.to(place(1)))
    assert found.dtype is expected.dtype
    assert torch.equal(expected, found.cpu())


def test_autograd_crosses_devices() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.randn(3, 4)
    second(first(x).relu()).sum().backward()
    expected = [first.weight.grad, second.weight.grad]
    first, second = copy.deepcopy(first), copy.deepcopy(second)
    first.zero_grad()
    second.zero_grad()
    first.to(place(0))
    second.to(place(3))
    second(first(x.to(place(0))).relu().to(place(3))).sum().backward()
    assert first.weight.grad is not None
    assert first.weight.grad.device == place(0)
    assert_same(expected, [layer.weight.grad.cpu() for layer in (first, second) if layer.weight.grad is not None])


REFUSED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda a, b: a + b,
    "in place": lambda a, b: a.add_(b),
    "matmul": lambda a, b: a @ b,
    "cat": lambda a, b: torch.cat([a, b]),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "linear": lambda a, b: F.linear(a, b),
    "lstm": lambda a, b: nn.LSTM(4, 4).to(a.device)(b),
}


@pytest.mark.parametrize("other", [f"{NAME}:1", "cpu"])
@pytest.mark.parametrize("name", REFUSED)
def test_operands_on_two_devices_are_refused(name: str, other: str) -> None:
    a, b = torch.ones(4, 4, device=place(0)), torch.ones(4, 4, device=other)
    with pytest.raises(RuntimeError, match=r"Expected all tensors to be on the same device.*testacc:0"):
        REFUSED[name](a, b)


def test_what_cuda_allows_of_the_cpu() -> None:
    a = torch.arange(6.0, device=place(1)).view(2, 3)
    assert torch.equal((a + torch.tensor(2.0)).cpu(), torch.arange(6.0).view(2, 3) + 2)
    assert torch.equal(a[torch.tensor([1, 0])].cpu(), torch.tensor([[3.0, 4, 5], [0, 1, 2]]))
    a[torch.tensor([1])] = torch.tensor(9.0)
    assert a[1].tolist() == [9, 9, 9]
    b = torch.empty(2, 3, device=place(2))
    assert torch.equal(b.copy_(a).cpu(), a.cpu())
    with pytest.raises(RuntimeError, match="same device"):
        torch.tensor(1.0).add_(a.sum())


def test_a_device_has_a_limit() -> None:
    """Bytes are counted for each device, and freed; the one above the limit is refused."""
    left = torch.accelerator.memory_allocated(1)  # by earlier tests
    set_limit(1, 3 * MIB + left)
    a = torch.zeros(MIB // 4, device=place(1))
    b = a + 1
    assert torch.accelerator.memory_allocated(1) == 2 * MIB + left
    with pytest.raises(torch.OutOfMemoryError, match=r"testacc:1 out of memory. Tried to allocate 2097152 bytes"):
        torch.zeros(MIB // 2, device=place(1))
    with pytest.raises(torch.OutOfMemoryError):
        torch.cat([a, b])
    del b
    torch.zeros(MIB // 2, device=place(1))
    assert torch.accelerator.memory_allocated(1) == MIB + left
    assert torch.accelerator.max_memory_allocated(1) == 3 * MIB + left
    assert torch.accelerator.max_memory_allocated(0) == torch.accelerator.memory_allocated(0)
    torch.accelerator.reset_peak_memory_stats(1)
    assert torch.accelerator.max_memory_allocated(1) == MIB + left


def test_storages_are_resized_and_shared() -> None:
    left = torch.accelerator.memory_allocated(0)
    a = torch.arange(4.0, device=place(0))
    view = a[1:]
    a.untyped_storage().resize_(0)
    assert torch.accelerator.memory_allocated(0) == left
    a.untyped_storage().resize_(16)
    a.copy_(torch.tensor([1.0, 2, 3, 4]))
    assert view.tolist() == [2, 3, 4]
    a.resize_(8)
    assert a.tolist()[:4] == [1, 2, 3, 4]
    assert torch.accelerator.memory_allocated(0) == 32 + left
    other = torch.empty(0, device=place(0)).set_(a)  # type: ignore[call-overload]  # torch has no type for it
    assert other.data_ptr() == a.data_ptr()
    out = torch.empty(0, device=place(0))
    torch.add(a[:4], 1, out=out)
    assert out.tolist() == [2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="different device"):
        torch.empty(0, device=place(1)).set_(a)  # type: ignore[call-overload]


def test_a_parameter_takes_data_of_another_device() -> None:
    """As between the CPU and a GPU: a module keeps its parameters when it moves, and ties between them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    before = list(model.parameters())
    model.to(place(1))
    assert list(map(id, model.parameters())) == list(map(id, before))
    assert model[1].weight is model[0].weight
    before[0].data = before[0].data.to(place(2))
    assert before[0].device == place(2)
    before[0].sum().backward()  # type: ignore[no-untyped-call]
    assert before[0].grad is not None
    assert before[0].grad.device == place(2)


def test_each_device_has_random_numbers_of_its_own() -> None:
    own = torch.Generator(place(1)).manual_seed(5)
    drawn = torch.randn(4, device=place(1), generator=own)
    assert torch.equal(drawn.cpu(), torch.randn(4, generator=torch.Generator().manual_seed(5)))
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.randn(4, device=place(1)).normal_(generator=torch.Generator())
    module = torch.get_device_module(NAME)
    state, host = module.get_rng_state(2), torch.get_rng_state()
    first = F.dropout(torch.ones(32, device=place(2)))
    module.set_rng_state(state, 2)
    assert torch.equal(first, F.dropout(torch.ones(32, device=place(2))))
    assert torch.equal(torch.get_rng_state(), host)
    with torch.random.fork_rng([2], device_type=NAME):
        torch.rand(3, device=place(2))
    torch.manual_seed(7)
    seeded = torch.rand(3, device=place(2))
    torch.manual_seed(7)
    assert torch.equal(seeded, torch.rand(3, device=place(2)))


def test_saved_tensors_come_back_where_they_are_asked_for() -> None:
    file = io.BytesIO()
    torch.save({"a": torch.arange(3.0, device=place(3))}, file)
    for where, expected in [(None, place(3)), ("cpu", torch.device("cpu")), (place(1), place(1))]:
        file.seek(0)
        loaded = torch.load(file, map_location=where)["a"]
        assert loaded.device == expected
        assert loaded.tolist() == [0, 1, 2]
    assert copy.deepcopy(nn.Parameter(torch.ones(2, device=place(2)))).device == place(2)


def test_torch_knows_it_as_the_accelerator(accelerator: TestAccelerator) -> None:
    assert torch.accelerator.current_accelerator() == torch.device(NAME)
    assert torch.accelerator.device_count() == 4
    torch.accelerator.set_device_index(2)
    assert torch.ones(1, device=NAME).device == place(2)
    with torch.accelerator.device_index(1):
        assert torch.accelerator.current_device_index() == 1
    stream = torch.Stream(place(3))
    assert torch.accelerator.current_stream(place(3)) != stream
    torch.accelerator.set_stream(stream)
    assert torch.accelerator.current_stream(place(3)) == stream
    assert torch.accelerator.current_device_index() == 3
    event = stream.record_event()
    torch.accelerator.current_stream(place(0)).wait_event(event)
    event.synchronize()
    torch.accelerator.synchronize(place(3))
    assert torch.ones(2).pin_memory().is_pinned()
    assert not torch.ones(2).is_pinned()
    assert accelerator.get_parallel_devices(accelerator.parse_devices(2)) == [place(0), place(1)]
