"""Layers that change while a run goes on, other than by the optimizer: stages follow, or it is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from lightning_hetpipe.errors import SettingError
from tests.exact.pipelines import Delays, Pinned
from tests.exact.running import Record, assert_same_run, fit
from tests.support.equality import difference
from tests.support.marks import fewer, quick, slow_except
from tests.support.models import ADAMW, CLASSES, Task, vectors

Net = Callable[[], nn.Sequential]
Callbacks = Callable[[], list[L.Callback]]
LENGTH = 5  # batches of an epoch of 20 samples in fours


class Scaled(nn.Module):
    """Multiplies with a plain attribute."""

    alpha: float

    def __init__(self) -> None:
        super().__init__()
        self.alpha = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.alpha


def net() -> nn.Sequential:
    layers = [nn.Linear(6, 8), Scaled(), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8)]
    return nn.Sequential(*layers, nn.Sequential(nn.ReLU(), nn.Linear(8, CLASSES)))


def torchs_own() -> nn.Sequential:
    """The same without code of the user's, so that stages run copies of its children."""
    made = net()
    made[1] = nn.Hardtanh()
    return made


def run(net: Net, callbacks: Callbacks, strategy: Any, epochs: int = 2, **settings: Any) -> Record:
    torch.manual_seed(5)
    return fit(Task(net(), ADAMW), vectors(20, 4), callbacks(), strategy=strategy, max_epochs=epochs, **settings)


def assert_exact(net: Net, callbacks: Callbacks = list, epochs: int = 2) -> Record:
    """With one minibatch in flight a run is the plain Trainer's; with several it does not depend on the cut."""
    plain = run(net, callbacks, "auto", epochs)
    for cuts in fewer([(0,), (0, 2, 4)], [(0, 2, 4)]):
        assert_same_run(plain, run(net, callbacks, Pinned(cuts, 1), epochs))
    assert_any_cut(net, callbacks, epochs)
    return plain


def assert_any_cut(net: Net, callbacks: Callbacks = list, epochs: int = 2) -> Record:
    one = run(net, callbacks, Pinned((0,), 3), epochs)
    for seed, cuts in enumerate(fewer([(0, 3), (0, 1, 2, 4)], [(0, 1, 2, 4)])):
        strategy = Pinned(cuts, 3)
        strategy._before_pass = Delays(seed)
        assert_same_run(one, run(net, callbacks, strategy, epochs))
    return one


def assert_differs(one: Record, other: Record) -> None:
    assert difference(one.states[-1], other.states[-1], "end") is not None


class Edit(L.Callback):
    """Edits the network at the start or the end of one epoch."""

    def __init__(self, edit: Callable[[nn.Sequential], Any], epoch: int, at_start: bool = True) -> None:
        self.edit, self.epoch, self.at_start = edit, epoch, at_start

    def _edit(self, trainer: L.Trainer, pl_module: L.LightningModule, at_start: bool) -> None:
        if (trainer.current_epoch, at_start) == (self.epoch, self.at_start):
            assert isinstance(pl_module, Task)
            self.edit(pl_module.net)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._edit(trainer, pl_module, True)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._edit(trainer, pl_module, False)


class EditBetween(L.Callback):
    """Edits the network after one minibatch."""

    def __init__(self, edit: Callable[[nn.Sequential], Any], p: int) -> None:
        self.edit, self.p = edit, p

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.p -= 1
        if self.p == 0:
            self.edit(pl_module.net)


def set_alpha(net: nn.Sequential) -> None:
    net.get_submodule("1").alpha = 0.5  # type: ignore[assignment]  # a plain attribute


# At the borders of epochs: followed.


@pytest.mark.slow  # test_a_frozen_batchnorm_that_thaws has BatchNorm, test_callbacks averages
def test_stochastic_weight_averaging_with_batchnorm() -> None:
    """At its end it swaps weights in, and collects statistics anew in an epoch without backward passes."""

    def callbacks() -> list[L.Callback]:
        return [StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=1)]

    assert_exact(net, callbacks, epochs=3)


