"""A wave's end, as the pipeline sees it; what becomes of the weights, real launches show (tests/wsp)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe import WSPCallback
from lightning_hetpipe.launch.servers import FoundServers
from lightning_hetpipe.pipeline.user.lock import Precedence, Ticket
from lightning_hetpipe.run.driver import TrainerRun
from lightning_hetpipe.server.process.sessions import Sessions
from lightning_hetpipe.server.transport.grpc_server import GrpcServer
from lightning_hetpipe.server.transport.security import Security
from lightning_hetpipe.strategy.virtual_workers import VirtualWorkers
from lightning_hetpipe.workers import group as group_module
from lightning_hetpipe.workers.seats import Seats
from lightning_hetpipe.workers.shared_data import Shares
from lightning_hetpipe.workers.synchroniser import Synchroniser
from tests.exact.pipelines import even
from tests.exact.running import fit
from tests.support.models import SGD, mlp, vectors
from tests.workers.test_group import close, group_of


class OnlyOne:
    """A group of one virtual worker, and the servers that it shares weights with.

    Wherever it is called for a wave, or for a cut, a stretch of user code comes that asks for the lock over user code.
    """

    index, size, settings = 0, 1, WSPCallback().settings

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.weights = self
        self.member = SimpleNamespace(clock=0, slowest=0, cut_at=-1, cut=0)
        self.seats = Seats(0, 1)
        self.met: list[str] = []
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext

    def enter_fit(self, named: Sequence[tuple[str, Tensor]], *_: Any) -> list[Tensor]:
        self.held = [parameter.detach().clone() for _, parameter in named]
        return self.held

    def gather(self, value: Any, what: str) -> list[Any]:
        if self.strategy._run.devices:
            with self.waiting():
                self._meet(what)
        return [value]

    def agree(self, value: Any, what: str) -> list[Any]:
        return self.gather(value, what)

    def check(self) -> None: ...

    def begin_epoch(self) -> None: ...

    def newly_lost(self) -> dict[int, int]:
        return {}

    def update_buffers(self) -> list[Tensor]:
        """Called while the update is computed."""
        self._meet("update")
        return [torch.empty_like(weight) for weight in self.held]

    def synchronise(self, update: Sequence[Tensor], **_: Any) -> list[Tensor]:
        self._meet("wave")
        self.member.clock += 1
        return self._added(update)

    def arrive(self, cut: int, update: Sequence[Tensor] | None = None) -> list[Tensor]:
        self._meet("cut")
        return self._added(update or [])

    def _added(self, update: Sequence[Tensor]) -> list[Tensor]:
        for weight, change in zip(self.held, update, strict=False):
            weight += change
        return self.held

    def _meet(self, where: str) -> None:
        stretch = Ticket(Precedence.START, 0)
        self.strategy._run.pipeline.lock.request(stretch)
        assert stretch.wait(30), f"user code has to wait for the {where}"
        self.strategy._run.pipeline.lock.release()
        self.met.append(where)


def take_part(monkeypatch: pytest.MonkeyPatch, group: Any) -> None:
    """Have fits synchronise with ``group``."""

    def enter(self: VirtualWorkers, trainer: Any, *_: Any) -> Synchroniser:
        made = Synchroniser(group, trainer.lightning_module)
        made.enter([])
        return made

    monkeypatch.setattr(VirtualWorkers, "enter", enter)


def test_user_code_runs_while_a_wave_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses that stages wait for had to wait for a wave's update to be computed, and for its weights to be copied."""
    strategy: Any = even(7, 2, 3)
    group: Any = OnlyOne(strategy)

    follow = Synchroniser.follow
    monkeypatch.setattr(Synchroniser, "follow", lambda self: (group.met.append("weights move"), follow(self)))
    take_part(monkeypatch, group)
    loader = vectors(14, 2)
    fit(mlp(SGD), loader, strategy=strategy, max_epochs=1)
    assert len(loader) == 7
    # Three minibatches, three, and one at the end of the epoch.
    assert group.met == [
        "weights move",
        *["update", "wave"] * 2,
        "update",
        "cut",
        "a cut",
        "the exchange of buffers",
        "the end of an epoch",
    ]
    assert group.waiting is nullcontext


def test_all_stash_where_one_has_no_room_to_predict(monkeypatch: pytest.MonkeyPatch) -> None:
    """One predicted and another stashed, as each had room."""
    strategy: Any = even(7, 2, 3, weights="pipeoptim")
    group: Any = OnlyOne(strategy)
    others = {"the choice of in_flight": [(2, "stash")]}
    gather = group.gather
    monkeypatch.setattr(group, "gather", lambda value, what: [*gather(value, what), *others.get(what, [])])

    take_part(monkeypatch, group)
    used = []

    class Looks(L.Callback):
        def on_train_epoch_end(self, *_: Any) -> None:
            used.append(strategy._run.pipeline.versions.policy.name)

    fit(mlp(SGD), vectors(14, 2), [Looks()], strategy=strategy, max_epochs=1)
    assert used == ["stash"]


