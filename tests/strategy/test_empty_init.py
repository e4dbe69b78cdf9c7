"""Modules are made on the host, weights without values on meta, and no values are lost."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.strategy import recorded_init
from lightning_hetpipe.strategy.meta_weights import fill, load
from tests.strategy.test_checkpoint_files import MARGIN, WEIGHTS, Large, linux
from tests.strategy.test_meta_weights import Learns, made, seeded
from tests.support.equality import assert_same
from tests.support.host_memory import Peak
from tests.support.small import batches, pipeline, refused
from tests.support.trainers import quiet_trainer


class Elsewhere(HetPipeStrategy):
    """A strategy whose devices must not be asked for while modules are made."""

    makes = False

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        self.makes = True
        with super().tensor_init_context(empty_init):
            yield
        self.makes = False

    @property
    def root_device(self) -> torch.device:
        assert not self.makes
        return super().root_device


class Configured(Learns):
    """Makes its net in ``configure_model``."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.step = Learns().step
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Learns().net
            assert {p.device.type for p in self.net.parameters()} == {"cpu"}


@pytest.mark.parametrize(("empty_init", "device"), [(True, "meta"), (False, "cpu"), (None, "cpu")])
@pytest.mark.parametrize(("precision", "dtype"), [("32-true", torch.float32), ("bf16-true", torch.bfloat16)])
def test_where_modules_are_made(empty_init: bool | None, device: str, precision: str, dtype: torch.dtype) -> None:
    trainer = quiet_trainer(Elsewhere(stages=2), precision=precision)
    assert {(p.device.type, p.dtype) for p in made(trainer, empty_init).parameters()} == {(device, dtype)}


def test_configure_model_makes_on_the_host() -> None:
    module = Configured()
    quiet_trainer(Elsewhere(stages=2, in_flight=2)).fit(module, batches())
    assert module.net is not None


class Valued(Learns):
    """Has tensors with values, in all ways in which modules have them."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.full((3,), 2.0))
        self.taken = nn.Parameter(pretrained["weight"])
        self.tied = self.taken
        self.register_buffer("mask", torch.ones(3, 3).tril(), persistent=False)
        self.plain = torch.arange(3.0)
        self.metric = torchmetrics.MeanMetric()
        self.recurrent = nn.LSTM(3, 3)
        self.step = lambda _, x, y, batch_idx: Learns().step(self, x, y, batch_idx)


pretrained = {"weight": torch.full((3,), 5.0)}


def test_values_stay() -> None:
    trainer = quiet_trainer(pipeline(2))
    with trainer.init_module(empty_init=True):
        module = Valued()
        elsewhere = torch.empty(3, device="cpu")
    assert {name for name, p in module.named_parameters() if p.is_meta} == {
        name for name, _ in module.named_parameters() if name.startswith(("net", "recurrent"))
    }
    assert not elsewhere.is_meta
    assert module.device == torch.device("cpu")
    assert module.tied is module.taken
    with torch.device("cpu"):
        expected = Valued()
    for name in ("token", "taken", "mask", "plain"):
        assert_same(getattr(expected, name), getattr(module, name), name)
    assert module.metric(torch.ones(1)) == 1
    assert_same(dict(expected.net.named_buffers()), dict(module.net.named_buffers()))


def test_what_lightning_documents(tmp_path: Path) -> None:
    """``load_from_checkpoint`` in ``init_module(empty_init=True)``, with no word of torch's that it loads nothing."""
    plain, trainer = seeded(Valued), quiet_trainer()
    trainer.fit(plain, batches())
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    trainer = quiet_trainer(pipeline(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with trainer.init_module(empty_init=True):
            module = Valued.load_from_checkpoint(tmp_path / "it.ckpt")
    assert_same(dict(plain.state_dict()), dict(module.state_dict()))
    expected = quiet_trainer().validate(plain, batches(), verbose=False)
    assert expected[0]["loss"] == pytest.approx(trainer.validate(module, batches(), verbose=False)[0]["loss"])
    assert_same(dict(plain.state_dict()), dict(module.state_dict()))


def apply(net: nn.Module) -> None:
    def init(part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02)

    net.apply(init)


def through_data(net: Any) -> None:
    net[0].weight.data.normal_()


def in_part(net: Any) -> None:
    with torch.no_grad():
        net[0].weight[0] = 0


class Container(nn.Module):
    """Resets what others hold, which are asked themselves."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.reset_parameters()

    def reset_parameters(self) -> None:
        apply(self.net)


def computed(net: Any) -> None:
    net[0].weight = nn.Parameter(net[0].weight * 0.01)


def computed_through_data(net: Any) -> None:
    net[0].weight.data = net[0].weight.data * 0.01


def zeros(net: Any) -> None:
    net[0].weight = nn.Parameter(torch.zeros_like(net[0].weight))


def another_order(net: Any) -> None:
    net[0].weight = nn.Parameter(net[0].weight.t().clone().t())


def a_part(net: Any) -> None:
    net[0].weight = nn.Parameter(torch.empty(2, *net[0].weight.shape).normal_()[1].clone())


WRITES = [apply, through_data, in_part, Container, computed, computed_through_data, zeros, another_order, a_part]


@pytest.mark.parametrize("write", WRITES)
def test_what_a_constructor_writes_is_there(monkeypatch: pytest.MonkeyPatch, write: Any) -> None:
    """Torch's own reset_parameters would have trained another model, without a word; as LoRA's zeros."""

    class Writes(Learns):
        def __init__(self) -> None:
            super().__init__()
            write(self.net)

    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    trainer = quiet_trainer(pipeline(2))
    with trainer.init_module(empty_init=True):
        module = Writes()
    assert next(module.net.parameters()).is_meta
    trainer.fit(module, batches())
    trainer = quiet_trainer(pipeline(2))
    trainer.fit(expected := seeded(Writes, 5), batches())
    assert_same(dict(expected.state_dict()), dict(module.state_dict()))


class Block(nn.Module):
    """Resets a parameter of its own, and a layer in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.scale)
        nn.init.normal_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) + self.scale
        return found


