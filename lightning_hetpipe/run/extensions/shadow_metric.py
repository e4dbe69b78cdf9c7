"""Shadow metrics: copies of torchmetrics objects that answer ahead of time.

While a ``training_step`` runs ahead of Lightning's loop, a call such as ``self.acc(preds, target)`` goes to the
*shadow* of ``self.acc``: a copy that is ahead of it by exactly the calls that wait for their replay. So batch values,
and values of ``compute()``, are those of a plain run; the metric itself stays at Lightning's step and is called there.

What it costs: the tensors passed are cloned and kept until their step, each call runs twice, and the states exist twice
(a list state's elements too, unless the metric appends its arguments as they are). A ``compute()`` in
``training_step`` is compared at its step with what the metric itself says, which waits for the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hetpipe.accelerator import accelerates, default_generators
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.run.extensions.recorded_calls import READS, MetricCall
from lightning_hetpipe.torch_private.tensors import pytree
from lightning_hetpipe.workers.shared_metrics import is_shared


class ShadowMetric:
    """A copy of metrics that belong together (sharing members), ahead of them by the calls that wait for replay."""

    def __init__(self, modules: dict[int, nn.Module]) -> None:
        self._modules = modules
        self._copies: dict[int, nn.Module] | None = None
        self._generators = [torch.default_generator]
        devices = {module.device for module in modules.values() if isinstance(module, Metric)}
        used = sorted({device.index or 0 for device in devices if accelerates(device)})
        self._generators += [default_generators()[index] for index in used]

    def drop(self) -> None:
        """Forgets the copy: the metrics were changed otherwise than by replay. The next call makes a new one."""
        self._copies = None

    def call(self, call: MetricCall, live: tuple[Any, Any], pending: Iterable[MetricCall]) -> Any:
        """Makes ``call`` on the copy, with the ``live`` arguments (which may require grad); returns its value."""
        self._refuse_synchronisation(call)
        if self._copies is None:
            self._copies = self._copy()
            for earlier in pending:
                if id(earlier.metric) in self._modules:
                    self._apply(earlier, (earlier.args, earlier.kwargs), earlier.draws)
        before = [generator.get_state() for generator in self._generators]
        try:
            value = self._apply(call, live, None)
        except BaseException:
            self.drop()
            raise
        if any(not torch.equal(state, gen.get_state()) for state, gen in zip(before, self._generators, strict=True)):
            call.draws = before
        if call.method in READS:
            call.answer = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)
        return value

    def with_draws(self, draws: list[Tensor] | None, function: Callable[[], Any]) -> Any:
        """``function()``, with the random numbers that were drawn ahead of time; the generators stay where they are."""
        if draws is None:
            return function()
        now = [generator.get_state() for generator in self._generators]
        self._set_generators(draws)
        try:
            return function()
        finally:
            self._set_generators(now)

    def _set_generators(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _apply(self, call: MetricCall, arguments: tuple[Any, Any], draws: list[Tensor] | None) -> Any:
        assert self._copies is not None
        method = getattr(self._copies[id(call.metric)], call.method)
        args, kwargs = arguments
        value = self.with_draws(draws, lambda: method(*args, **kwargs))
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves((arguments, value))):
            for module in self._copies.values():
                _cut_graphs(module)
        return value

    def _copy(self) -> dict[int, nn.Module]:
        memo: dict[int, Any] = {}
        for module in self._modules.values():
            memo.update(_copied_otherwise(module))
        copy.deepcopy(list(self._modules.values()), memo)
        return {key: memo[key] for key in self._modules}

    def _refuse_synchronisation(self, call: MetricCall) -> None:
        for metric in self._modules.values():
            if not isinstance(metric, Metric):
                continue
            reads = call.method in READS and metric.sync_on_compute
            if (reads or metric.dist_sync_on_step) and is_shared(metric):
                raise SettingError(
                    f"{type(metric).__name__}.{call.method}() in training_step would synchronise virtual workers ahead "
                    "of Lightning's loop; log the metric object itself (self.log(name, metric)), make it with "
                    "sync_on_compute=False and dist_sync_on_step=False, or set in_flight=1"
                )


def _copied_otherwise(module: nn.Module) -> Iterator[tuple[int, Tensor]]:
    """Tensors that a deep copy should not clone, by ``id``, with what to take instead.

    Parameters (of a metric's own frozen network) and the elements of list states are never changed in place, so they
    are shared. A tensor that hangs on an autograd graph cannot be deep-copied, so it is cloned without its graph.
    """
    for leaf in pytree.tree_leaves(list(vars(module).values())):
        if isinstance(leaf, nn.Parameter):
            yield id(leaf), leaf
        elif isinstance(leaf, Tensor) and _has_graph(leaf):
            yield id(leaf), leaf.detach().clone()
    if isinstance(module, Metric):
        for state in module.metric_state.values():
            if isinstance(state, list):
                yield from ((id(item), item.detach()) for item in state if isinstance(item, Tensor))


def _cut_graphs(module: nn.Module) -> None:
    """Detaches what a call left in ``module``, so that a copy does not keep a minibatch's graph alive."""
    for name, value in list(vars(module).items()):
        if isinstance(value, list):
            # A list state grows at its end, and may be long: what comes before was cut after earlier calls.
            for index in range(len(value) - 1, -1, -1):
                if not _has_graph(value[index]):
                    break
                value[index] = value[index].detach()
        elif isinstance(value, (Tensor, tuple, dict)) and any(map(_has_graph, pytree.tree_leaves(value))):
            vars(module)[name] = pytree.tree_map_only(Tensor, Tensor.detach, value)


def _has_graph(value: object) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None
