"""Law L7: what a layer draws depends on the run, the virtual worker, the minibatch and the operation's name only."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_hetpipe.pipeline.random.generators import RandomGenerators, attach
from lightning_hetpipe.pipeline.random.operators import RandomnessError
from tests.pipeline.drawing import Block, Run, draw

CPU = torch.device("cpu")


def test_the_seed_is_the_run_the_worker_the_minibatch_and_the_operations_name() -> None:
    def seed(run: int, worker: int, minibatch: int, path: str, ordinal: int) -> int:
        return RandomGenerators(run, worker).generator(minibatch, path, ordinal, CPU).initial_seed()

    base = (7, 0, 3, "net.1", 0)
    others = [(8, 0, 3, "net.1", 0), (7, 1, 3, "net.1", 0), (7, 0, 4, "net.1", 0), (7, 0, 3, "net.11", 0)]
    others += [(7, 0, 3, "net.1", 1), (7, 0, 3, "net.1.dropout", 0), (70, 3, 0, "net.1", 0), (-7, 0, 3, "net.1", 0)]
    seeds = [seed(*base), *(seed(*other) for other in others)]
    assert seed(*base) == seed(*base)
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= value < 2**63 for value in seeds)


def test_calls_of_one_minibatch_draw_by_themselves() -> None:
    chance, dropout = RandomGenerators(7), attach(nn.Dropout(0.5), "net")
    drawn = []
    for call in (0, 1, 2, 0):
        with chance.minibatch(1, call):
            drawn.append(dropout(torch.ones(64)))
    assert torch.equal(drawn[0], drawn[3])
    assert not any(torch.equal(one, drawn[0]) for one in drawn[1:3])
    assert not torch.equal(drawn[1], drawn[2])
    expected = torch.empty(64).bernoulli_(0.5, generator=chance.generator(1, "net", 0, CPU, call=1)) * 2
    assert torch.equal(drawn[1], expected)


def test_every_draw_is_the_one_of_its_name() -> None:
    chance = RandomGenerators(7)
    layer = Run(lambda dropout, x: (dropout(x), torch.rand(3), dropout(x), torch.rand(3)), nn.Dropout(0.5))
    got = draw(layer, 4, torch.ones(8), chance=chance, path="net.2")

    def mask(ordinal: int) -> Tensor:
        return torch.empty(8).bernoulli_(0.5, generator=chance.generator(4, "net.2.inner.0", ordinal, CPU)) * 2

    own = [torch.rand(3, generator=chance.generator(4, "net.2", ordinal, CPU)) for ordinal in (0, 1)]
    for value, expected in zip(got, [mask(0), own[0], mask(1), own[1]], strict=True):
        assert torch.equal(value, expected)


def test_threads_and_their_order_do_not_matter() -> None:
    replicas = [attach(copy.deepcopy(layer), "net.0") for layer in [Block()] * 4]
    x = torch.ones(64, 16)
    chance = RandomGenerators(7)

    def run(minibatch: int) -> Tensor:
        with chance.minibatch(minibatch):
            result = replicas[minibatch % 4](x)
        assert isinstance(result, Tensor)
        return result

    expected = {p: run(p) for p in range(16)}
    before = torch.get_rng_state()
    together = threading.Barrier(4)

    def of_thread(thread: int) -> dict[int, Tensor]:
        together.wait(60)
        return {p: run(p) for p in reversed(range(thread, 16, 4))}

    with ThreadPoolExecutor(4) as threads:
        for results in threads.map(of_thread, range(4)):
            for p, result in results.items():
                assert torch.equal(result, expected[p])
    assert torch.equal(before, torch.get_rng_state())


def test_interleaved_threads_leave_no_mode_behind() -> None:
    """torch's own modes keep process-wide flags, which threads that leave in another order than they came set wrong."""
    inside, other_left = threading.Event(), threading.Event()
    chance = RandomGenerators(7)

    def wait() -> None:
        inside.set()
        assert other_left.wait(60)

    def first() -> None:
        with chance.minibatch(1):
            attach(Run(wait), "net.0")()

    def second() -> None:
        other_left.set()

    thread = threading.Thread(target=first, name="first")
    with chance.minibatch(2):

        def start() -> None:
            thread.start()
            assert inside.wait(60)

        attach(Run(start), "net.1")()
    second()
    thread.join(60)
    assert not thread.is_alive()
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()


def test_gradients_are_those_of_the_mask_that_was_drawn() -> None:
    chance = RandomGenerators(7)
    for layer in (nn.Dropout(0.25), Run(lambda x: torch.native_dropout(x, 0.25, True)[0])):
        x = torch.randn(32, 16, requires_grad=True)
        draw(layer, 1, x, chance=chance).square().sum().backward()
        scale = torch.empty(32, 16).bernoulli_(0.75, generator=chance.generator(1, "net.0", 0, CPU)) / 0.75
        torch.testing.assert_close(x.grad, 2 * x.detach() * scale**2)


def test_a_backward_pass_draws_nothing() -> None:
    run = attach(nn.Sequential(nn.Linear(16, 16), nn.RReLU(), nn.Dropout(0.5)), "net.0")
    with RandomGenerators(7).minibatch(1):
        loss = run(torch.ones(4, 16)).sum()
    before = torch.get_rng_state()
    loss.backward()
    assert torch.equal(before, torch.get_rng_state())