class Various(Learns):
    """Has what is made in uncommon ways: by views, by a generator, by sources that change, of other dtypes, on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Block())
        self.other = nn.ModuleList([nn.MultiheadAttention(4, 2), nn.Transformer(4, 2, 2, 1, 4), nn.LSTM(3, 3)])
        self.words = nn.Embedding(3, 2, padding_idx=0)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        own = torch.Generator().manual_seed(3)
        self.drawn = nn.ParameterList(torch.empty(2).normal_(generator=own) for _ in range(2))
        scale = torch.full((3,), 2.0)
        self.scaled = nn.Parameter(torch.empty(3).fill_(1.0).mul_(scale))
        scale.zero_()
        self.set = nn.Parameter(torch.empty(3))
        self.set.data.copy_(torch.arange(3.0))
        self.row = nn.Parameter(torch.empty(2, 3).normal_()[1])
        self.column = nn.Parameter(torch.empty(2, 3).normal_().t().half().contiguous())
        self.shared = nn.Parameter(self.words.weight.data.view(-1))
        self.zeros = nn.Parameter(torch.zeros(3, device="meta", dtype=torch.float64))
        self.register_buffer("kept", torch.empty(2).fill_(3.0), persistent=False)
        self.attribute = torch.empty(2).fill_(4.0)
        self.held = [torch.empty(2).normal_()]


def inits(net: Any) -> None:
    """Torch's functions of which some do nothing on meta, in torch 2.13."""
    square, table = net[0].weight, nn.Parameter(torch.empty(4, 5))
    nn.init.orthogonal_(square)
    nn.init.trunc_normal_(table, std=0.02)
    net.table, net.other, net.cube = table, nn.Parameter(torch.empty(4, 5)), nn.Parameter(torch.empty(3, 3, 3))
    nn.init.sparse_(net.other, 0.5)
    nn.init.dirac_(net.cube)
    own = torch.Generator().manual_seed(1)
    net.drawn = nn.ParameterList([torch.empty(3, 3), torch.empty(2), torch.empty(2)])
    nn.init.trunc_normal_(net.drawn[0], generator=own)
    net.drawn[1].data.normal_(generator=own).add_(torch.rand(2, generator=own))
    own.manual_seed(1)
    net.drawn[2].data.normal_(generator=own)


def through_a_kept_view(net: Any) -> None:
    data = net[0].weight.data
    data.copy_(torch.ones_like(data, device="cpu"))
    data.mul_(0.5)