class Unfreezing(BaseFinetuning):
    """Freezes BatchNorm in the middle of the pipelined network, and thaws it in the second epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[:3], train_bn=False)
        assert not pl_module.net[2].track_running_stats

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[:3], optimizer, train_bn=True)


class Trainable(Task):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([w for w in self.parameters() if w.requires_grad], lr=0.1, momentum=0.9)


def test_a_frozen_batchnorm_that_thaws() -> None:
    """With batches of two sizes."""

    def run(strategy: Any) -> Record:
        torch.manual_seed(5)
        return fit(Trainable(net()), vectors(18, 4), [Unfreezing()], strategy=strategy, max_epochs=2)

    plain = run("auto")
    means = [plain.states[p].buffers["net.2.running_mean"] for p in (0, LENGTH, 2 * LENGTH)]
    assert torch.equal(means[0], means[1])
    assert not torch.equal(means[1], means[2])
    for cuts in fewer([(0,), (0, 2, 4)], [(0, 2, 4)]):
        assert_same_run(plain, run(Pinned(cuts, 1)))
    one = run(Pinned((0,), 3))
    for cuts in fewer([(0, 3), (0, 1, 2, 4)], [(0, 1, 2, 4)]):
        assert_same_run(one, run(Pinned(cuts, 3)))


@pytest.mark.parametrize("at_start", slow_except([True, False], True))
def test_an_attribute_of_a_layer(at_start: bool) -> None:
    plain = assert_exact(net, lambda: [Edit(set_alpha, int(at_start), at_start)])
    assert_differs(plain, run(net, list, "auto"))


@pytest.mark.slow  # test_an_attribute_of_a_layer changes one, too
def test_the_rate_of_a_dropout() -> None:
    def dropping() -> nn.Sequential:
        return net().insert(4, nn.Dropout(0.1))

    def raise_rate(net: nn.Sequential) -> None:
        net.get_submodule("4").p = 0.6  # type: ignore[assignment]  # a plain attribute

    one = assert_any_cut(dropping, lambda: [Edit(raise_rate, 1)])
    assert_differs(one, run(dropping, list, Pinned((0,), 3)))


prune: Any = torch.nn.utils.prune  # torch has no types here


def prune_more(net: nn.Sequential) -> None:
    prune.l1_unstructured(net[4], "weight", amount=0.25)


def pruned() -> nn.Sequential:
    made = net()
    prune.l1_unstructured(made[0], "weight", amount=0.3)
    prune_more(made)
    return made


class Other(nn.Sequential):
    """Has a graph, and nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


def captured() -> nn.Sequential:
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
    return Other(*layers, nn.Linear(8, 8), nn.Linear(8, CLASSES))


def captured_pruned() -> nn.Sequential:
    made = captured()
    prune.l1_unstructured(made[0], "weight", amount=0.3)
    prune_more(made)
    return made


@pytest.mark.parametrize("make", slow_except([torchs_own, pruned, captured, captured_pruned], pruned, captured_pruned))
def test_pruning(make: Net) -> None:
    """Pruning further looks at weights that were computed by hooks, which graphs do not run."""
    plain = assert_exact(make, lambda: [Edit(prune_more, 0, at_start=False), Edit(prune_more, 2)], epochs=3)
    assert "net.4.weight_mask" in plain.states[-1].buffers
    assert (plain.states[-1].buffers["net.4.weight_mask"] == 0).sum() >= 16


@pytest.mark.slow  # test_pruning has masks in the middle
def test_pruning_of_the_first_layer() -> None:
    """Which gives the network another first parameter."""
    assert_exact(
        torchs_own, lambda: [Edit(lambda net: prune.random_unstructured(net[0], "weight", amount=0.3), 0, False)]
    )


def test_pruning_that_is_made_permanent() -> None:
    assert_exact(pruned, lambda: [Edit(lambda net: prune.remove(net[0], "weight"), 1)])


def old_weight_norm(layer: nn.Module) -> nn.Module:
    normed: Any = nn.utils.weight_norm
    with pytest.warns(FutureWarning):
        made: nn.Module = normed(layer)
    return made


def prune_half(layer: nn.Module) -> nn.Module:
    made: nn.Module = prune.l1_unstructured(layer, "weight", amount=0.5)
    return made


@pytest.mark.parametrize(
    "norm",
    slow_except(
        [old_weight_norm, nn.utils.spectral_norm, parametrizations.weight_norm, parametrizations.spectral_norm],
        parametrizations.weight_norm,
    ),
)
def test_reparametrized_layers(norm: Callable[[nn.Module], nn.Module]) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(norm(nn.Linear(6, 8)), nn.Tanh(), norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, CLASSES))

    assert_exact(make)


