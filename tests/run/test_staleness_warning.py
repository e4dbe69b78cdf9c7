"""A fit whose momentum and staleness do not go together says so, once, and does not where that was mended."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_hetpipe.run.stale_gradients import check_staleness
from lightning_hetpipe.workers.synchroniser import NoSynchroniser, Synchroniser
from tests.support.small import Learner, batches, pipeline
from tests.support.trainers import quiet_trainer

SAID = "stale gradients may keep this model from learning"
Make = Callable[[Any], torch.optim.Optimizer]


class Trained(Learner):
    def __init__(self, make: Make, scheduled: bool = False) -> None:
        super().__init__()
        self.make, self.scheduled = make, scheduled

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        if not self.scheduled:
            return optimizer
        warm_up = LambdaLR(optimizer, lambda step: min(1.0, step / 3))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, "interval": "step"}}


class Normed(Trained):
    """With a BatchNorm, which bears more."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        assert isinstance(self.net, nn.Sequential)
        self.net.append(nn.BatchNorm1d(3))


class Clips(Trained):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


def sgd(lr: float = 0.05, momentum: float = 0.9, **options: Any) -> Make:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum, **options)


def some_groups(parameters: Any) -> torch.optim.Optimizer:
    first, second, *others = parameters
    groups = [{"params": [first], "momentum": 0.0}, {"params": [second], "momentum": 0.95}, {"params": others}]
    return torch.optim.SGD(groups, lr=0.02, momentum=0.9)


def rmsprop(momentum: float, lr: float = 0.001) -> Make:
    return lambda parameters: torch.optim.RMSprop(parameters, lr=lr, momentum=momentum)


def adam(lr: float) -> Make:
    return lambda parameters: torch.optim.AdamW(parameters, lr=lr)


def said(module: Learner, in_flight: int, asked: dict[str, Any] | None = None, **settings: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(pipeline(in_flight, **(asked or {})), **settings).fit(module, batches())
    return [str(each.message) for each in caught if SAID in str(each.message)]


@pytest.mark.parametrize(
    ("make", "in_flight", "said_of_it"),
    [
        (
            sgd(),
            4,
            "with 4 in flight they are up to 3 steps old, and lr=0.05 with momentum=0.9 acts like 0.5; set"
            " accumulate_grad_batches=3 for one step, or lr to 0.003 or less, or a smaller in_flight, or"
            " weights='auto'; docs/staleness.md has",
        ),
        (sgd(nesterov=True), 3, "up to 2 steps old, and lr=0.05 with momentum=0.9 acts like 0.5; set accumulate"),
        (sgd(), 2, "up to 1 step old, and lr=0.05 with momentum=0.9 acts like 0.5; set lr to 0.01 or less, or weights"),
        (sgd(0.1, 0.0), 4, "and lr=0.1 of SGD is large for that; set accumulate_grad_batches=3 for one step, or lr to"),
        (sgd(0.1, 0.0), 4, "lr to 0.03 or less, or a smaller in_flight; docs"),
        (some_groups, 4, "lr=0.02 with momentum=0.95 acts like 0.4"),
        (rmsprop(0.9), 4, "lr=0.001 with momentum=0.9 acts like 0.01; set accumulate"),
        (
            adam(0.003),
            4,
            "lr=0.003 of AdamW is large for that; set accumulate_grad_batches=3 for one step, or lr to 0.0006",
        ),
    ],
)
def test_a_fit_says_so_once(make: Make, in_flight: int, said_of_it: str) -> None:
    (found,) = said(Trained(make), in_flight, max_epochs=2)
    assert said_of_it in found


def test_the_rate_that_counts_is_the_one_that_a_warm_up_leads_to() -> None:
    (found,) = said(Trained(sgd(), scheduled=True), 4)
    assert "lr=0.05 with momentum=0.9 acts like" in found


@pytest.mark.parametrize(
    ("module", "in_flight", "settings"),
    [
        (Trained(sgd(lr=0.003)), 4, {}),
        (Trained(sgd(lr=0.015, momentum=0.5)), 4, {}),
        (Trained(sgd(lr=0.01)), 4, {"accumulate_grad_batches": 4}),
        (Trained(sgd(lr=0.01)), 2, {}),
        (Trained(sgd(lr=5.0)), 1, {}),
        (Normed(sgd(lr=0.015)), 4, {}),
        (Trained(rmsprop(0.0, 0.0003)), 4, {}),
        (Trained(adam(0.0006)), 4, {}),
        (Trained(lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.0006))), 4, {}),
        (Trained(lambda parameters: torch.optim.Adagrad(parameters, lr=1.0)), 4, {}),  # whose rate is none
    ],
)
def test_nothing_is_said_where_it_is_mended(module: Learner, in_flight: int, settings: dict[str, Any]) -> None:
    assert said(module, in_flight, **settings) == []