@pytest.mark.parametrize("update_dtype", [None, "bfloat16"])
def test_what_was_synchronised_last_is_where_the_weights_are(update_dtype: str | None) -> None:
    """It stayed on the GPU on which a run begins: the first wave of a virtual worker with several was an error."""
    module = L.LightningModule()
    module.first, module.second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    group: Any = OnlyOne(SimpleNamespace(_run=TrainerRun()))
    group.settings = WSPCallback(update_dtype=update_dtype).settings
    synchroniser = Synchroniser(group, module)
    synchroniser.enter([])
    copies = synchroniser._copies
    copies.named[0] = ("first", nn.Parameter(torch.ones(2, device="meta")))  # a device that is not this one
    synchroniser.follow()
    assert [last.device.type for last in copies.last] == ["meta", "cpu"]
    assert [rounding.device.type for rounding in copies.roundings] == (["meta", "cpu"] if update_dtype else [])


def test_copies_of_frozen_weights_are_on_the_host() -> None:
    """The first update of a weight that is trained later is computed there."""
    module = L.LightningModule()
    module.first, module.second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    synchroniser = Synchroniser(OnlyOne(SimpleNamespace(_run=TrainerRun())), module)  # type: ignore[arg-type]
    synchroniser.enter([])
    copies = synchroniser._copies
    copies.named = [
        (name, nn.Parameter(torch.ones(2, device="meta"), each.requires_grad)) for name, each in copies.named
    ]
    synchroniser.follow()
    assert [last.device.type for last in copies.last] == ["meta", "cpu"]


@pytest.mark.parametrize("update_dtype", [None, "float32"])
def test_frozen_parameters_are_shared_only_when_an_epoch_begins(update_dtype: str | None) -> None:
    """An infinity, as masks have, was refused as a change that is no number; of a teacher's moves the servers kept the
    sum of all virtual workers', which all took when a callback changed a weight between epochs."""
    module = L.LightningModule()
    module.weight = nn.Parameter(torch.ones(2))
    module.mask = nn.Parameter(torch.tensor([0.0, float("-inf")]), requires_grad=False)
    module.teacher = nn.Parameter(torch.ones(2), requires_grad=False)
    group: Any = OnlyOne(SimpleNamespace(_run=TrainerRun()))
    group._meet = lambda where: None
    group.settings = WSPCallback(update_dtype=update_dtype).settings
    synchroniser = Synchroniser(group, module)
    synchroniser.enter([])

    def change() -> None:
        with torch.no_grad():
            for name in ("weight", "teacher"):
                module.get_parameter(name).add_(1.0)

    change()
    synchroniser.synchronise(nullcontext)
    assert [held.tolist() for held in group.held] == [[2.0, 2.0], [0.0, float("-inf")], [1.0, 1.0]]
    change()
    synchroniser.begin(1, 2, nullcontext)
    assert [held.tolist() for held in group.held] == [[3.0, 3.0], [0.0, float("-inf")], [3.0, 3.0]]
    assert all(torch.equal(p, held) for p, held in zip(module.parameters(), group.held, strict=True))


def test_at_a_cut_all_hold_the_same_frozen_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A teacher that each virtual worker's callback moves within an epoch was another one on each of them: what they
    validated, and what was saved, was not what the others held (law L6)."""
    monkeypatch.setattr(group_module, "next_session", "{}-1".format)
    rooms = Sessions(5.0)
    with ThreadPoolExecutor(2) as pool, GrpcServer(rooms) as server:

        def trained(index: int) -> list[list[float]]:
            found = FoundServers(server.address, (server.address,) if index == 0 else (), Security())
            group = group_of(index, 2, found, WSPCallback(lease=5.0).settings)
            group.open()
            module = L.LightningModule()
            module.weight = nn.Parameter(torch.zeros(2))
            module.teacher = nn.Parameter(torch.ones(2), requires_grad=False)
            module.untouched = nn.Parameter(torch.tensor([float("-inf")]), requires_grad=False)
            synchroniser = Synchroniser(group, module)
            synchroniser.enter([])
            with torch.no_grad():
                module.weight.add_(1.0)
                if index == 1:  # also what virtual worker 0 has not changed
                    module.untouched.fill_(0.5)
                module.teacher.add_(0.1 + index)
            synchroniser.cut(1, 1, nullcontext)
            held = [parameter.tolist() for parameter in module.parameters()]
            synchroniser.begin(2, 1, nullcontext)
            assert [parameter.tolist() for parameter in module.parameters()] == held
            close(group)
            return held

        one, other = pool.map(trained, range(2))
    rooms.close()
    assert one == other == [[2.0, 2.0], torch.ones(2).add(0.1).tolist(), [float("-inf")]]


def test_rates_of_those_that_are_there_decide_on_their_waves() -> None:
    """Virtual worker 1 is lost, or has not come yet: its waves stay as they are, until it is there."""
    group: Any = SimpleNamespace(index=0, size=3, settings=WSPCallback(shares="auto").settings)
    synchroniser = Synchroniser(group, mlp(), Shares(0, 3, adapts=True))
    synchroniser.lengths, synchroniser._least = (2, 2, 2), 2
    assert not synchroniser.divide({0: 10.0, 2: None}, 1), "not all have measured theirs"
    assert synchroniser.divide({0: 10.0, 2: 20.0}, 1)
    assert synchroniser.lengths == (2, 2, 4)
    assert synchroniser.divide({0: 10.0, 1: 20.0, 2: 20.0}, 1)
    assert synchroniser.lengths == (2, 4, 4)