@pytest.mark.parametrize("write", [inits, through_a_kept_view])
def test_inits_are_those_of_a_constructor(write: Any) -> None:
    def make() -> Any:
        net = nn.Sequential(nn.Linear(3, 3))
        write(net)
        return net

    with quiet_trainer(pipeline(2)).init_module(empty_init=True):
        module = make()
    fill(module, 5)
    assert_same(dict(seeded(make, 5).state_dict()), dict(module.state_dict()))


def test_numbers_of_tensors_with_memory_are_not_drawn_again() -> None:
    torch.manual_seed(5)
    with quiet_trainer(pipeline(2)).init_module(empty_init=True):
        module = nn.ParameterList([torch.randn(8), torch.empty(8).normal_()])
    fill(module, 5)
    assert not torch.equal(module[0], module[1])


def test_modules_of_two_contexts() -> None:
    trainer = quiet_trainer(pipeline(2))
    with trainer.init_module(empty_init=True):
        first = nn.Linear(3, 3)
    with trainer.init_module(empty_init=True):
        second = nn.ModuleList([nn.Linear(3, 3), first, copy.deepcopy(first)])
        nn.init.zeros_(first.bias)
        with trainer.init_module(empty_init=True):
            second.append(nn.Linear(3, 3))
            nn.init.ones_(first.weight)
    fill(second, 5)
    torch.manual_seed(5)
    expected = nn.ModuleList([(one := nn.Linear(3, 3)), nn.Linear(3, 3), copy.deepcopy(one), nn.Linear(3, 3)])
    assert_same(expected[1].state_dict(), second[0].state_dict())
    assert_same(expected[2].state_dict(), second[2].state_dict())
    assert_same(expected[3].state_dict(), second[3].state_dict())
    assert bool((first.weight == 1).all() and (first.bias == 0).all())


@pytest.mark.parametrize("copied", [False, True])
def test_what_nothing_writes_is_refused(copied: bool) -> None:
    with quiet_trainer(pipeline(2)).init_module(empty_init=True):
        module = nn.ParameterDict({"a": torch.empty(3).normal_(), "b": torch.empty(3)})
        if copied:
            module = module.half()
    with refused("nothing gives values to b;"):
        fill(module, 5)


def test_writes_of_no_values_to_tensors_with_memory_are_refused() -> None:
    with refused("aten::add_", "make the module without empty_init=True"):  # noqa: SIM117
        with quiet_trainer(pipeline(2)).init_module(empty_init=True):
            total = torch.zeros(3)
            total += nn.Linear(3, 3).bias.data


def test_hooks_of_parameters_stay() -> None:
    with quiet_trainer(pipeline(2)).init_module(empty_init=True):
        module: Any = nn.Linear(2, 2)
        module.weight.register_hook(lambda gradient: gradient * 2)
        module.bias.register_post_accumulate_grad_hook(lambda bias: setattr(bias, "grad", bias.grad * 3))
    fill(module, 5)
    module(torch.ones(1, 2)).sum().backward()
    assert module.weight.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert module.bias.grad.tolist() == [3.0, 3.0]


def test_a_record_goes_with_its_module() -> None:
    with quiet_trainer(pipeline(2)).init_module(empty_init=True):
        module: Any = nn.Linear(2, 2)
    record = weakref.ref(recorded_init._origin(module.weight)[0])
    gc.disable()
    try:
        del module
        assert record() is None
    finally:
        gc.enable()


def test_values_are_those_of_a_constructor() -> None:
    state = torch.get_rng_state()
    with quiet_trainer(pipeline(2)).init_module(empty_init=True):
        module = Various()
    assert {p.device.type for p in module.parameters()} == {"meta"}
    fill(module, 5)
    assert torch.equal(torch.get_rng_state(), state)
    expected = seeded(Various, 5)
    expected.zeros = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    assert_same(dict(expected.state_dict()), dict(module.state_dict()))
    for name in ("kept", "attribute", "held"):
        assert_same(getattr(expected, name), getattr(module, name), name)
    with torch.no_grad():
        module.words.weight.fill_(9.0)
    assert bool((module.shared == 9.0).all())


