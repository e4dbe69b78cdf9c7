"""Random models on vectors, cut at random: cuts, stages and minibatches in flight do not change a bit (law L1)."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.exact.pipelines import Pinned
from tests.exact.running import assert_equal, expect, fit
from tests.support.marks import explores, slow_except
from tests.support.models import ADAMW, CLASSES, SGD, Residual, Task

WIDTH = 6
KINDS = [
    "linear",
    "relu",
    "linear, relu in place",
    "layer norm",
    "batch norm",
    "dropout",
    "tanh",
    "identity",
    "nested",
    "residual",
    "shared linear",
    "shared dropout",
    "frozen linear",
]


@dataclass(frozen=True)
class Case:
    kinds: list[str]
    cuts: tuple[int, ...]
    in_flight: int
    batches: int
    batch_size: int
    last_batch: int  # never one sample, which BatchNorm refuses
    accumulate: int
    adamw: bool
    seed: int
    layers: list[nn.Module] = field(default_factory=list, repr=False)


def build(kinds: list[str]) -> list[nn.Module]:
    """The layers; "linear, relu in place" are two, so that a cut may fall between them."""
    linear, dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4)
    layers: list[nn.Module] = []
    for kind in kinds:
        match kind:
            case "linear":
                layers.append(nn.Linear(WIDTH, WIDTH))
            case "relu":
                layers.append(nn.ReLU())
            case "linear, relu in place":
                layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)]
            case "layer norm":
                layers.append(nn.LayerNorm(WIDTH))
            case "batch norm":
                layers.append(nn.BatchNorm1d(WIDTH))
            case "dropout":
                layers.append(nn.Dropout(0.25))
            case "tanh":
                layers.append(nn.Tanh())
            case "identity":
                layers.append(nn.Identity())
            case "nested":
                layers.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.GELU(), nn.Dropout(0.1))))
            case "residual":
                layers.append(Residual(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.ReLU()))
            case "shared linear":
                layers.append(linear)
            case "shared dropout":
                layers.append(dropout)
            case "frozen linear":
                layers.append(nn.Linear(WIDTH, WIDTH).requires_grad_(False))
    return [*layers, nn.Linear(WIDTH, CLASSES)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=8))
    seed = draw(st.integers(0, 1000))
    torch.manual_seed(seed)
    layers = build(kinds)
    most = sum(kind != "identity" for kind in kinds)  # with the last layer: as many stages as layers that compute
    inner = draw(st.sets(st.integers(1, len(layers) - 1), max_size=min(3, most)))
    batch_size = draw(st.integers(2, 5))
    return Case(
        kinds=kinds,
        cuts=(0, *sorted(inner)),
        in_flight=draw(st.integers(1, 8)),
        batches=draw(st.integers(1, 7)),
        batch_size=batch_size,
        last_batch=draw(st.integers(2, batch_size)),
        accumulate=draw(st.integers(1, 3)),
        adamw=draw(st.booleans()),
        seed=seed,
        layers=layers,
    )


def check(case: Case) -> None:
    task = Task(nn.Sequential(*case.layers), ADAMW if case.adamw else SGD)
    torch.manual_seed(case.seed)  # the run's seed; the data must not depend on how much the layers drew
    samples = (case.batches - 1) * case.batch_size + case.last_batch
    data = TensorDataset(torch.randn(samples, WIDTH), torch.randint(CLASSES, (samples,)))
    loader: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(data, case.batch_size)
    expected = expect(task, loader, case.in_flight, accumulate=case.accumulate, stages=len(case.cuts))
    strategy = Pinned(case.cuts, case.in_flight)
    assert_equal(expected, fit(task, loader, strategy=strategy, accumulate_grad_batches=case.accumulate))


@pytest.mark.parametrize(("uses", "cuts"), [(3, (0, 2)), (4, (0, 2)), (4, (0, 1, 3))])
@pytest.mark.parametrize("in_flight", slow_except([1, 3], 3))
def test_a_module_that_is_used_several_times_before_a_cut_and_behind_it(
    uses: int, cuts: tuple[int, ...], in_flight: int
) -> None:
    """Its uses on one stage were added up before they came to those of the next stages: other last bits."""
    kinds = ["shared linear"] * uses
    torch.manual_seed(0)
    check(Case(kinds, cuts, in_flight, 3, 2, 2, 1, False, 0, build(kinds)))


@pytest.mark.parametrize("cuts", [(0,), (0, 6), (0, 2, 6), (0, 4, 8)])
@pytest.mark.parametrize("in_flight", slow_except([1, 3], 3))
def test_a_module_that_is_used_before_and_after_another_with_its_weight(cuts: tuple[int, ...], in_flight: int) -> None:
    """Each module's uses were added up before they came to the other's: other last bits, on one stage too."""
    torch.manual_seed(0)
    one, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    other.weight = one.weight
    layers = [one, nn.Tanh(), other, nn.Tanh(), one, nn.Tanh(), one, nn.Tanh(), other, nn.Linear(WIDTH, CLASSES)]
    check(Case([], cuts, in_flight, 3, 2, 2, 1, False, 0, layers))


@given(cases())
@settings(explores(24), derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_random_models(case: Case) -> None:
    check(case)


@pytest.mark.slow
@given(cases())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_more_random_models(case: Case) -> None:
    check(case)
