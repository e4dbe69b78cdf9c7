"""Layers that torch.compile has compiled: with a backend that keeps torch's own operators nothing changes by a bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.data import DataLoader

from lightning_hetpipe.torch_private.graphs import cpp_compiler_error
from tests.exact.pipelines import Pinned, delayed, even
from tests.exact.running import Record, assert_equal, assert_same_run, expect, fit
from tests.exact.test_captured import CASES, made
from tests.oracle import Noise
from tests.support.models import ADAMW, CLASSES, MODELS, SGD, Learner, Pieces, Task, vectors

SLOW = [("mlp", 2, 3), ("resnet", 3, 4), ("transformer", 2, 3), ("transformer", 3, 4), ("mlp", 1, 1), ("resnet", 1, 3)]
LAYERS = {model: len(list(make(SGD).net.children())) for model, (make, _) in MODELS.items()}


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Torch keeps for the whole process what it has compiled."""
    yield
    torch.compiler.reset()


def check(task: Learner, loader: Any, strategy: Pinned, **options: Any) -> Record:
    """Equal to the oracle, whose layers are not compiled."""
    seed = torch.initial_seed()
    assert isinstance(strategy.in_flight, int)
    expected = expect(task, loader, strategy.in_flight, **options)
    torch.manual_seed(seed)
    record = fit(task, loader, strategy=strategy, precision="bf16-mixed" if "autocast" in options else None)
    assert_equal(expected, record)
    return record


@pytest.mark.parametrize(
    ("model", "stages", "in_flight", "samples"),
    [("mlp", 2, 3, 15), *(pytest.param(*case, 26, marks=pytest.mark.slow) for case in SLOW)],
)
@pytest.mark.filterwarnings("error:torch.compile cannot compile")
def test_sequentials(model: str, stages: int, in_flight: int, samples: int) -> None:
    """With dropout, BatchNorm, attention, in-place layers and predicted weights; of 26 samples the last batch is of
    another shape."""
    make_task, make_loader = MODELS[model]
    strategy = even(LAYERS[model], stages, in_flight, compile="aot_eager", weights="xpipe")
    check(make_task(ADAMW), make_loader(samples, 3), strategy, weights="xpipe")


# In the translator a value both passes through a stage and is read there twice: compiled, its gradients are added in
# another order. In the autoencoder and its kin, layers draw more than dropout; "noise between" is user code.
EXACT = [name for name in CASES if name not in ("translator", "vae", "noise between")]


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.filterwarnings("error:torch.compile cannot compile")
def test_captured_models(name: str, in_flight: int) -> None:
    _, loader, layers = CASES[name]
    check(made(name), loader, even(layers, min(3, layers), in_flight, compile="aot_eager"))


@pytest.mark.slow
def test_sums_of_gradients_repeat() -> None:
    """The translator's are not the oracle's, but the same whenever they are computed."""
    _, loader, layers = CASES["translator"]
    records = []
    for seed in range(2):
        torch.manual_seed(1)
        strategy = delayed(even(layers, 3, 4, compile="aot_eager"), seed)
        records.append(fit(made("translator"), loader, strategy=strategy))
    assert_same_run(*records)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_recomputed(model: str) -> None:
    make_task, make_loader = MODELS[model]
    strategy = even(LAYERS[model], 3, 4, compile="aot_eager", recompute=True)
    check(make_task(ADAMW), make_loader(26, 3), strategy)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "dropout", "resnet"])
def test_mixed_precision(name: str) -> None:
    _, loader, layers = CASES[name]
    check(made(name), loader, even(layers, 3, 4, compile="aot_eager"), autocast=torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
@pytest.mark.parametrize("model", MODELS)
def test_other_default_dtypes(model: str, precision: Any) -> None:
    """User code changes the process's default dtype while stages run: their code must neither follow nor be redone."""
    make_task, make_loader = MODELS[model]
    records = []
    for compiled in (False, "aot_eager"):
        torch.manual_seed(1)
        strategy = even(LAYERS[model], 2, 3, compile=compiled)
        records.append(fit(make_task(ADAMW), make_loader(26, 3), strategy=strategy, precision=precision))
    assert_same_run(*records)


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [1, 4])
def test_pieces(in_flight: int) -> None:
    check(Pieces(), vectors(18, 4), even(8, 3, in_flight, compile="aot_eager"))


def test_what_the_user_has_compiled_is_compiled_by_stages() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    net.compile(backend="eager")
    with pytest.warns(UserWarning, match="'net' is compiled .* stages compile its layers themselves"):
        fit(Task(net), vectors(16, 4), strategy=Pinned((0, 2), 2, compile="eager"), max_epochs=1)