def encoder() -> nn.Module:
    """Torch copies the layer that it is given."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4), 3, enable_nested_tensor=False)


def transformer() -> nn.Module:
    """Resets its copies, but not their biases."""
    return nn.Transformer(4, 2, 2, 3, 4)


def teacher() -> nn.Module:
    student = nn.Sequential(nn.Linear(3, 2), Block())
    return nn.ModuleList([student, copy.deepcopy(student)])


def teacher_first() -> nn.Module:
    student = nn.Sequential(nn.Linear(3, 2), Block())
    return nn.ModuleList([copy.deepcopy(student).half().float(), student])


def teacher_of_parts() -> nn.Module:
    """Holds copies of a layer that its parent resets."""
    block = Block()
    found = nn.ModuleList([copy.deepcopy(block.layer), block])
    found.register_buffer("first", block.layer.weight.detach().clone())
    return found


def equalities(module: nn.Module) -> set[tuple[str, str]]:
    """The names of equal tensors."""
    state = {name: tensor.half() for name, tensor in module.state_dict().items()}
    return {(one, other) for one in state for other in state if torch.equal(state[one], state[other])}


@pytest.mark.parametrize("make", [encoder, transformer, teacher, teacher_first, teacher_of_parts])
def test_copies_are_equal_to_what_they_are_made_of(make: Any) -> None:
    class Copies(Learns):
        def __init__(self) -> None:
            super().__init__()
            self.copies = make()

    trainer = quiet_trainer(pipeline(2))
    with trainer.init_module(empty_init=True):
        module = Copies()
    assert {t.device.type for t in module.copies.state_dict().values()} == {"meta"}
    trainer.validate(module, batches(), verbose=False)
    expected = make()
    assert len(equalities(expected)) > len(expected.state_dict())
    assert equalities(module.copies) == equalities(expected)
    for name, tensor in module.copies.state_dict().items():  # the parent's values: those of a Linear are below 0.5
        assert ("layer.weight" not in name and name != "first") or tensor.abs().max() > 0.5


class Targets(Learns):
    """Two copies that are written, as a DQN's target is."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded, self.copied = Learns().net, Learns().net
        self.loaded.load_state_dict(self.net.state_dict())
        for target, source in zip(self.copied.parameters(), self.net.parameters(), strict=True):
            target.data.copy_(source.data)


def test_targets_equal_what_they_are_loaded_from(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = quiet_trainer(pipeline(2))
    with trainer.init_module(empty_init=True):
        module = Targets()
    trainer.validate(module, batches(), verbose=False)
    expected = dict(module.net.named_parameters())
    assert_same(expected, dict(module.loaded.named_parameters()))
    assert_same(expected, dict(module.copied.named_parameters()))


def test_a_copy_of_what_a_checkpoint_replaces_keeps_its_own_values() -> None:
    trainer = quiet_trainer(pipeline(2))
    with trainer.init_module(empty_init=True):
        module = Targets()
    module.strict_loading = False
    state = {name: torch.ones_like(value, device="cpu") for name, value in module.net.state_dict(prefix="net.").items()}
    load(module, state, strict=False)
    trainer.validate(module, batches(), verbose=False)
    assert all(bool((p == 1).all()) for p in module.net.parameters())
    assert len(set(next(module.loaded.parameters()).flatten().tolist())) > 1
    assert_same(dict(module.loaded.named_parameters()), dict(module.copied.named_parameters()))


def test_copies_that_are_made_later_are_refused() -> None:
    trainer = quiet_trainer(pipeline(2))
    with trainer.init_module(empty_init=True):
        module = Learns()
    module.teacher = copy.deepcopy(module.net)
    for _ in range(2):
        with refused("nothing gives values to teacher.0.weight", "within init_module(empty_init=True)"):
            trainer.fit(module, batches())


def test_data_are_set_to_values() -> None:
    """Between meta and memory torch refuses that, as of an incompatible tensor type."""
    with quiet_trainer(pipeline(2)).init_module(empty_init=True):
        first, second = nn.Linear(2, 3), nn.Parameter(torch.ones(3, 2))
        weight = first.weight
        first.weight.data = torch.full((3, 2), 2.0)
        second.data = torch.empty(3, 2)
    assert first.weight is weight
    assert_same(torch.full((3, 2), 2.0), first.weight.detach())
    assert second.is_meta
    assert second.requires_grad


@linux
def test_no_memory_is_taken() -> None:
    trainer = quiet_trainer(HetPipeStrategy(stages=2, in_flight=1))
    with Peak() as peak, trainer.init_module(empty_init=True):
        Large()
    assert peak.bytes < MARGIN
    with Peak() as peak, trainer.init_module():
        large = Large()
    assert peak.bytes > WEIGHTS - MARGIN
    assert large is not None
    del large
