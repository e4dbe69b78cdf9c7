"""Replay: logs and counts of a ``training_step`` that runs ahead take effect at its own step (law L9).

With more than one minibatch in flight, ``training_step(p)`` runs up to Nm - 1 minibatches before Lightning's loop
reaches minibatch p. Callbacks, loggers and checkpoints must nevertheless see step p. So the thread that runs ahead
records ``self.log``, ``self.log_dict`` and the calls of torchmetrics objects, in order. Lightning's thread makes them
at p.

Covered are metrics, collections, wrappers and trackers that are submodules of the LightningModule, at any depth.
Covered are also metrics in lists, tuples, sets and dicts among the attributes of its submodules. A metric that only a
global variable or another object holds is called at once. Its values are right, but code that reads it within an epoch
finds it up to Nm - 1 minibatches ahead. Attributes of a metric (its states, ``update_count``) show Lightning's step to
``training_step``.

A *shadow metric* answers ahead of time: a copy of a torchmetrics object that is ahead of it by exactly the calls that
wait for their replay. A call such as ``self.acc(preds, target)`` in a ``training_step`` that runs ahead goes to the
shadow of ``self.acc``. So batch values, and values of ``compute()``, equal those of a plain run.

The cost: tensors that are passed are cloned and kept until their step, and each call runs twice. The states exist twice
(a list state's elements too, unless the metric appends its arguments as they are). The answer of ``compute()`` is
compared at its step with the metric's own answer, which waits for the device.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MetricTracker

from lightning_hetpipe.accelerator import accelerates, default_generators
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.threads import PerThread
from lightning_hetpipe.pipeline.user.minibatch import Minibatch
from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.run.lifecycle import Around, Extension
from lightning_hetpipe.torch_private.modules import children
from lightning_hetpipe.torch_private.tensors import pytree
from lightning_hetpipe.workers.collectives import is_shared

_NOT_THE_USER = (
    *("lightning_hetpipe.run.", "lightning_hetpipe.redirect", "lightning_hetpipe.pipeline."),
    *("lightning.", "torch.", "torchmetrics."),
)

READS = ("compute", "compute_all", "best_metric")
CHANGES = ("forward", "update", "reset", "merge_state", "increment", "reset_all")


class Replay(Extension):
    """A recorder of the logs and counts of the user's step on ``module``. It makes the calls at their step, in
    ``context``. Until it is closed, it replaces methods in ``module``. User code must not be concurrent, and
    minibatches begin in order."""

    def __init__(self, module: L.LightningModule, context: Callable[[], Around] = nullcontext) -> None:
        self._module = module
        self._context = context
        self._records: dict[int, Record] = {}  # of minibatches in flight, in their order
        self._replaying: PerThread[bool] = PerThread()
        self._record: PerThread[Record] = PerThread()
        self._log = {name: Redirect(module, name, self._on_log) for name in ("log", "log_dict")}
        self._signatures = {name: inspect.signature(redirect.original) for name, redirect in self._log.items()}
        self._metrics: list[Redirect] = []
        self._shadows: dict[int, ShadowMetric] = {}  # by id of the metric
        self._find_metrics()

    @contextmanager
    def user_step(self, minibatch: int) -> Iterator[None]:
        """Context manager in which logs and counts of this thread are recorded."""
        if self._children != child_ids(self._module):
            self._find_metrics()  # a hook has replaced a metric
        record = self._records[minibatch] = deque()
        try:
            with self._record.holding(record):
                yield
        except BaseException:
            self._records.pop(minibatch, None)
            self._drop_shadows()
            raise

    def finished(self, minibatch: Minibatch, args: Sequence[Any]) -> None:
        """Make the recorded calls. Their errors get a note with the line of ``training_step`` that made the call."""
        try:
            with self._context():
                self._make_all(self._records[minibatch.number])
        finally:
            del self._records[minibatch.number]

    def discarded(self) -> None:
        if self._records:
            self._records.clear()
            self._drop_shadows()

    def closed(self) -> None:
        """Put the replaced methods back, and drop recorded calls that were not replayed."""
        self._remove_metrics()
        for redirect in self._log.values():
            redirect.remove()
        self._records.clear()

    def _drop_shadows(self) -> None:
        for shadow in self._shadows.values():
            shadow.drop()

    def _make_all(self, record: Record) -> None:
        while record:
            call = record.popleft()
            try:
                with self._replaying.holding(True):
                    self._make(call)
            except Exception as error:
                error.add_note(call.where)
                raise

    def _make(self, call: RecordedCall) -> None:
        owner, name = call.redirect.owner, call.redirect.name
        shadow = self._shadows.get(id(owner))
        with nullcontext() if shadow is None else shadow.drawing(call.draws):
            answer = getattr(owner, name)(*call.args, **call.kwargs)
        if name in READS and not _same(answer, call.answer):
            raise SettingError(
                f"training_step read {type(owner).__name__}.{name}() ahead of time, but the metric was changed"
                " outside training_step before that step; log the metric object itself (self.log(name, metric)), or set"
                " in_flight=1"
            )

    def _find_metrics(self) -> None:
        self._remove_metrics()
        owners = [call.redirect.owner for record in self._records.values() for call in record]
        metrics = {id(each): each for each in (*find_metrics(self._module), *filter(is_metric, owners))}
        for members in group(metrics.values()):
            shadow = ShadowMetric(members)
            self._shadows.update(dict.fromkeys(members, shadow))
        self._metrics = [
            Redirect(metric, method, self._on_metric)
            for metric in metrics.values()
            for method in (*CHANGES, *READS)
            if hasattr(metric, method)
        ]
        self._children = child_ids(self._module)

    def _remove_metrics(self) -> None:
        for redirect in self._metrics:
            redirect.remove()
        self._metrics, self._shadows = [], {}

    def _on_log(self, redirect: Redirect, *args: Any, **kwargs: Any) -> None:
        record = self._record.get()
        if record is None:
            redirect.original(*args, **kwargs)
            return
        arguments = self._signatures[redirect.name].bind(*args, **kwargs).arguments  # TypeError at the user's line
        for value in pytree.tree_leaves(arguments):
            if is_metric(value) and id(value) not in self._shadows:
                raise SettingError(
                    f"self.{redirect.name} was given a {type(value).__name__} that was not among the module's metrics "
                    "when this minibatch began, so its updates were not recorded; make it in __init__ or "
                    "configure_model, or set in_flight=1"
                )
        kept_args, kept_kwargs = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs))
        record.append(RecordedCall(redirect, kept_args, kept_kwargs, caller()))

    def _on_metric(self, redirect: Redirect, *args: Any, **kwargs: Any) -> Any:
        record, shadow = self._record.get(), self._shadows[id(redirect.owner)]
        if record is None:
            if redirect.name in CHANGES and not self._replaying.get():
                shadow.drop()
            return redirect.original(*args, **kwargs)
        # One clone serves both: with its graph for the value returned now, without it for the replay.
        live = pytree.tree_map_only(Tensor, Tensor.clone, (args, kwargs))
        kept_args, kept_kwargs = pytree.tree_map_only(Tensor, Tensor.detach, live)
        call = RecordedCall(redirect, kept_args, kept_kwargs, caller())
        value = shadow.call(call, live, (earlier for record in self._records.values() for earlier in record))
        record.append(call)
        return value


@dataclass(eq=False)
class RecordedCall:
    """A call, made ahead of its step, of a metric's method, ``self.log`` or ``self.log_dict``.

    Attributes:
        redirect: Replaces the method.
        args, kwargs: The caller's arguments, detached and cloned.
        where: The line of the user's code.
        draws: The generators' states before the call, if it drew random numbers.
        answer: The value that a reading method gave the caller.
    """

    redirect: Redirect
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    where: str
    draws: list[Tensor] | None = None
    answer: Any = field(default=None, repr=False)


Record = deque[RecordedCall]
"""The calls of one minibatch's ``training_step`` that wait for their step, in order."""