class Backend:
    """Counts what it compiles, and calls ``meanwhile`` each time."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.graphs = 0
        self._meanwhile = meanwhile

    def __call__(self, graph: fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        self._meanwhile()
        return graph.forward


def drawing() -> Task:
    """With dropout of a layer's own, and of a user's module, which draws twice by one."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.drop(torch.tanh(self.drop(x)))
            return y

    return Task(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), Twice(), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)))


def test_each_stage_is_compiled_once_for_all_versions() -> None:
    """And once more for all other numbers of samples."""
    backend = Backend()
    check(drawing(), vectors(18, 4), Pinned((0, 2), 5, compile={"backend": backend}))
    assert backend.graphs == 2 * 2


def test_while_one_compiles_nothing_else_runs() -> None:
    """Torch's compiler restores random state and more of the process, and other code computes otherwise meanwhile."""
    seen: list[tuple[bool, bool]] = []

    def look() -> None:
        engine: Any = strategy._run.pipeline
        alone = (
            engine.compute_lock._writer == threading.get_ident() and engine.compute_lock._readers == 1
        )  # this stage's own
        running = any(flight.in_user_code for flight in engine.minibatches.values())
        seen.append((alone and engine.lock.held, running))

    strategy = Pinned((0, 2, 3), 4, compile={"backend": Backend(look)})
    check(drawing(), vectors(16, 4), delayed(strategy, 0))
    assert seen == [(True, False)] * len(seen)
    assert len(seen) >= 3


def test_a_compilation_is_no_stall() -> None:
    """It takes minutes for a large model; the others wait for longer than `timeout`."""

    def take_long() -> None:
        threading.Event().wait(0.5)

    strategy = Pinned((0, 2), 3, compile={"backend": Backend(take_long)}, timeout=0.3)
    check(drawing(), vectors(16, 4), strategy)


def test_a_layer_that_cannot_be_compiled_runs_as_it_is() -> None:
    """It draws numbers that are no dropout: they are its own nevertheless, and its neighbours are compiled."""
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Added(), nn.Linear(8, 8), nn.Linear(8, CLASSES))
    backend = Backend()
    with pytest.warns(UserWarning, match=r"cannot compile layer net\.2, .* uncompiled: .* no dropout"):
        check(Task(net), vectors(16, 4), Pinned((0, 4), 3, compile={"backend": backend}))
    # Once each where the culprit is sought, then what is before it and what is behind, and the other stage's.
    assert backend.graphs == 3 + 2 + 1


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.noise = Noise()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.noise(x)
        return y


def test_an_error_of_a_layer_comes_through() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 2:
                raise ArithmeticError("two are too few")
            return -x if x.isnan().any() else x  # so that the net has no graph, and stages run this code

    net = nn.Sequential(nn.Linear(6, 8), Fails(), nn.Linear(8, CLASSES))
    with pytest.raises(ArithmeticError, match="two are too few"):
        fit(Task(net), vectors(18, 4), strategy=Pinned((0, 2), 2, compile="eager"))


@pytest.mark.slow
def test_kinds_of_inputs_beyond_torchs_limit_run_uncompiled() -> None:
    """It keeps eight, and with dynamic=False each number of samples is one."""
    data: Any = [(torch.randn(count, 6), torch.randint(CLASSES, (count,))) for count in range(1, 13)]
    loader: Any = DataLoader(data, batch_size=None)
    strategy = Pinned((0, 2), 2, compile={"backend": "eager", "dynamic": False})
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, CLASSES))
    with pytest.warns(UserWarning, match="too many kinds"):
        check(Task(net), loader, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_inductor(name: str) -> None:
    """It computes in other roundings, and always in the same."""
    if (reason := cpp_compiler_error()) is not None:
        pytest.skip(f"torch's inductor needs a C++ compiler: {reason}")
    make_task, make_loader = MODELS[name]
    records, before = [], children()
    for compiled, seed in ((False, 0), (True, 1), (True, 2)):
        torch.manual_seed(1)
        strategy = delayed(even(LAYERS[name], 3, 4, compile=compiled), seed)
        records.append(fit(make_task(ADAMW), make_loader(26, 3), strategy=strategy))
    assert children() == before, "inductor's workers"
    plain, one, other = records
    assert_same_run(one, other)
    for expected, found in zip(plain.outputs, one.outputs, strict=True):
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-3, atol=1e-4)


def children() -> set[str]:
    """The processes that this one has started, where the system says it."""
    return {number for path in Path("/proc/self/task").glob("*/children") for number in path.read_text().split()}
