"""Forwards that are computed again for their backwards change no bit, and keep only their inputs until then."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.segment_runner import SegmentRunner
from lightning_hetpipe.pipeline.stage_messages import Forward
from tests.exact.pipelines import Pinned, delayed, even
from tests.exact.running import Record, assert_equal, expect, fit
from tests.exact.test_captured import CASES, made
from tests.exact.test_layers import LAYERS
from tests.oracle import Batch, Outputs
from tests.support.marks import explores, quick, slow_except
from tests.support.models import ADAMW, CLASSES, MODELS, SGD, Learner, Pieces, Task, mlp, resnet, vectors

FURTHER = [(1, 1), (1, 3), (2, 1), (3, 2), (4, 6)]
IN_FLIGHT = [pytest.param(1, marks=pytest.mark.slow), 4]


def check(task: Learner, loader: Any, strategy: Pinned, in_flight: int, **options: Any) -> Record:
    """Equal to the oracle, as the pipeline is without recomputation."""
    seed = torch.initial_seed()
    expected = expect(task, loader, in_flight, **options)
    torch.manual_seed(seed)  # where training_step draws, the oracle has left other random numbers
    record = fit(task, loader, strategy=strategy, precision="bf16-mixed" if "autocast" in options else None)
    assert_equal(expected, record)
    return record


@pytest.mark.parametrize(("stages", "in_flight"), slow_except([*FURTHER, (2, 4), (3, 1)], (2, 4)))
@pytest.mark.parametrize("model", MODELS)
def test_sequentials(model: str, stages: int, in_flight: int) -> None:
    """With dropout, BatchNorm and in-place layers."""
    make_task, make_loader = MODELS[model]
    task = make_task(ADAMW)
    layers = len(list(task.net.children()))
    check(task, make_loader(21, 3), even(layers, stages, in_flight, recompute=True), in_flight, stages=stages)


@pytest.mark.parametrize(
    ("name", "in_flight"),
    # With one in flight, noise in training_step itself is a plain run's: see test_captured_changes.
    slow_except(
        [(name, in_flight) for name in CASES for in_flight in (1, 4) if (name, in_flight) != ("noise between", 1)],
        ("noise between", 4),
    ),
)
def test_captured_models(name: str, in_flight: int) -> None:
    """With dropout, BatchNorm, tied weights, several pieces, and user code between them that draws."""
    _, loader, layers = CASES[name]
    strategy = even(layers, min(3, layers), in_flight, recompute=True)
    check(made(name), loader, strategy, in_flight, draws=name == "noise between")


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
@pytest.mark.parametrize("name", slow_except(["gpt", "resnet", "dropout", "pieces"], "pieces"))
def test_mixed_precision(name: str, in_flight: int) -> None:
    _, loader, layers = CASES[name]
    strategy = even(layers, 3, in_flight, recompute=True)
    check(made(name), loader, strategy, in_flight, autocast=torch.bfloat16)


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
def test_pieces(in_flight: int) -> None:
    check(Pieces(), vectors(18, 4), even(8, 3, in_flight, recompute=True), in_flight)


@quick("buffer changed in place-4", "cumulative batch norm-4", "spectral norm-4", "in place after a linear layer-4")
@pytest.mark.parametrize("in_flight", IN_FLIGHT)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_habits(name: str, in_flight: int) -> None:
    """Buffers that are changed in place or replaced, computed weights, modes: each changes once for a minibatch."""
    task = Task(nn.Sequential(nn.Linear(6, 8), *LAYERS[name](), nn.Tanh(), nn.Linear(8, CLASSES)), SGD)
    layers = len(list(task.net.children()))
    check(task, vectors(18, 4), Pinned((0, layers - 1), in_flight, recompute=True), in_flight)


@pytest.mark.slow
@explores(20)
@given(data=st.data())
@pytest.mark.parametrize("model", MODELS)
def test_any_cut_and_any_timing(model: str, data: st.DataObject) -> None:
    make_task, make_loader = MODELS[model]
    task = make_task(SGD)
    layers = len(list(task.net.children()))
    cuts = sorted(data.draw(st.sets(st.integers(1, layers - 1), max_size=3)))
    in_flight = data.draw(st.integers(1, 6))
    strategy = delayed(Pinned((0, *cuts), in_flight, recompute=True), data.draw(st.integers(0, 99)))
    check(task, make_loader(17, 3), strategy, in_flight, stages=1 + len(cuts))


def activations(recompute: bool) -> list[int]:
    strategy = even(9, 3, 4, recompute=recompute)
    fit(resnet(), MODELS["resnet"][1](18, 2), strategy=strategy)
    found = [stage.activations_bytes for stage in strategy.last_run.stages]
    return [each for each in found if each is not None]


def test_stages_keep_only_their_inputs() -> None:
    """And the last one, whose backward follows at once, what it always does."""
    kept, again = activations(recompute=False), activations(recompute=True)
    assert again[0] < 0.6 * kept[0]
    assert again[1] < 0.8 * kept[1]
    assert again[2] == kept[2]


def computed(monkeypatch: pytest.MonkeyPatch, fail_at: tuple[str, int] | None = None) -> Counter[str]:
    """Number of computations of each segment, once fits have run; ``fail_at`` fails the second time of a minibatch."""
    counts: Counter[str] = Counter()
    times: Counter[tuple[str, int]] = Counter()
    compute = SegmentRunner._compute

    def counted(part: SegmentRunner, task: Forward, *args: Any) -> Any:
        where = part.describe(), task.minibatch
        times[where] += 1
        counts[where[0]] += 1
        if where == fail_at and times[where] == 2:
            raise ArithmeticError("in the second forward")
        return compute(part, task, *args)

    monkeypatch.setattr(SegmentRunner, "_compute", counted)
    return counts


def test_the_last_stage_computes_once_and_the_others_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = computed(monkeypatch)
    fit(mlp(), vectors(24, 4), strategy=Pinned((0, 2, 6), 2, recompute=True))
    through = 2 * 6 - 1  # two epochs, and the first minibatch is watched
    assert counts == {
        "layers net.0 to net.1": 2 * through,
        "layers net.2 to net.5": 2 * through,
        "layer net.6": through,
    }


def test_without_it_each_computes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = computed(monkeypatch)
    fit(mlp(), vectors(24, 4), strategy=Pinned((0, 2, 6), 2))
    assert set(counts.values()) == {2 * 6 - 1}


class Checkpointed(nn.Module):
    """Blocks under torch's checkpoints, as people call these."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        y: Tensor = self.head(x)
        return y


