"""Modules made on meta: loading fills them, and without a checkpoint ``reset_parameters`` does, or they are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.strategy.meta_weights import fill, load
from tests.support.equality import assert_same
from tests.support.small import Validated, batches, pipeline, refused
from tests.support.trainers import quiet_trainer

SEED = 5


def on_meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


def seeded(make: Callable[[], nn.Module], seed: int = SEED) -> Any:
    torch.manual_seed(seed)
    return make()


def filled(make: Callable[[], nn.Module], seed: int = SEED) -> Any:
    module = on_meta(make)
    fill(module, seed)
    return module


class Positions(nn.Module):
    """A parameter and a buffer of its own, which no checkpoint holds, and children."""

    def __init__(self, resets: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.empty(6))
        self.table = nn.Buffer(torch.empty(6), persistent=False)
        if resets:
            self.reset_parameters = self.reset
            self.reset()

    def reset(self) -> None:
        self.weight.data.uniform_()  # as much code does; torch does not count it as a change
        self.table.copy_(torch.arange(6.0))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.block = nn.LSTM(4, 4, num_layers=2)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GRU(3, 4), nn.LayerNorm(4), nn.PReLU()),
    "attention": lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 16),
    "nested": lambda: nn.Sequential(Positions(), nn.Bilinear(2, 2, 2)),
}


@pytest.mark.parametrize("name", MODULES)
def test_without_a_checkpoint_weights_are_those_of_a_constructor(name: str) -> None:
    """Children come before the modules that hold them, and random numbers from the seed alone."""
    state = torch.get_rng_state()
    found = filled(MODULES[name])
    assert torch.equal(torch.get_rng_state(), state)
    expected = seeded(MODULES[name])
    assert_same(dict(expected.named_parameters()), dict(found.named_parameters()))
    assert_same(dict(expected.named_buffers()), dict(found.named_buffers()))
    assert [p.requires_grad for p in found.parameters()] == [p.requires_grad for p in expected.parameters()]


def test_parameters_stay_the_same_objects() -> None:
    """Whoever has taken them before, as an optimizer, has those that are trained."""
    module = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    module[0].weight.requires_grad_(False)
    module[0].bias.decays = False
    before = [*module.parameters(), *module.buffers()]
    fill(module, SEED)
    assert all(one is other for one, other in zip(before, [*module.parameters(), *module.buffers()], strict=True))
    assert not module[0].weight.requires_grad
    assert module[0].bias.decays is False
    assert {type(p) for p in module.parameters()} == {nn.Parameter}


def test_modules_say_that_they_are_on_the_host() -> None:
    """LightningModules keep a device of their own."""
    assert filled(Learns).device == torch.device("cpu")


def test_ties_stay() -> None:
    """The first one that has a weight fills it; torch's LSTM has lists of its own."""
    found = filled(Tied)
    assert found.head.weight is found.embed.weight
    assert_same(seeded(lambda: nn.Embedding(6, 4)).weight, found.embed.weight)
    assert found.block._flat_weights[0] is found.block.weight_ih_l0
    found.block(torch.ones(1, 4))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("partly", [False, True])
def test_loading(strict: bool, partly: bool) -> None:
    """As into a module that is not on meta: ties, dtypes and what needs a gradient are the module's."""
    source = seeded(Tied)
    source.norm.running_mean.fill_(3.0)
    state = source.double().state_dict()
    module = on_meta(Tied)
    module.head.bias.requires_grad_(False)
    if partly:
        module.norm.to_empty(device="cpu")
        kept = module.norm.weight
    load(module, state, strict)
    fill(module, SEED)
    assert module.head.weight is module.embed.weight
    assert not module.head.bias.requires_grad
    assert not partly or module.norm.weight is kept
    expected = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    assert_same(expected, dict(module.state_dict()))
    theirs = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
    assert not theirs & {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}


def test_strictness_is_kept() -> None:
    state = nn.Linear(2, 2).state_dict()
    for wrong, said in (
        ({"weight": state["weight"]}, "Missing key"),
        ({**state, "other": torch.ones(1)}, "Unexpected"),
    ):
        with pytest.raises(RuntimeError, match=said):
            load(on_meta(lambda: nn.Linear(2, 2)), wrong, strict=True)