@pytest.mark.parametrize(
    ("module", "asked", "settings", "part"),
    [
        (Trained(sgd(0.01)), {"weights": "auto"}, {}, None),
        (Normed(sgd()), {"weights": "auto"}, {}, None),
        (Trained(sgd(0.003)), {"weights": "spectrain"}, {}, None),
        (Trained(sgd(0.02)), {"weights": "spectrain"}, {"gradient_clip_val": 1.0}, None),
        (Trained(sgd(0.02)), {"weights": "auto"}, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}, None),
        (Clips(sgd(0.02)), {"weights": "auto"}, {}, None),
        (Trained(sgd(0.01)), {"weights": "pipeoptim", "lr_correction": 100}, {}, None),
        (Trained(sgd()), {"weights": "sync"}, {"accumulate_grad_batches": 4}, None),
        (Trained(adam(0.002)), {"weights": "auto"}, {}, None),
        (
            Trained(sgd()),
            {"weights": "spectrain"},
            {},
            "lr to 0.003 or less, or a smaller in_flight, or gradient_clip_val=1, or lr_correction; docs",
        ),
        (
            Trained(sgd()),
            {"weights": "auto"},
            {},
            "or lr to 0.01 or less, or a smaller in_flight, or gradient_clip_val=1; docs",
        ),
        (
            Trained(sgd()),
            {"weights": "auto"},
            {"gradient_clip_val": 1.0},
            "lr to 0.02 or less, or a smaller in_flight; docs",
        ),
        (Trained(sgd()), {"weights": "stash", "lr_correction": 100}, {}, "or weights='auto'; docs"),
        (Trained(sgd(0.05, 0.0)), {"weights": "auto"}, {}, "lr to 0.03 or less, or a smaller in_flight; docs"),
        (Trained(adam(0.003)), {"weights": "auto"}, {}, "lr to 0.002 or less, or a smaller in_flight; docs"),
    ],
)
def test_policies_bear_different_rates(
    module: Learner, asked: dict[str, Any], settings: dict[str, Any], part: str | None
) -> None:
    found = said(module, 4, asked, **settings)
    assert (part is None) == (not found)
    assert part is None or part in found[0]


def test_it_can_be_silenced_as_the_docs_say() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("ignore", message=SAID)
        quiet_trainer(pipeline(4)).fit(Trained(sgd()), batches())
    assert not any(SAID in str(each.message) for each in caught)


@pytest.mark.parametrize(
    ("size", "in_flight", "wsp", "wave", "part"),
    [
        (1, 2, {}, 2, "up to 1 step old, and lr=0.05 with momentum=0.9 acts like 0.5"),
        (
            2,
            2,
            {},
            2,
            "with 2 in flight they are up to 2 steps old, and lr=0.05 with momentum=0.9 acts like 1; set"
            " accumulate_grad_batches, or lr to 0.002 or less",
        ),
        (2, 2, {"aggregate": "mean"}, 2, "acts like 0.5; set accumulate_grad_batches, or lr to 0.005 or less"),
        (2, 1, {}, 1, None),
        (2, 1, {"clock_distance": 2}, 1, "up to 2 steps old"),
        (4, 1, {}, 8, "up to 7 steps old"),
    ],
)
def test_virtual_workers_add_to_both(size: int, in_flight: int, wsp: dict[str, Any], wave: int, part: str) -> None:
    settings = {"clock_distance": 0, "aggregate": "sum", "update_dtype": None} | wsp
    group: Any = SimpleNamespace(size=size, settings=SimpleNamespace(**settings))
    module = Trained(sgd())
    trainer: Any = SimpleNamespace(
        accumulate_grad_batches=1,
        gradient_clip_val=None,
        lightning_module=module,
        optimizers=[module.configure_optimizers()],
    )
    synchroniser = NoSynchroniser() if size == 1 else Synchroniser(group, module)
    if isinstance(synchroniser, Synchroniser):
        synchroniser.lengths = (wave,) * size
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_staleness(trainer, in_flight, *synchroniser.staleness(in_flight - 1))
    assert len(caught) == (part is not None)
    if part is not None:
        assert part in str(caught[0].message)
