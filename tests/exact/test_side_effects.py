"""Side effects of a forward: as in a plain run, where the module runs as user code around its parts."""

from __future__ import annotations

import itertools
import logging
import threading
import warnings
import weakref
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph as autograd_graph
from torch.nn import functional as F

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.capture.noticed_calls import PACKAGES
from lightning_hetpipe.errors import SettingError
from tests.support.models import CLASSES, vectors
from tests.support.trainers import quiet_trainer

AUX: list[Tensor] = []
KINDS: dict[type, int] = {}
CONTEXT = ContextVar("CONTEXT", default=0)
LOCAL = threading.local()


class Net(nn.Module):
    """Three layers, of which the first one's output is given to ``effect``, which may return another one."""

    __slots__ = ("calls",)

    def __init__(self, effect: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)
        self.effect = effect
        self.queue: deque[Tensor] = deque(maxlen=3)
        self.held = [torch.zeros(16)]
        self.hidden = [nn.Linear(16, 16)]
        self.calls = 0
        self.count = torch.zeros(1)
        self.array = np.zeros(1, dtype=np.float32)
        self.norms: list[float] = []
        self.kinds = Counter[str]()
        self.order = OrderedDict[str, int]()
        self.bytes = bytearray()
        self.numbers = array("d", [0.0])
        self.steps = itertools.count()
        self.bank: Tensor
        self.register_buffer("bank", torch.zeros(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.effect(self, self.first(x).relu())
        out: Tensor = self.third(self.second(h).relu())
        return out


def count_in_a_function(net: Net, h: Tensor) -> Tensor:
    function: Any = count_in_a_function
    function.calls = vars(function).get("calls", 0) + 1
    net.numbers[0] = function.calls
    return h / net.numbers[0]


def fill_bytes(net: Net, h: Tensor) -> Tensor:
    net.bytes.append(1)
    return h / len(net.bytes)


def set_a_context_variable(net: Net, h: Tensor) -> Tensor:
    CONTEXT.set(CONTEXT.get() + 1)
    return h


def count_in_this_thread(net: Net, h: Tensor) -> Tensor:
    LOCAL.calls = getattr(LOCAL, "calls", 0) + 1
    return h


def step_an_iterator(net: Net, h: Tensor) -> Tensor:
    return h / (1 + next(net.steps))


def clip_gradients(net: Net, h: Tensor) -> Tensor:
    if h.requires_grad:
        hooked: Any = h  # torch has no types here
        hooked.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return h


def norm_gradients_together(net: Net, h: Tensor) -> Tensor:
    if h.requires_grad:
        autograd_graph.register_multi_grad_hook([h], lambda gradients: net.norms.append(1.0))
    return h


def hook_a_node(net: Net, h: Tensor) -> Tensor:
    if h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda gradients: (gradients[0] * 0.5,))
    return h


def round_what_is_saved(net: Net, h: Tensor) -> Tensor:
    with autograd_graph.saved_tensors_hooks(lambda saved: saved.round(decimals=1), lambda packed: packed):
        sine: Tensor = h.sin()
    return sine


def freeze(net: Net, h: Tensor) -> Tensor:
    with torch.inference_mode():
        still = net.second(h).relu()
    frozen: Tensor = still.clone()
    return frozen + h


def remember_batches(net: Net, h: Tensor) -> Tensor:
    net.queue.append(h.detach().mean(0))
    return h - torch.stack(list(net.queue)).mean(0)


def average(net: Net, h: Tensor) -> Tensor:
    net.held[0] = 0.5 * net.held[0] + h.detach().mean(0)
    return h - net.held[0]


def count_in_place(net: Net, h: Tensor) -> Tensor:
    net.count.add_(1)
    return h / net.count


def count_in_an_array(net: Net, h: Tensor) -> Tensor:
    net.array += 1
    return h / torch.from_numpy(net.array.copy()).to(h)


def count_by_data(net: Net, h: Tensor) -> Tensor:
    net.count.data.add_(1)
    return h / net.count


def count_in_a_counter(net: Net, h: Tensor) -> Tensor:
    net.kinds["batches"] += 1
    return h / net.kinds["batches"]


def count_in_order(net: Net, h: Tensor) -> Tensor:
    net.order[str(len(net.order) % 3)] = len(net.order)
    return h / len(list(net.order))


def roll_a_buffer(net: Net, h: Tensor) -> Tensor:
    net.bank = net.bank.roll(-4, 0)
    net.bank[-4:] = h.detach()
    return h - net.bank.mean(0)


def set_the_data_of_a_buffer(net: Net, h: Tensor) -> Tensor:
    net.bank.data = 0.9 * net.bank + 0.1 * h.detach().mean(0)
    return h - net.bank.mean(0)


def fill_a_global(net: Net, h: Tensor) -> Tensor:
    AUX.append(h.pow(2).mean())
    return h


def follow_in_hidden_weights(net: Net, h: Tensor) -> Tensor:
    follower = net.hidden[0].requires_grad_(False)
    with torch.no_grad():
        for mine, other in zip(follower.parameters(), net.second.parameters(), strict=True):
            mine.lerp_(other, 0.2)
    out: Tensor = h - follower(h)
    return out


def count_in_a_slot(net: Net, h: Tensor) -> Tensor:
    net.calls += 1
    return h / net.calls


def shuffle(net: Net, h: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(42)
        order = torch.randperm(h.shape[1])
    return h[:, order]


EFFECTS = [
    count_in_a_function,
    fill_bytes,
    clip_gradients,
    hook_a_node,
    round_what_is_saved,
    freeze,
    remember_batches,
    average,
    count_in_place,
    count_in_an_array,
    count_by_data,
    count_in_a_counter,
    count_in_order,
    roll_a_buffer,
    set_the_data_of_a_buffer,
    fill_a_global,
    follow_in_hidden_weights,
    count_in_a_slot,
    shuffle,
]


class Task(L.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        AUX.clear()
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return loss + 0.1 * sum(AUX) if AUX else loss

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        found: Tensor = self.net(batch[0])
        return found

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def trained(made: Callable[[], L.LightningModule], strategy: Any) -> Any:
    vars(count_in_a_function).clear()
    torch.manual_seed(3)
    task = made()
    quiet_trainer(strategy=strategy, max_epochs=2).fit(task, vectors(16, 4))
    return task


def trained_and_asked(made: Callable[[], L.LightningModule], strategy: Any) -> tuple[Any, Any]:
    """The task, and its predictions."""
    task = trained(made, strategy)
    return task, task.trainer.predict(task, vectors(12, 4))


def synchronous(**settings: Any) -> HetPipeStrategy:
    return HetPipeStrategy(stages=2, in_flight=3, weights="sync", **settings)


def count_in_an_attribute(net: Net, h: Tensor) -> Tensor:
    net.calls += 1
    return h * (1 + 0.01 * net.calls)


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("effect", [*EFFECTS, count_in_an_attribute])
def test_side_effects_are_those_of_a_plain_run(effect: Callable[[Net, Tensor], Tensor], within: bool) -> None:
    """The module is taken apart: the layers are pipelined, and the code between them is user code.

    The same holds for an ``nn.Sequential`` of which it is a layer.
    """

    def made() -> Task:
        net = Net(effect)
        task = Task(nn.Sequential(nn.Linear(6, 6), net) if within else net)
        vars(task)["seen"] = net
        return task

    (plain, plain_found), (ours, found) = (trained_and_asked(made, each) for each in ("auto", synchronous()))
    assert all(map(torch.equal, plain_found, found))
    for (name, one), other in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(one, other), name
    plain, ours = plain.seen, ours.seen
    assert torch.equal(plain.hidden[0].weight, ours.hidden[0].weight)
    assert plain.calls == ours.calls
    assert torch.equal(plain.bank, ours.bank)
    assert plain.kinds == ours.kinds
    assert [*plain.order.items()] == [*ours.order.items()]
    assert torch.equal(plain.count, ours.count)
    assert plain.array == ours.array
    assert (plain.bytes, plain.numbers) == (ours.bytes, ours.numbers)
    assert torch.equal(plain.held[0], ours.held[0])
    kept = [*ours.queue, *ours.held, *AUX]
    assert {type(tensor) for tensor in kept} <= {Tensor}, "tensors of the capture are left behind"


HOOKS: dict[str, Callable[..., Any]] = {
    "register_forward_hook": lambda module, given, gave: 1.1 * gave,
    "register_forward_pre_hook": lambda module, given: (1.1 * given[0],),
    "register_full_backward_hook": lambda module, wanted, gave: (0.5 * wanted[0],),
}


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_on_layers_of_a_sequential_are_those_of_a_plain_run(kind: str, deep: bool) -> None:
    """Its modules are pipelined, and the hooks run as user code, in training and in prediction."""

    def made() -> Task:
        task = Task(nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 5)))
        calls = vars(task)["calls"] = []
        layer = task.net.get_submodule("1.0" if deep else "1")

        def hook(*given: Any) -> Any:
            calls.append(1)
            return HOOKS[kind](*given)

        getattr(layer, kind)(hook)
        return task

    (plain, plain_found), (ours, found) = (trained_and_asked(made, each) for each in ("auto", synchronous()))
    assert all(map(torch.equal, plain_found, found))
    assert plain.calls == ours.calls != []
    for (name, one), other in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(
    ("effect", "what", "line"),
    [
        (norm_gradients_together, "puts a hook on tensors", "autograd_graph.register_multi_grad_hook("),
        (clip_gradients, "puts a hook on a tensor", "hooked.register_hook(lambda"),
        (count_in_place, "changes 'Net.count'", "net.count.add_(1)"),
        (fill_a_global, "changes 'tests.exact.test_side_effects.AUX'", "AUX.append("),
        (shuffle, "sets a seed (torch.manual_seed)", "torch.manual_seed(42)"),
    ],
)
def test_one_sentence_names_effect_and_line(effect: Callable[[Net, Tensor], Tensor], what: str, line: str) -> None:
    with pytest.raises(SettingError) as caught:
        trained(lambda: Task(Net(effect)), synchronous(module="net"))
    said = str(caught.value)
    assert what in said
    assert line in said
    assert "set in_flight=1" in said


def test_too_many_stages_for_what_hooks_leave() -> None:
    def made() -> Task:
        task = Task(Net(lambda net, h: h))
        task.net.second = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        task.net.second[1].register_forward_hook(lambda module, given, gave: 2 * gave)
        return task

    with pytest.raises(SettingError) as caught:
        trained(made, HetPipeStrategy(stages=9, in_flight=3))
    said = str(caught.value)
    assert "of the pipelined module, since layer 'net" in said
    assert "has a hook (on 'net.second.1', a Linear)" in said
    assert said.endswith(", or set in_flight=1")


class Hooks(Task):
    """Puts hooks on the output of its module, and on what it computes of that."""

    def __init__(self, joint: Literal["all", "any"] | None = None) -> None:
        super().__init__(Net(lambda net, h: h))
        self.joint = joint
        self.norms: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        out: Any = self.net(batch[0])
        twice = out * 2
        out.register_hook(lambda gradient: self.norms.append(gradient.norm().item()))
        out.retain_grad()
        twice.register_hook(lambda gradient: self.norms.append(out.grad is None))
        if self.joint is not None:
            autograd_graph.register_multi_grad_hook([out, twice], self.together, mode=self.joint)
        return F.cross_entropy(twice, batch[1])

    def together(self, found: Any) -> None:
        self.norms += [each.norm().item() for each in ([found] if isinstance(found, Tensor) else found)]


@pytest.mark.parametrize("joint", [None, "all", "any"])
def test_hooks_of_training_step_run_once_for_each_minibatch(joint: Literal["all", "any"] | None) -> None:
    """The comparison of gradients ran a hook on the output once more, with gradients that it had made up."""
    plain, ours = (trained(lambda: Hooks(joint), strategy) for strategy in ("auto", synchronous()))
    assert plain.norms == ours.norms


class HooksApart(Task):
    """Puts a joint hook on tensors before and behind the call of a module."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        net: Any = self.net
        h = net.first(batch[0])
        out = net.third(net.second(h))
        autograd_graph.register_multi_grad_hook([h, out], lambda gradients: None)
        return F.cross_entropy(out, batch[1])


def test_a_joint_hook_around_a_call_is_refused() -> None:
    with pytest.raises(SettingError, match=r"puts a joint hook \(register_multi_grad_hook\) .* set in_flight=1"):
        trained(lambda: HooksApart(Net(lambda net, h: h)), synchronous())


@pytest.mark.parametrize(
    ("effect", "what"),
    [
        (set_a_context_variable, "changes 'tests.exact.test_side_effects.CONTEXT'"),
        (count_in_this_thread, "changes 'tests.exact.test_side_effects.LOCAL.calls'"),
        (step_an_iterator, "changes 'Net.steps'"),
    ],
)
def test_what_user_code_could_not_do_either_is_refused(effect: Callable[[Net, Tensor], Tensor], what: str) -> None:
    """A thread of a minibatch has variables of its own, and an iterator cannot be put back."""
    with pytest.raises(SettingError, match=rf"{what} in forward \(test_side_effects.py:.* set in_flight=1"):
        trained(lambda: Task(Net(effect)), synchronous())


def test_an_iterator_is_refused_in_an_evaluation_too() -> None:
    """Tracing the module for an evaluation advanced it, without a word."""
    task, loader = Evaluated(Net(lambda net, h: h if net.training else step_an_iterator(net, h))), vectors(12, 4)
    with pytest.raises(SettingError, match=r"in this validation, 'net' changes 'Net.steps' .* set in_flight=1"):
        quiet_trainer(strategy=synchronous(), max_epochs=1).fit(task, loader, loader)


class Child(nn.Module):
    """Counts in the module that holds it."""

    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.parent = weakref.ref(parent)

    def forward(self, x: Tensor) -> Tensor:
        parent: Any = self.parent()
        parent.calls += 1
        out: Tensor = self.layer(x)
        return out


class Parent(Net):
    def __init__(self) -> None:
        super().__init__(lambda net, h: h)
        self.second: Any = Child(self)


def test_what_a_weak_reference_leads_to() -> None:
    found = [trained_and_asked(lambda: Task(Parent()), strategy)[0].net.calls for strategy in ("auto", synchronous())]
    assert found == [11, 11]


def test_what_minibatches_in_flight_would_share_is_refused() -> None:
    """User code of several minibatches would find the tensors of others in a global list."""
    with pytest.raises(
        SettingError, match=r"changes 'tests.exact.test_side_effects.AUX' in forward .* set in_flight=1"
    ):
        trained(lambda: Task(Net(fill_a_global)), HetPipeStrategy(stages=2, in_flight=3, weights="stash"))
    trained(lambda: Task(Net(fill_a_global)), HetPipeStrategy(stages=2, in_flight=1))


LOG = logging.getLogger(__name__)


def print_the_mean(net: Net, h: Tensor) -> Tensor:
    print(f"{h.detach().mean():.4f}")
    return h


def log_the_mean(net: Net, h: Tensor) -> Tensor:
    LOG.warning("%.4f", h.detach().mean())
    return h


def append_the_mean(net: Net, h: Tensor) -> Tensor:
    with Path("means").open("a") as file:
        file.write(f"{h.detach().mean():.4f}\n")
    return h


def warn(net: Net, h: Tensor) -> Tensor:
    warnings.warn("once", UserWarning, stacklevel=2)
    return h


def print_in_evaluation(net: Net, h: Tensor) -> Tensor:
    return h if net.training else print_the_mean(net, h)


class Listens(logging.Handler):
    """Writes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


LISTENS, HEARD = Listens(), logging.getLogger(f"{__name__}.heard")
HEARD.addHandler(LISTENS)
HEARD.propagate = False


def tell_a_handler(net: Net, h: Tensor) -> Tensor:
    HEARD.warning("%.4f", h.detach().mean())
    return h


class Evaluated(Task):
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.net(batch[0])


@pytest.mark.parametrize("effect", [print_the_mean, log_the_mean, append_the_mean, print_in_evaluation, tell_a_handler])
def test_what_a_forward_writes_is_what_a_plain_run_writes(
    effect: Callable[[Net, Tensor], Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A graph would write nothing, and to make it would write of tensors without values."""
    loader, found = vectors(24, 4), []
    for number, strategy in enumerate(("auto", synchronous())):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        caplog.clear()
        LISTENS.heard.clear()
        torch.manual_seed(3)
        trainer, task = quiet_trainer(strategy=strategy, max_epochs=2), Evaluated(Net(effect))
        trainer.fit(task, loader, loader)
        trainer.predict(task, loader)
        logged = [record.getMessage() for record in caplog.records if record.name == LOG.name] + LISTENS.heard
        file = folder / "means"
        found.append((capsys.readouterr().out, logged, file.read_text() if file.exists() else ""))
    assert found[0] == found[1]
    assert any(map(len, found[0]))


@pytest.mark.filterwarnings("ignore:once")
def test_a_warning_is_no_effect() -> None:
    trained(lambda: Task(Net(warn)), synchronous(module="net"))


LIBRARY: dict[str, Any] = {}
exec(compile("def tell():\n    print('of a library')", f"{PACKAGES[0]}/library.py", "exec"), LIBRARY)


def call_a_library(net: Net, h: Tensor) -> Tensor:
    LIBRARY["tell"]()
    return h


def test_what_a_library_prints_is_no_effect() -> None:
    """In an environment of its own, where installed packages lie outside the standard library, it was one."""
    trained(lambda: Task(Net(call_a_library)), synchronous(module="net"))


class Logged(Task):
    def __init__(self) -> None:
        super().__init__(Net(self.log_the_mean))

    def log_the_mean(self, net: Net, h: Tensor) -> Tensor:
        self.log("mean", h.detach().mean(), on_step=False, on_epoch=True)
        return h


@pytest.mark.parametrize("weights", ["sync", "stash"])
def test_what_a_forward_logs_to_lightning(weights: str) -> None:
    """In stages it would be logged once; Lightning's own results were named as what it changes."""
    found = []
    for in_flight in (1, 3):
        task = trained(Logged, HetPipeStrategy(stages=2, in_flight=in_flight, weights=weights))
        found.append(float(task.trainer.callback_metrics["mean"]))
    assert weights != "sync" or found[0] == found[1]


class EvaluatedGlobal(Task):
    def __init__(self) -> None:
        super().__init__(Net(fill_a_global))
        self.sums: list[float] = []

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        AUX.clear()
        self.net(batch[0])
        self.sums.append(float(sum(AUX)))


def test_an_evaluation_of_what_batches_would_share() -> None:
    """Its batches run one after the other, in Lightning's own thread."""
    loader, found = vectors(24, 4), []
    for strategy in ("auto", synchronous()):
        torch.manual_seed(3)
        task = EvaluatedGlobal()
        quiet_trainer(strategy=strategy, max_epochs=1).fit(task, loader, loader)
        found.append(task.sums)
    assert found[0] == found[1]


class Filled(nn.Module):
    """Fills what it is given, as mixtures of experts do with losses of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, losses: list[Tensor], found: dict[str, Tensor]) -> Tensor:
        h = self.first(x).relu()
        losses.append(h.pow(2).mean())
        found["features"] = h
        out: Tensor = self.second(h)
        return out


class FilledTask(Task):
    def __init__(self) -> None:
        super().__init__(Filled())
        self.seen: list[int] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        losses: list[Tensor] = []
        loss = F.cross_entropy(self.net(batch[0], losses, {}), batch[1])
        return loss + 0.5 * sum(losses)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        losses: list[Tensor] = []
        found: dict[str, Tensor] = {}
        self.net(batch[0], losses, found)
        self.log("filled", float(len(losses) + len(found)))


@pytest.mark.parametrize("strategy", ["auto", synchronous])
def test_an_argument_that_forward_fills(strategy: Any) -> None:
    torch.manual_seed(3)
    task, loader = FilledTask(), vectors(24, 4)
    trainer = quiet_trainer(strategy=strategy if strategy == "auto" else strategy(), max_epochs=1)
    trainer.fit(task, loader, loader)
    assert trainer.callback_metrics["filled"] == 2
    torch.manual_seed(3)
    plain = FilledTask()
    quiet_trainer(max_epochs=1).fit(plain, loader)
    assert all(map(torch.equal, plain.parameters(), task.parameters()))


def note_classes(net: Net, h: Tensor) -> Tensor:
    KINDS.setdefault(type(h), len(KINDS))
    return h


def test_a_table_of_classes_is_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    """Tracing adds a class of torch's own to it, which a run on values does not, so that the graph may stand.

    That run leaves alone what the watched call has saved for its backward, such as the statistics of a batch norm.
    """

    def normed() -> Task:
        task = Task(Net(note_classes))
        task.net.second = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 16))
        return task

    KINDS.clear()
    trained(normed, synchronous(module="net"))
    assert {*KINDS} == {Tensor}


def test_other_gradients_are_found_whatever_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that nobody notices shows in the gradients."""
    monkeypatch.setattr("lightning_hetpipe.capture.watch.refuse_noticed", lambda *_: None)
    with pytest.raises(SettingError, match=r"gives other gradients than the module itself, of 'first.weight' first"):
        trained(lambda: Task(Net(hook_a_node)), synchronous(module="net"))


class TwoParts(Task):
    """Calls two captured modules, one after the other."""

    def __init__(self) -> None:
        super().__init__(Net(lambda net, h: h))
        self.head = nn.ModuleList([Net(lambda net, h: h.tanh())])
        self.between = nn.Linear(CLASSES, 6)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head[0](self.between(self.net(batch[0]))), batch[1])


def test_gradients_of_inputs_are_compared_too(caplog: pytest.LogCaptureFixture) -> None:
    """The gradient of the second module's input is the graph's, so that the module stays whole."""
    with caplog.at_level("INFO"):
        trained(TwoParts, synchronous())
    assert "taken apart" not in caplog.text


class Masked(L.LightningModule):
    """Sets one seed before two calls of a dropout, which so draw the same mask."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, CLASSES))
        self.drop = nn.Sequential(nn.Linear(CLASSES, CLASSES), nn.Dropout(0.5))
        self.same: list[bool] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        made = []
        for _ in range(2):
            torch.manual_seed(batch_idx)
            made.append(self.drop(self.body(batch[0])))
        self.same = [*self.same, torch.equal(*made)]
        return F.cross_entropy(made[0], batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_seed_in_training_step_governs_what_a_module_draws() -> None:
    assert all(trained(Masked, HetPipeStrategy(stages=2, in_flight=3)).same)
    plain, ours = (trained(Masked, strategy) for strategy in ("auto", synchronous()))
    assert all(map(torch.equal, plain.parameters(), ours.parameters()))


class SeededEvaluation(Task):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, CLASSES)))
        self.losses: list[float] = []

    def on_validation_epoch_start(self) -> None:
        torch.manual_seed(5)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        noisy = batch[0] + torch.randn_like(batch[0])
        self.losses.append(F.cross_entropy(self.net(noisy), batch[1]).item())


def test_a_seed_before_an_evaluation_governs_it() -> None:
    loader, found = vectors(24, 4), []
    for strategy in ("auto", synchronous()):
        torch.manual_seed(3)
        task = SeededEvaluation()
        quiet_trainer(strategy=strategy, max_epochs=1).fit(task, loader, loader)
        found.append(task.losses)
    assert found[0] == found[1]


class ReadsAnArray(Task):
    """Reads a buffer, or a weight, by an array that lies in its memory."""

    def __init__(self, name: str) -> None:
        super().__init__(Net(lambda net, h: h))
        self.net.second = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
        self.name = name
        self.sums: list[float] = []

    def on_fit_start(self) -> None:
        self.array = dict(self.net.state_dict())[self.name].numpy()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.sums.append(float(self.array.sum()))
        return loss


class ReplacesTheArray(ReadsAnArray):
    """Has an array in a weight's memory at the start of an epoch, which nothing keeps after the first step."""

    def on_train_epoch_start(self) -> None:
        self.on_fit_start()

    def on_train_batch_end(self, *_: Any) -> None:
        self.array = np.zeros(1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.array = np.full(3, float(batch_idx))
        return super().training_step(batch, batch_idx)


def test_an_array_that_each_step_replaces_is_its_own() -> None:
    """A later array had the ``id`` of the one before the fit, and was taken for that."""
    task = ReplacesTheArray("third.bias")
    quiet_trainer(HetPipeStrategy(stages=2, in_flight=3), max_epochs=4).fit(task, vectors(120, 4))
    assert task.sums == [3.0 * number for number in range(30)] * 4


@pytest.mark.parametrize("name", ["second.1.running_mean", "third.bias"])
def test_an_array_in_the_memory_of_a_buffer_or_weight(name: str) -> None:
    """It showed what another minibatch had left."""
    plain, one = (
        trained(lambda: ReadsAnArray(name), each) for each in ("auto", HetPipeStrategy(stages=2, in_flight=1))
    )
    assert plain.sums == one.sums
    strategies = [HetPipeStrategy(stages=2, in_flight=3, weights="stash")]
    if name.startswith("second"):
        strategies.append(synchronous())
    else:
        assert plain.sums == trained(lambda: ReadsAnArray(name), synchronous()).sums
    for strategy in strategies:
        with pytest.raises(SettingError, match=rf"'array' .* in the memory of 'net.{name}', .*, or set in_flight=1$"):
            trained(lambda: ReadsAnArray(name), strategy)


SCALES = torch.linspace(0.5, 1.5, 16)


def scale_by_a_global(net: Net, h: Tensor) -> Tensor:
    return h * SCALES


def test_a_global_tensor() -> None:
    """The search for what steps share asked whether it is true, for which torch has no answer."""
    plain, ours = (trained(lambda: Task(Net(scale_by_a_global)), strategy) for strategy in ("auto", synchronous()))
    assert all(map(torch.equal, plain.parameters(), ours.parameters()))


class ChangesInAHook(Task):
    """Changes what ``change`` names after each step."""

    def __init__(self, net: Net, change: Callable[[Any], object]) -> None:
        super().__init__(net)
        self.change = change

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.change(self.net)


def add_a_view(net: Net, h: Tensor) -> Tensor:
    return h + net.bank[0]


@pytest.mark.parametrize("is_view", [False, True])
def test_a_change_outside_of_forward_names_what_was_changed(is_view: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SCALES", SCALES.clone())

    def made() -> Task:
        net = Net(add_a_view if is_view else scale_by_a_global)
        if is_view:
            net.bank = net.second.weight.data
        return ChangesInAHook(net, lambda net: None if is_view else SCALES.mul_(0.9))

    name = "bank" if is_view else "tests.exact.test_side_effects.SCALES"
    with pytest.raises(SettingError, match=rf"^'{name}'.* was changed outside of forward .* set in_flight=1"):
        trained(made, HetPipeStrategy(stages=2, in_flight=3, weights="stash"))


def write_the_bank_in_evaluation(net: Net, h: Tensor) -> Tensor:
    if not net.training:
        net.bank.data[0] = 0.0
    return h


def test_an_evaluation_that_writes_a_buffer_is_told_of_it() -> None:
    task, loader = Evaluated(Net(write_the_bank_in_evaluation)), vectors(24, 4)
    with pytest.warns(UserWarning, match="'net' changes its buffer 'net.bank' for these inputs, which it did not use"):
        quiet_trainer(strategy=synchronous(), max_epochs=1).fit(task, loader, loader)