class Look(L.Callback):
    """Keeps the computed weight of layer 0 after every minibatch."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        self.seen.append(pl_module.net[0].weight.detach().clone())


@quick("Sequential-spectral_norm-32-true", "Other-prune_half-32-true", "Other-spectral_norm-bf16-mixed")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("norm", [old_weight_norm, nn.utils.spectral_norm, prune_half])
@pytest.mark.parametrize("kind", [nn.Sequential, Other])
def test_computed_weights_of_live_layers_are_those_of_the_last_forward(
    kind: Callable[..., nn.Sequential], norm: Callable[[nn.Module], nn.Module], precision: str
) -> None:
    """They were those of the first minibatch, all through the run."""

    def look(strategy: Any) -> list[Tensor]:
        def make() -> nn.Sequential:
            return kind(norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, CLASSES))

        look = Look()
        run(make, lambda: [look], strategy, precision=precision)
        return look.seen

    plain, ahead = look("auto"), look(Pinned((0, 1), 3))
    assert not torch.equal(plain[0], plain[-1])
    for one, other in ((plain, look(Pinned((0, 2), 1))), (ahead, look(Pinned((0, 1, 2), 3)))):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    # With three in flight the first three forwards of an epoch all use the version that it began with.
    assert torch.equal(ahead[LENGTH], ahead[LENGTH + 1]) != (norm is nn.utils.spectral_norm)  # which iterates
    assert not torch.equal(ahead[LENGTH + 2], ahead[LENGTH + 3])


# In the middle of an epoch: followed where nothing is in flight, else refused.


@pytest.mark.parametrize("p", slow_except([1, 3, LENGTH, LENGTH + 1], 3))
def test_an_attribute_in_the_middle_of_an_epoch(p: int) -> None:
    def callbacks() -> list[L.Callback]:
        return [EditBetween(set_alpha, p)]

    plain = run(net, callbacks, "auto")
    assert_differs(plain, run(net, list, "auto"))
    for cuts in fewer([(0,), (0, 2, 4)], [(0, 2, 4)]):
        assert_same_run(plain, run(net, callbacks, Pinned(cuts, 1)))
    if p in (1, LENGTH):  # the end of the watched minibatch, or of an epoch, when nothing is in flight
        assert_any_cut(net, callbacks)
        return
    with pytest.raises(SettingError, match=rf"'net\.1\.alpha' .* was changed after minibatch {p}, .* set in_flight=1"):
        run(net, callbacks, Pinned((0, 2), 3))


def replace(net: nn.Sequential) -> None:
    net[3] = nn.Sigmoid()


def append(net: nn.Sequential) -> None:
    net.append(nn.Tanh())


def remove(net: nn.Sequential) -> None:
    del net[3]


def hook(net: nn.Sequential) -> None:
    net[5].register_forward_hook(lambda *_: None)


REPLACED = "layers of 'net' were added, removed or replaced after the first minibatch"
HOOKED = r"layer 'net\.5.*' has a hook"
EDITS: list[Any] = [(replace, REPLACED), (append, REPLACED), (remove, REPLACED), (hook, HOOKED)]


@quick(
    "1-replace-layers of 'net' were added, removed or replaced after the first minibatch",
    "3-append-layers of 'net' were added, removed or replaced after the first minibatch",
    "3-hook-layer 'net\\\\.5.*' has a hook",
)
@pytest.mark.parametrize(("edit", "message"), EDITS)
@pytest.mark.parametrize("in_flight", [1, 3])
def test_other_layers_than_those_of_the_first_minibatch_are_refused(
    in_flight: int, edit: Callable[[nn.Sequential], None], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        run(torchs_own, lambda: [Edit(edit, 1)], Pinned((0, 2), in_flight))
    between = message if in_flight == 1 else r"'net.*' of the pipelined layers was changed after minibatch 2"
    with pytest.raises(SettingError, match=between):
        run(torchs_own, lambda: [EditBetween(edit, 2)], Pinned((0, 2), in_flight))


@pytest.mark.parametrize("edit", slow_except([replace, append], append))
def test_a_graph_follows_layers_without_weights(edit: Callable[[nn.Sequential], None]) -> None:
    plain = run(net, lambda: [Edit(edit, 1)], "auto")
    assert_differs(plain, run(net, list, "auto"))
    assert_same_run(plain, run(net, lambda: [Edit(edit, 1)], Pinned((0, 2, 4), 1)))
    with pytest.raises(SettingError, match=r"'net.*' of the pipelined layers was changed after minibatch 2"):
        run(net, lambda: [EditBetween(edit, 2)], Pinned((0, 2), 3))


def test_a_graph_that_lacks_a_layer_is_refused() -> None:
    with pytest.raises(SettingError, match="'net' computes by other layers for these inputs than in the first minib"):
        run(net, lambda: [Edit(remove, 1)], Pinned((0, 2), 1))


def test_a_graph_follows_no_hooks() -> None:
    with pytest.raises(SettingError, match=r"layer 'net' has a hook \(on 'net\.\S+', a Sequential\)"):
        run(net, lambda: [Edit(hook, 1)], Pinned((0, 2), 1))


# In a backward pass.


class Recomputed(nn.Module):
    """Runs its layers again in the backward pass instead of keeping what they computed."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y


def recomputing(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Recomputed(*layers), nn.Linear(8, CLASSES))


def test_a_checkpoint_around_layers() -> None:
    def make() -> nn.Sequential:
        return recomputing(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())

    plain = run(make, list, "auto")
    for cuts in fewer([(0,), (0, 2)], [(0, 2)]):
        assert_same_run(plain, run(make, list, Pinned(cuts, 1)))
    assert_same_run(run(make, list, Pinned((0,), 3)), run(make, list, Pinned((0, 2), 3)))


@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_checkpoint_around_a_batchnorm_is_refused(in_flight: int) -> None:
    with pytest.raises(SettingError, match=r"a backward pass of layer net\.2 changed buffers .* leave such layers out"):
        run(lambda: recomputing(nn.Linear(8, 8), nn.BatchNorm1d(8)), list, Pinned((0, 2, 3), in_flight))