class ShadowMetric:
    """A copy of metrics that share members, ahead of them by the calls that wait for replay."""

    def __init__(self, modules: dict[int, nn.Module]) -> None:
        self._modules = modules
        self._copies: dict[int, nn.Module] | None = None
        self._generators = [torch.default_generator]
        devices = {module.device for module in modules.values() if isinstance(module, Metric)}
        used = sorted({device.index or 0 for device in devices if accelerates(device)})
        self._generators += [default_generators()[index] for index in used]

    def drop(self) -> None:
        """Forget the copy, because the metrics were changed other than by replay. The next call makes a new copy."""
        self._copies = None

    def call(self, call: RecordedCall, live: tuple[Any, Any], pending: Iterable[RecordedCall]) -> Any:
        """Make ``call`` on the copy, with the ``live`` arguments (which may require grad), and return its value."""
        self._refuse_synchronisation(call)
        if self._copies is None:
            self._copies = self._copy()
            for earlier in pending:
                if id(earlier.redirect.owner) in self._modules:
                    self._apply(earlier, (earlier.args, earlier.kwargs), earlier.draws)
        before = [generator.get_state() for generator in self._generators]
        try:
            value = self._apply(call, live, None)
        except BaseException:
            self.drop()
            raise
        if any(not torch.equal(state, gen.get_state()) for state, gen in zip(before, self._generators, strict=True)):
            call.draws = before
        if call.redirect.name in READS:
            call.answer = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)
        return value

    @contextmanager
    def drawing(self, draws: list[Tensor] | None) -> Iterator[None]:
        """Context manager in which numbers that were drawn ahead of time are drawn again, while the generators stay."""
        with ExitStack() as stack:
            for generator, state in zip(self._generators, draws or (), strict=False):
                stack.callback(generator.set_state, generator.get_state())
                generator.set_state(state)
            yield

    def _apply(self, call: RecordedCall, arguments: tuple[Any, Any], draws: list[Tensor] | None) -> Any:
        assert self._copies is not None
        method = getattr(self._copies[id(call.redirect.owner)], call.redirect.name)
        args, kwargs = arguments
        with self.drawing(draws):
            value = method(*args, **kwargs)
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

    def _refuse_synchronisation(self, call: RecordedCall) -> None:
        for metric in self._modules.values():
            if not isinstance(metric, Metric):
                continue
            reads = call.redirect.name in READS and metric.sync_on_compute
            if (reads or metric.dist_sync_on_step) and is_shared(metric):
                raise SettingError(
                    f"{type(metric).__name__}.{call.redirect.name}() in training_step would synchronise virtual workers"
                    " ahead of Lightning's loop; log the metric object itself (self.log(name, metric)), make it with "
                    "sync_on_compute=False and dist_sync_on_step=False, or set in_flight=1"
                )