class Checkpoints(Learner):
    def __init__(self) -> None:
        super().__init__(ADAMW)
        self.net = Checkpointed()

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        return {"loss": nn.functional.cross_entropy(self.net(x), y)}


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
def test_checkpoints_in_a_module_are_recompute(
    in_flight: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its graph leaves them out: stages kept all activations, without a word."""
    counts = computed(monkeypatch)
    with caplog.at_level("INFO", "lightning.pytorch"):
        check(Checkpoints(), vectors(24, 4), even(5, 2, in_flight), in_flight)
    assert "gradient checkpointing is enabled" in caplog.text
    first, last = sorted(counts.values(), reverse=True)
    assert first == 2 * last


def test_a_batch_norm_under_a_checkpoint_is_told() -> None:
    """A plain run changes its statistics once more in the backward pass."""
    task = Checkpoints()
    task.net.blocks[1] = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    with pytest.warns(UserWarning, match=r"'net' calls .*checkpoint, and changes the buffer 'blocks\.1.* in_flight=1"):
        fit(task, vectors(24, 4), strategy=even(5, 2, 3))


def test_an_input_that_user_code_changes_in_place_is_refused() -> None:
    """It would be computed again from something else: the batch, after the call."""

    class Spoils(Task):
        def compute(self, batch: Batch) -> Outputs:
            outputs = super().compute(batch)
            batch[0].mul_(2)
            return outputs

    task = Spoils(nn.Sequential(nn.Tanh(), nn.Linear(6, 8), nn.Linear(8, CLASSES)))
    with pytest.raises(SettingError, match=r"layer net\.0 .* changed in place .*recompute"):
        fit(task, vectors(22, 4), strategy=Pinned((0, 1), 2, recompute=True))


def test_what_a_layer_raises_the_second_time_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    computed(monkeypatch, fail_at=("layers net.0 to net.1", 3))
    with pytest.raises(ArithmeticError, match="in the second forward"):
        fit(mlp(), vectors(24, 4), strategy=Pinned((0, 2), 2, recompute=True))


@pytest.mark.parametrize("in_flight", [1, 2])
def test_with_one_stage_it_is_said_to_change_nothing(in_flight: int) -> None:
    with pytest.warns(UserWarning, match=r"recompute=True changes nothing where one stage holds the whole model"):
        fit(mlp(), vectors(22, 4), strategy=Pinned((0,), in_flight, recompute=True), max_epochs=1)
