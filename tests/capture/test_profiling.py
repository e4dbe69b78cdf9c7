"""Profiling measures each layer by itself: seconds by the clock that is given, bytes; it disturbs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.capture.profiling import TIMED, WARM_UP, ProfilingInput, code_of
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.planning.model.profile import Times
from tests.capture.test_microbenchmark import CPU, Greedy, X, piece_of

FLOAT = 4


def study(*modules: nn.Module, optimizer: torch.optim.Optimizer | None = None, **given: Any) -> ProfilingInput:
    return ProfilingInput([piece_of(*modules, **given)], RandomGenerators(0), None, optimizer)


def test_bytes_of_a_layer() -> None:
    """A linear layer of 4 to 5 on 3 samples keeps its input and its output, and hands on 3 x 5 numbers."""
    ((linear, _), (relu, _)) = study(
        nn.Linear(4, 5), nn.ReLU(), inputs=[X.clone(), torch.ones(3, 5, requires_grad=True)]
    ).on(CPU)
    assert (linear.name, linear.parameters, linear.output) == ("net.0", (20 + 5) * FLOAT, 15 * FLOAT)
    assert linear.kept == (12 + 15) * FLOAT
    assert (linear.given, relu.given) == (12 * FLOAT, 15 * FLOAT)
    assert (relu.name, relu.parameters, relu.output, relu.kept) == ("net.1", 0, 15 * FLOAT, 30 * FLOAT)


@pytest.mark.parametrize("finetuned", [False, True])
def test_bytes_of_frozen_weights(finetuned: bool) -> None:
    """A layer that is partly frozen; where a callback will train it, it is measured as if it were trained."""
    linear, other = nn.Linear(4, 5), nn.Linear(5, 3).requires_grad_(False)
    linear.weight.requires_grad_(False)
    given = study(linear, other, inputs=[X.clone(), torch.ones(3, 5)])
    (one, _), (frozen, _) = replace(given, finetuned=finetuned).on(CPU)
    assert (one.parameters, one.frozen) == ((20 + 5) * FLOAT, 0 if finetuned else 20 * FLOAT)
    assert (frozen.parameters, frozen.frozen) == ((15 + 3) * FLOAT, 0 if finetuned else (15 + 3) * FLOAT)
    assert not linear.weight.requires_grad


def test_what_is_trained_later_keeps_activations() -> None:
    """A frozen layer whose input requires no gradient keeps nothing but its ends."""
    frozen = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4)).requires_grad_(False)
    ((now, _),) = study(frozen).on(CPU)
    ((later, _),) = replace(study(frozen), finetuned=True).on(CPU)
    assert later.kept >= now.kept + 3 * 64 * FLOAT


def test_times_are_medians_by_the_clock() -> None:
    """A clock that ticks once at each look, and jumps in one round: the median does not see it."""

    def ticks() -> Iterator[float]:
        for tick in count():
            yield tick + (1000 if tick > 4 * (WARM_UP + 2) else 0)

    clock = ticks()
    ((_, times),) = study(nn.Linear(4, 4)).on(CPU, lambda: next(clock))
    assert times == Times(1, 1, 1)
    assert next(clock) == 4 * (WARM_UP + TIMED) + 1000


def test_nothing_is_disturbed() -> None:
    """Weights, buffers, gradients, the default dtype and random states; the optimizer steps a copy."""
    greedy, linear = Greedy(), nn.Linear(4, 4)
    before = [tensor.clone() for module in (greedy, linear) for tensor in module.state_dict().values()]
    state, optimizer = torch.get_rng_state(), torch.optim.Adam(linear.parameters(), lr=1.0)
    list(study(linear, greedy, optimizer=optimizer).on(CPU))
    after = [tensor for module in (greedy, linear) for tensor in module.state_dict().values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_default_dtype() is torch.float32
    assert all(parameter.grad is None for parameter in linear.parameters())
    assert not optimizer.state


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam, torch.optim.Adagrad])
def test_an_update_is_one_of_the_same_optimizer(
    kind: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped: list[dict[str, Any]] = []
    original = kind.step

    def step(self: torch.optim.Optimizer, *args: Any) -> Any:
        stepped.append(self.defaults)
        return original(self, *args)

    monkeypatch.setattr(kind, "step", step)
    linear = nn.Linear(4, 4)
    optimizer: Any = kind(linear.parameters(), lr=0.5)  # type: ignore[call-arg]
    list(study(linear, optimizer=optimizer).on(CPU))
    assert stepped == [optimizer.defaults] * (WARM_UP + TIMED)


def test_what_has_no_gradient_is_measured_too() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    ((size, times),) = study(frozen, inputs=[X.clone()]).on(CPU)
    assert size.parameters == 20 * FLOAT
    assert times.forward > 0


class One(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Two(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 2


def test_the_code_of_a_layer_changes_with_what_it_computes() -> None:
    assert code_of(One()) == code_of(One())
    assert code_of(nn.Linear(2, 3)) == code_of(nn.Linear(2, 3))
    different = [One(), Two(), nn.Linear(2, 3), nn.Linear(2, 4), nn.Dropout(0.1), nn.Dropout(0.2), nn.Sequential(One())]
    assert len({code_of(module) for module in different}) == len(different)
