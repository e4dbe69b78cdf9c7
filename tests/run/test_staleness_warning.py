"""A fit whose momentum and staleness do not go together says so, once, and does not where that was mended."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from lightning_hetpipe.run.staleness_warning import check_staleness
from lightning_hetpipe.workers.synchroniser import NoSynchroniser, Synchroniser
from tests.support.small import Learner, batches, pipeline
from tests.support.trainers import quiet_trainer

SAID = "stale gradients and momentum"
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


class Clips(Trained):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


def sgd(lr: float = 0.05, momentum: float = 0.9, **options: Any) -> Make:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum, **options)


def some_groups(parameters: Any) -> torch.optim.Optimizer:
    first, second, *others = parameters
    groups = [{"params": [first], "momentum": 0.0}, {"params": [second], "momentum": 0.95}, {"params": others}]
    return torch.optim.SGD(groups, lr=0.02, momentum=0.9)


def rmsprop(momentum: float) -> Make:
    return lambda parameters: torch.optim.RMSprop(parameters, lr=0.001, momentum=momentum)


def said(module: Learner, in_flight: int, asked: dict[str, Any] | None = None, **settings: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(pipeline(in_flight, **(asked or {})), **settings).fit(module, batches())
    return [str(each.message) for each in caught if SAID in str(each.message)]


@pytest.mark.parametrize(
    ("make", "in_flight", "parts"),
    [
        (
            sgd(),
            4,
            [
                "momentum=0.9 may keep this model from learning: with 4 in flight, gradients are up to 3 steps old",
                "lr=0.05 acts like 0.5; lower lr to 0.003 or less, or the momentum, clip gradients"
                " (gradient_clip_val=1), set weights='auto', accumulate_grad_batches, or a smaller in_flight",
            ],
        ),
        (sgd(nesterov=True), 3, ["up to 2 steps old", "lower lr to 0.005 or less"]),
        (some_groups, 4, ["momentum=0.95", "lr=0.02 acts like 0.4"]),
        (
            rmsprop(0.9),
            4,
            ["lr=0.001 acts like 0.01; lower lr to 0.0003 or less, or the momentum, set weights='auto', accumulate"],
        ),
    ],
)
def test_a_fit_says_so_once(make: Make, in_flight: int, parts: list[str]) -> None:
    (found,) = said(Trained(make), in_flight, max_epochs=2)
    for part in parts:
        assert part in found


def test_the_rate_that_counts_is_the_one_that_a_warm_up_leads_to() -> None:
    (found,) = said(Trained(sgd(), scheduled=True), 4)
    assert "lr=0.05 acts like" in found


@pytest.mark.parametrize(
    ("module", "in_flight", "settings"),
    [
        (Trained(sgd(lr=0.003)), 4, {}),
        (Trained(sgd(momentum=0.5)), 4, {}),
        (Trained(sgd()), 4, {"gradient_clip_val": 1.0}),
        (Trained(sgd()), 4, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
        (Clips(sgd()), 4, {}),
        (Trained(sgd()), 4, {"accumulate_grad_batches": 4}),
        (Trained(sgd()), 2, {}),
        (Trained(sgd()), 1, {}),
        (Trained(rmsprop(0.0)), 4, {}),
        (Trained(lambda parameters: torch.optim.Adam(parameters, lr=0.01)), 4, {}),
        (Trained(lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01))), 4, {}),
    ],
)
def test_nothing_is_said_where_it_is_mended(module: Learner, in_flight: int, settings: dict[str, Any]) -> None:
    assert said(module, in_flight, **settings) == []


@pytest.mark.parametrize(
    ("lr", "asked", "settings", "part"),
    [
        (0.05, {"weights": "auto"}, {}, None),
        (0.005, {"weights": "spectrain"}, {}, None),
        (0.05, {"weights": "spectrain"}, {"gradient_clip_val": 1.0}, None),
        (0.05, {"weights": "pipeoptim", "lr_correction": 100}, {}, None),
        (0.05, {"weights": "sync"}, {"accumulate_grad_batches": 4}, None),
        (0.05, {"weights": "spectrain"}, {}, "lower lr to 0.006 or less, or the momentum, clip gradients"),
        (0.05, {"weights": "spectrain"}, {}, "set lr_correction, accumulate_grad_batches"),
        (0.1, {"weights": "auto"}, {}, "lower lr to 0.05 or less, or the momentum, clip"),
        (0.1, {"weights": "auto"}, {}, "set accumulate_grad_batches, or a smaller in_flight"),
        (0.05, {"weights": "stash", "lr_correction": 100}, {}, "set weights='auto', accumulate_grad_batches"),
    ],
)
def test_policies_bear_different_rates(
    lr: float, asked: dict[str, Any], settings: dict[str, Any], part: str | None
) -> None:
    found = said(Trained(sgd(lr)), 4, asked, **settings)
    assert (part is None) == (not found)
    assert part is None or part in found[0]


def test_clipping_is_not_enough_for_many_in_flight() -> None:
    (found,) = said(Trained(sgd()), 6, gradient_clip_val=1.0)
    assert "lower lr to 0.002 or less, or the momentum, set weights='auto', accumulate_grad_batches" in found


def test_it_can_be_silenced_as_the_docs_say() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("ignore", message=SAID)
        quiet_trainer(pipeline(4)).fit(Trained(sgd()), batches())
    assert not any(SAID in str(each.message) for each in caught)


@pytest.mark.parametrize(
    ("size", "in_flight", "wsp", "wave", "part"),
    [
        (1, 2, {}, 2, None),
        (2, 2, {}, 2, "with 2 in flight, gradients are up to 2 steps old, and lr=0.05 acts like 1; lower lr to 0.002"),
        (2, 2, {"aggregate": "mean"}, 2, "acts like 0.5; lower lr to 0.005"),
        (2, 1, {}, 1, None),
        (2, 1, {"clock_distance": 2}, 1, "up to 2 steps old"),
        (4, 1, {}, 8, "up to 7 steps old"),
    ],
)
def test_virtual_workers_add_to_both(size: int, in_flight: int, wsp: dict[str, Any], wave: int, part: str) -> None:
    group: Any = SimpleNamespace(size=size, settings=SimpleNamespace(**{"clock_distance": 0, "aggregate": "sum"} | wsp))
    module = Trained(sgd())
    trainer: Any = SimpleNamespace(
        accumulate_grad_batches=1,
        gradient_clip_val=None,
        lightning_module=module,
        optimizers=[module.configure_optimizers()],
    )
    synchroniser = NoSynchroniser() if size == 1 else Synchroniser(group, module)
    if isinstance(synchroniser, Synchroniser):
        synchroniser.wave = wave
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_staleness(trainer, in_flight, *synchroniser.staleness(in_flight - 1))
    assert len(caught) == (part is not None)
    if part is not None:
        assert part in str(caught[0].message)