def test_a_cut_does_not_change_what_a_shared_module_draws() -> None:
    shared = nn.Dropout(0.5)
    net = nn.Sequential(shared, nn.Linear(16, 16), shared, Block())
    x, chance = torch.ones(8, 16), RandomGenerators(7)

    def run(*stages: slice) -> Tensor:
        value = x
        for stage in stages:
            layers = copy.deepcopy(list(net)[stage])  # a stage's copy: what a cut separates is not shared any more
            runs = [attach(layer, f"net.{i}") for i, layer in zip(range(4)[stage], layers, strict=True)]
            with chance.minibatch(3):
                for layer in runs:
                    value = layer(value)
        return value

    whole = run(slice(0, 4))
    assert torch.equal(whole, run(slice(0, 2), slice(2, 4)))
    assert torch.equal(whole, run(slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 4)))
    with chance.watch({f"net.{i}": layer for i, layer in enumerate(net)}, 3) as layers:
        value = x
        for i in range(4):
            value = layers[f"net.{i}"](value)
    assert torch.equal(whole, value)


def test_a_shared_module_outside_its_layers_has_no_name() -> None:
    shared = nn.Dropout(0.5)
    attach(shared, "net.0")
    attach(shared, "net.2")
    with RandomGenerators(7).minibatch(1), pytest.raises(RandomnessError, match=r"net\.0, net\.2"):
        shared(torch.ones(4))


def test_a_watched_minibatch_draws_like_a_replica_and_leaves_no_trace() -> None:
    shared = nn.Linear(16, 16)
    live = nn.Sequential(Run(lambda linear, x: linear(x), shared), Block(), Run(lambda linear, x: linear(x), shared))
    live.append(nn.LSTM(16, 8, num_layers=2, dropout=0.5))
    replaced = nn.Dropout(0.5)
    vars(replaced)["forward"] = user_forward = torch.relu
    live[1].add_module("replaced", replaced)
    layers = {f"net.{i}": layer for i, layer in enumerate(live)}
    kept = [dict(vars(module)) for module in live.modules()]
    state = copy.deepcopy(live.state_dict())
    x, chance = torch.ones(8, 16), RandomGenerators(7)

    def chain(run: dict[str, Callable[..., Any]]) -> Tensor:
        value: Any = x
        for path in layers:
            value = run[path](value)
        assert isinstance(value[0], Tensor)
        return value[0]

    replicas = {path: attach(layer, path) for path, layer in copy.deepcopy(layers).items()}
    with chance.minibatch(5):
        expected = chain(replicas)
    with chance.watch(layers, 5) as run:
        assert torch.equal(chain(run), expected)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), chance.watch(layers, 6) as run:
        run["net.0"](torch.ones(8, 3))

    assert [dict(vars(module)) for module in live.modules()] == kept
    assert vars(replaced)["forward"] is user_forward
    assert all(torch.equal(value, state[name]) for name, value in live.state_dict().items())
    again = pickle.loads(pickle.dumps(live[3]))
    assert type(again.forward).__name__ == "method"


def test_what_runs_outside_the_layers_keeps_the_default_generator() -> None:
    layer = Block()
    torch.manual_seed(3)
    expected = torch.rand(4), torch.rand(4)
    torch.manual_seed(3)
    with RandomGenerators(7).watch({"net.0": layer}, 1) as run:
        first = torch.rand(4)
        run["net.0"](torch.ones(2, 16))
        second = torch.rand(4)
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[1])


def test_an_exception_in_a_layer_ends_its_draws() -> None:
    def fail(dropout: nn.Module, linear: nn.Module, x: Tensor) -> Any:
        return linear(dropout(x))  # the wrong width: raises inside torch

    layer = Run(fail, nn.Dropout(0.5), nn.Linear(3, 3))
    run = attach(layer, "net.0")
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with RandomGenerators(7).minibatch(1):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            run(torch.ones(2, 16))
        assert torch.equal(torch.rand(4), expected)


def test_an_attached_module_can_be_copied() -> None:
    layer = Block()
    attach(layer, "net.0")
    twin = copy.deepcopy(layer)
    nn.init.zeros_(layer.linear.weight)
    x = torch.ones(2, 16)
    results = []
    for module in (layer, twin):
        with RandomGenerators(7).minibatch(1):
            results.append(module(x))
    assert not torch.equal(*results), "the copy ran the original's weights"
    assert list(layer.state_dict()) == ["linear.weight", "linear.bias"]


def test_without_a_minibatch_an_attached_module_is_as_before() -> None:
    layer = Block()
    torch.manual_seed(3)
    expected = layer(torch.ones(2, 16))
    run = attach(layer, "net.0")
    torch.manual_seed(3)
    assert torch.equal(run(torch.ones(2, 16)), expected)


def test_torchs_own_deterministic_layers_are_not_touched() -> None:
    layer = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
    assert attach(layer, "net.0") is layer
    assert all("forward" not in vars(module) for module in layer.modules())


def test_a_draw_that_depends_on_the_data_is_caught_too() -> None:
    layer = Run(lambda x: F.dropout(x, 0.5) if x.sum() > 0 else x)
    run, chance = attach(layer, "net.0"), RandomGenerators(7)
    with chance.watch({"net.0": copy.deepcopy(layer)}, 1) as watched:
        watched["net.0"](torch.zeros(4))
    before = torch.get_rng_state()
    with chance.minibatch(2):
        run(torch.ones(4))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_under_activation_checkpointing_is_refused(reentrant: bool) -> None:
    layer = Run(lambda dropout, x: checkpoint(dropout, x, use_reentrant=reentrant), nn.Dropout(0.5))
    with pytest.raises(RandomnessError, match=r"'net\.0\.inner\.0'.*checkpoint"):
        draw(layer, 1, torch.ones(4, requires_grad=True))
