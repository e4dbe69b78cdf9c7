"""A captured module that members of a group compute together, beside the module itself."""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.capture.captured import Captured
from lightning_hetpipe.capture.effects import FrozenValues
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.pipeline.split.member_pool import DeviceGroup, MemberPool
from lightning_hetpipe.pipeline.split.split_segment import SplitSegment
from lightning_hetpipe.rules.channel_layouts import ChannelCounts

CPU = torch.device("cpu")


class Whole:
    """``module`` in float64, captured for ``args``."""

    def __init__(self, module: nn.Module, *args: Tensor) -> None:
        self.module = module.double()
        self.args = [_double(each) for each in args]
        self.captured = Captured("net", module, tuple(self.args), {}, FrozenValues(module))


class Divided:
    """Results of ``whole``, and of the members of ``pool``."""

    def __init__(self, whole: Whole, pool: MemberPool) -> None:
        self.module, self.args, self._captured = whole.module, whole.args, whole.captured
        layers = self._captured.layers
        self.segment = SplitSegment(layers, [layer.module for layer in layers], pool)

    def whole(self, value: Any) -> Any:
        """As layers compute it one after the other."""
        for layer in self._captured.layers:
            value = layer.module(value)
        return value

    def apart(self, value: Any) -> Any:
        """As members compute it."""
        return self.segment(value, contextlib.nullcontext)

    def results(self, compute: Callable[[Any], Any]) -> dict[str, Any]:
        """The output, the gradients and the buffers of one pass, which leaves the module as it was."""
        state = copy.deepcopy(self.module.state_dict())
        self.module.zero_grad()
        args = [_leaf(each) for each in self.args]
        with RandomGenerators(3).minibatch(5):
            output = compute(self._captured.value(tuple(args), {}))
        chance = torch.Generator().manual_seed(4)
        weight = torch.randn(output.shape, generator=chance, dtype=output.dtype)
        (output * weight).sum().backward()
        found = {
            "output": output.detach(),
            "inputs": [each.grad for each in args],
            "gradients": {name: each.grad for name, each in self.module.named_parameters()},
            "buffers": {name: each.clone() for name, each in self.module.named_buffers()},
        }
        self.module.load_state_dict(state)
        return found

    @property
    def regions(self) -> list[str]:
        """The operators of each region, as its first member that has any computes them."""
        ((_, _, calls),) = self.segment._variants.values()
        found = []
        for call in calls:
            graph = next(
                graph for graph in call.region.graphs if any(n.op == "call_function" for n in graph.graph.nodes)
            )
            names = [_name(node.target) for node in graph.graph.nodes]
            found.append(" ".join(name for name in names if not name.startswith("input_") and name != "output"))
        return found


@contextlib.contextmanager
def divided(
    whole: Whole,
    shares: Sequence[float] = (3, 1),
    counts: Mapping[str, tuple[int, ...]] | None = None,
    home: int = 0,
) -> Iterator[Divided]:
    """``whole`` divided by ``shares``, or as ``counts`` say of layers of "net"."""
    group = DeviceGroup([CPU] * len(shares), ChannelCounts(shares, counts or {}), home)
    with started(MemberPool("hetpipe-stage-0", group, 1)) as pool:
        yield Divided(whole, pool)
    assert pool.join(10)


@contextlib.contextmanager
def started(pool: MemberPool) -> Iterator[MemberPool]:
    pool.start()
    try:
        yield pool
    finally:
        pool.close()


def assert_divided(whole: Whole, **settings: Any) -> list[str]:
    """Members compute what ``whole`` does, up to rounding; gives the operators of each region."""
    with divided(whole, **settings) as both:
        expected, apart = both.results(both.whole), both.results(both.apart)
        torch.testing.assert_close(apart, expected, rtol=1e-9, atol=1e-10)
        again = both.results(both.apart)
        assert torch.equal(again["output"], apart["output"])
        return both.regions


def _name(target: Any) -> str:
    return "getitem" if target is operator.getitem else str(target).removeprefix("aten.").partition(".")[0]


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())