class LoRA(nn.Module):
    """A frozen layer with an update of low rank, which begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.a = nn.Parameter(torch.empty(2, 6))
        self.b = nn.Parameter(torch.empty(6, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.a)
        nn.init.zeros_(self.b)


def test_what_a_checkpoint_lacks_is_reset_and_nothing_else() -> None:
    """As adapters of a base that is loaded; or a bias, whose module resets its weight, too."""
    base = seeded(lambda: nn.Linear(6, 6))
    module = on_meta(lambda: nn.Sequential(LoRA(), nn.Linear(6, 6)))
    state = {"0.base.weight": base.weight, "0.base.bias": base.bias, "1.weight": base.weight}
    load(module, state, strict=False)
    fill(module, SEED)
    for name, tensor in state.items():
        assert_same(tensor, module.state_dict()[name], name)
    torch.manual_seed(SEED)
    assert_same(torch.empty(2, 6).normal_(), module[0].a)
    assert not module[0].b.any()
    assert module[1].bias.isfinite().all()
    assert not module[0].base.weight.requires_grad


def test_what_is_not_on_meta_stays_as_it_is() -> None:
    """Also where the module that holds it resets itself for the sake of another tensor."""
    module = on_meta(lambda: nn.Linear(2, 2))
    module.weight = nn.Parameter(torch.full((2, 2), 7.0))
    fill(module, SEED)
    assert_same(torch.full((2, 2), 7.0), module.weight.detach())
    before = seeded(Tied)
    expected = {name: tensor.clone() for name, tensor in before.state_dict().items()}
    fill(before, SEED + 1)
    assert_same(expected, dict(before.state_dict()))


class Renamed(nn.Module):
    """Reads keys of an older release, and says nothing of what is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.other = nn.Parameter(torch.zeros(3))

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        super().load_state_dict({"weight": state["old"]}, strict=False, assign=assign)


def test_what_an_override_loads_counts_and_what_it_leaves_out_is_refused() -> None:
    module = on_meta(Renamed)
    load(module, {"old": torch.ones(3), "other": torch.ones(3)}, strict=True)
    assert_same(torch.ones(3), module.weight.detach())
    with refused("Renamed was made on meta", "nothing gives values to other; make"):
        fill(module, SEED)


class Keeps(nn.Module):
    """Takes a tensor of the checkpoint as it is, as those do whose buffers have no fixed shape."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(0))


def test_nothing_lies_in_the_memory_of_what_was_loaded() -> None:
    module, memory = Keeps(), torch.ones(5)
    state = {"queue": memory.view(5)}
    module.queue = state["queue"]
    load(module, state, strict=True)
    memory.zero_()
    assert_same(torch.ones(5), module.queue)


def unfilled(**attributes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = nn.Linear(2, 2)
        for name, value in attributes.items():
            setattr(module, name, value() if callable(value) else value)
        return module

    return make


def normed() -> nn.Module:
    module: nn.Module = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    return module


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Positions(resets=False), "weight, table"),
        (unfilled(child=lambda: Positions(resets=False)), "child.weight, child.table"),
        (unfilled(scale=lambda: nn.Parameter(torch.ones(2))), "scale"),
        (unfilled(mask=lambda: nn.Buffer(torch.ones(2, dtype=torch.bool), persistent=False)), "mask"),
        (unfilled(scale=lambda: torch.ones(2)), "scale"),
        (unfilled(scales=lambda: {"a": torch.ones(2)}), "scales"),
        (unfilled(metric=torchmetrics.MeanMetric), "metric"),
        (normed, "parametrizations.weight.original0, parametrizations.weight.original1"),
        (lambda: nn.CrossEntropyLoss(torch.ones(3)), "weight"),
        (lambda: nn.ParameterList(torch.ones(1) for _ in range(5)), "0, 1, 2 and 2 more"),
    ],
)
def test_what_nothing_fills_is_refused_by_name(make: Callable[[], nn.Module], name: str) -> None:
    module = on_meta(make)
    for _ in range(2):  # it has no value yet in the second run either
        with refused(f"nothing gives values to {name}", "reset_parameters", "ckpt_path"):
            fill(module, SEED)


def test_what_no_checkpoint_holds_is_refused_after_loading() -> None:
    module = on_meta(lambda: Positions(resets=False))
    load(module, Positions().state_dict(), strict=True)
    assert {name for name, tensor in [*module.named_parameters(), *module.named_buffers()] if tensor.is_meta} == {
        "table"
    }
    with refused("nothing gives values to table;"):
        fill(module, SEED)
    module = on_meta(Positions)
    load(module, (expected := Positions()).state_dict(), strict=True)
    fill(module, SEED)
    assert_same(dict(expected.state_dict()), dict(module.state_dict()))
    assert_same(expected.table, module.table)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_what_a_forward_pass_computes_anew_is_not_missed() -> None:
    """Torch's older weight_norm keeps the weight that it has computed, on meta here, as a plain attribute."""

    def make() -> nn.Module:
        module: nn.Module = nn.utils.weight_norm(nn.Linear(2, 2))
        return module

    module, source = on_meta(make), seeded(make)
    load(module, source.state_dict(), strict=True)
    fill(module, SEED)
    assert_same(source(torch.ones(1, 2)), module(torch.ones(1, 2)))