def _copied_otherwise(module: nn.Module) -> Iterator[tuple[int, Tensor]]:
    """Yield tensors that a deep copy should not clone, by ``id``, with their replacements. Parameters (of a metric's
    own frozen network) and the elements of list states are never changed in place, so they are shared. A tensor in an
    autograd graph cannot be deep-copied, so it is cloned without its graph."""
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
    """Detach tensors that a call left in ``module``, so that a copy does not keep a minibatch's graph alive."""
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


def is_metric(value: object) -> bool:
    """Return True if ``value`` has the interface of a metric. Collections and trackers are no ``Metric``."""
    return isinstance(value, (Metric, MetricCollection, MetricTracker))


def find_metrics(root: nn.Module) -> list[nn.Module]:
    """Return every metric below ``root``: in submodules, and in lists, tuples, sets and dicts among attributes."""
    found: dict[int, nn.Module] = {}

    def look(value: object, depth: int) -> None:
        if is_metric(value):
            assert isinstance(value, nn.Module)
            found.update((id(inner), inner) for inner in value.modules() if is_metric(inner))
        elif depth and isinstance(value, (list, tuple, set, frozenset, dict)):
            for item in value.values() if isinstance(value, dict) else value:
                look(item, depth - 1)

    for module in root.modules():
        for value in list(vars(module).values()):  # submodules are in one of the values, a dict
            look(value, 4)
    return list(found.values())


def group(metrics: Iterable[nn.Module]) -> Iterator[dict[int, nn.Module]]:
    """Yield metrics by ``id``, grouped by shared submodules, because copies of a group must share them."""
    groups: list[tuple[set[int], dict[int, nn.Module]]] = []
    for metric in metrics:
        parts, members = {id(part) for part in metric.modules()}, {id(metric): metric}
        apart = []
        for other_parts, other_members in groups:
            if parts.isdisjoint(other_parts):
                apart.append((other_parts, other_members))
            else:
                parts, members = parts | other_parts, {**other_members, **members}
        groups = [*apart, (parts, members)]
    return (members for _, members in groups)


def child_ids(module: nn.Module) -> list[int]:
    """Return ids that change if a child, or a member of a ModuleList or ModuleDict, is replaced: a cheap check per
    step. Ids suffice, because known metrics are kept alive: a new metric has another id."""
    ids: list[int] = []
    for child in children(module):
        ids.append(id(child))
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            ids.extend(map(id, children(child)))
    return ids


def caller() -> str:
    """Return the line of the user's code that makes the recorded call."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_NOT_THE_USER):
        frame = frame.f_back
    return f"recorded at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _same(one: Any, other: Any) -> bool:
    """Return True if two answers of a metric are equal up to rounding by repeated reductions on a GPU."""
    ones, one_spec = pytree.tree_flatten(one)
    others, other_spec = pytree.tree_flatten(other)
    return one_spec == other_spec and all(_same_leaf(a, b) for a, b in zip(ones, others, strict=True))


def _same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.allclose(one.to(other), other, equal_nan=True)
    return bool(one == other or (one != one and other != other))  # NaN equals NaN