# As users do it.


class Learns(Validated):
    """Learner whose net is made where the Trainer says."""

    def __init__(self) -> None:
        super().__init__(net=nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("loss", self.step(self, *batch, batch_idx))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: tuple[Tensor, Tensor]) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def made(trainer: L.Trainer, empty_init: bool | None) -> Learns:
    with trainer.init_module(empty_init=empty_init):
        return Learns()


@pytest.mark.parametrize("strategy", [{"in_flight": 1}, {"stages": 2, "in_flight": 3}])
@pytest.mark.parametrize("do", ["fit", "validate", "test", "predict"])
def test_without_a_checkpoint(monkeypatch: pytest.MonkeyPatch, do: str, strategy: dict[str, Any]) -> None:
    """Weights depend on the run's seed, whatever the stages; the run is that of a module made on the host."""
    monkeypatch.setenv("PL_GLOBAL_SEED", str(SEED))
    ends = []
    for empty in (True, False):
        trainer = quiet_trainer(HetPipeStrategy(**strategy))
        module = made(trainer, True) if empty else seeded(Learns)
        getattr(trainer, do)(module, batches())
        assert module.device == torch.device("cpu")
        ends.append(dict(module.state_dict()))
    assert_same(ends[1], ends[0])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that a plain Trainer has written."""
    trainer = quiet_trainer()
    trainer.fit(seeded(Learns), batches())
    path = tmp_path_factory.mktemp("saved") / "it.ckpt"
    trainer.save_checkpoint(path)
    return path


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("strategy", [{"in_flight": 1}, {"stages": 2, "in_flight": 3}])
def test_from_a_checkpoint(saved: Path, strategy: dict[str, Any], weights_only: bool) -> None:
    content = torch.load(saved, weights_only=True)["state_dict"]
    for do in ("validate", "test", "predict"):
        trainer = quiet_trainer(HetPipeStrategy(**strategy))
        module = made(trainer, True)
        getattr(trainer, do)(module, batches(), ckpt_path=saved, weights_only=weights_only)
        assert_same(dict(content), dict(module.state_dict()), do)
    ends = []
    for empty in (True, False):
        trainer = quiet_trainer(HetPipeStrategy(**strategy), max_epochs=2)
        module = made(trainer, True) if empty else Learns()
        trainer.fit(module, batches(), ckpt_path=saved, weights_only=weights_only)
        ends.append((dict(module.state_dict()), trainer.optimizers[0].state_dict()))
    assert_same(ends[1], ends[0])


def test_what_nothing_fills_is_refused_before_anything_moves() -> None:
    trainer = quiet_trainer(pipeline(2))
    module = made(trainer, True)
    module.scale = nn.Parameter(torch.ones(2, device="meta"))
    with refused("Learns was made on meta", "nothing gives values to scale;"):
        trainer.fit(module, batches())


class Fails(Learns):
    def setup(self, stage: str) -> None:
        raise ArithmeticError("stop here")


def test_a_run_that_ends_before_it_has_begun_says_why() -> None:
    """Lightning moves modules to the host at the end, which torch refuses for what has no values."""
    trainer = quiet_trainer(pipeline(2))
    with trainer.init_module(empty_init=True):
        module = Fails()
    with pytest.raises(ArithmeticError, match="stop here"):
        trainer.fit(module, batches())
    assert "cpu" not in vars(module)
