"""What a ``training_step`` that runs ahead logs and counts, recorded there and replayed at its own step.

With more than one minibatch in flight, ``training_step(p)`` runs up to Nm - 1 minibatches before Lightning's loop
reaches minibatch p. What callbacks, loggers and checkpoints see must nevertheless be step p's. So, in the thread that
runs ahead, ``self.log``, ``self.log_dict`` and the calls of torchmetrics objects are recorded, in order; Lightning's
thread makes them when it is at p, where they do what they do in a plain run.

Covered are metrics, collections, wrappers and trackers that are submodules of the LightningModule, at any depth, and
those in lists, tuples, sets and dicts among the attributes of its submodules; each alone, as a member of a collection,
or inside a wrapper. A metric that only something else holds (a global variable, another object) is called at once:
its values are right, but code that reads it in the middle of an epoch finds it up to Nm - 1 minibatches ahead.
Attributes of a metric (its states, ``update_count``) read in ``training_step`` are those of Lightning's step.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning as L
from torch import Tensor, nn

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.run.extensions.metric_replay import (
    CHANGES,
    MetricCall,
    ShadowMetric,
    find_metrics,
    group,
    is_metric,
    methods_of,
)
from lightning_hetpipe.torch_private import Carried, children, pytree

_NOT_THE_USER = (
    *(f"lightning_hetpipe.{part}" for part in ("run.", "strategy.", "capture.", "redirect")),
    *("lightning.", "torch.", "torchmetrics."),
)


@dataclass(eq=False)
class LogCall:
    """``self.log`` or ``self.log_dict``, called ahead of its step. Tensors are detached and cloned."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    where: str


@dataclass(eq=False)
class Record:
    """The calls of one minibatch's ``training_step`` that wait for their step, in order."""

    calls: deque[LogCall | MetricCall] = field(default_factory=deque)


class _ThreadRecord(threading.local):
    """What the current thread is doing."""

    replaying = False


class Replay:
    """Records what ``training_step`` logs and counts ahead of time; replays it at its step.

    User code must not be concurrent: a ``replay`` and the stretches of user code inside ``recording`` exclude each
    other, and records are begun in the order of their minibatches.
    """

    def __init__(self, pl_module: L.LightningModule) -> None:
        self._module = pl_module
        self._here = _ThreadRecord()
        self._record: Carried[Record] = Carried("record")
        self._log: dict[str, Redirect] = {}
        self._signatures: dict[str, inspect.Signature] = {}
        self._patches: list[Redirect] = []  # of metrics
        self._twins: dict[int, ShadowMetric] = {}  # by id of the metric
        self._children: list[int] = []
        self._open: list[Record] = []  # begun and not fully replayed, in order of minibatches

    def install(self) -> None:
        """Puts recording stand-ins for ``log``, ``log_dict`` and the metrics' methods into the module."""
        if not self._log:
            self._log = {name: Redirect(self._module, name, self._on_log) for name in ("log", "log_dict")}
            self._signatures = {name: inspect.signature(patch.original) for name, patch in self._log.items()}
            self._find_metrics()

    def uninstall(self) -> None:
        """Removes every stand-in, and what is recorded and was not replayed. The module is as it was before."""
        self._remove_metrics()
        for patch in self._log.values():
            patch.remove()
        self._log = {}
        self._open.clear()

    @contextmanager
    def recording(self) -> Iterator[Record]:
        """Records what this thread logs and counts inside, into the record that is given."""
        if self._log and self._children != _child_ids(self._module):
            self._find_metrics()  # a hook has replaced a metric
        record, outer = Record(), self._record.get()
        self._open.append(record)
        self._record.set(record)
        try:
            yield record
        except BaseException:
            self.discard(record)
            raise
        finally:
            self._record.set(outer)

    def discard(self, record: Record) -> None:
        """Forgets a record that will not be replayed, because its look-ahead is thrown away."""
        if record in self._open:
            self._open.remove(record)
            for twin in self._twins.values():
                twin.drop()

    def replay(self, record: Record) -> None:
        """Makes the recorded calls, in Lightning's thread at the record's step.

        Raises whatever they raise, with a note that names the line of ``training_step`` that made the call.
        """
        here = self._here
        here.replaying = True
        try:
            while record.calls:
                call = record.calls.popleft()
                try:
                    if isinstance(call, LogCall):
                        self._log[call.method].original(*call.args, **call.kwargs)
                    else:
                        call.replay(self._twins[id(call.metric)])
                except Exception as error:
                    _add_note(error, call.where)
                    raise
        finally:
            here.replaying = False
            if record in self._open:
                self._open.remove(record)

    def _find_metrics(self) -> None:
        self._remove_metrics()
        waiting = (call.metric for record in self._open for call in record.calls if isinstance(call, MetricCall))
        metrics = {id(metric): metric for metric in (*find_metrics(self._module), *waiting)}
        for members in group(metrics.values()):
            twin = ShadowMetric(members)
            self._twins.update(dict.fromkeys(members, twin))
        self._patches = [
            Redirect(metric, method, self._on_metric) for metric in metrics.values() for method in methods_of(metric)
        ]
        self._children = _child_ids(self._module)

    def _remove_metrics(self) -> None:
        for patch in self._patches:
            patch.remove()
        self._patches, self._twins, self._children = [], {}, []

    def _on_log(self, patch: Redirect, *args: Any, **kwargs: Any) -> None:
        record = self._record.get()
        if record is None:
            patch.original(*args, **kwargs)
            return
        arguments = self._signatures[patch.name].bind(*args, **kwargs).arguments  # TypeError at the user's line
        for value in pytree.tree_leaves(arguments):
            if is_metric(value) and id(value) not in self._twins:
                raise SettingError(
                    f"self.{patch.name} was given a {type(value).__name__} that was not among the module's metrics "
                    "when this minibatch began, so its updates were not recorded; make it in __init__ or "
                    "configure_model, or set in_flight=1"
                )
        kept_args, kept_kwargs = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs))
        record.calls.append(LogCall(patch.name, kept_args, kept_kwargs, _caller()))

    def _on_metric(self, patch: Redirect, *args: Any, **kwargs: Any) -> Any:
        record, twin = self._record.get(), self._twins[id(patch.owner)]
        if record is None:
            if patch.name in CHANGES and not self._here.replaying:
                twin.drop()
            return patch.original(*args, **kwargs)
        # One clone serves both: with its graph for the value returned now, without it for the replay.
        live = pytree.tree_map_only(Tensor, Tensor.clone, (args, kwargs))
        kept_args, kept_kwargs = pytree.tree_map_only(Tensor, Tensor.detach, live)
        call = MetricCall(patch.owner, patch.name, kept_args, kept_kwargs, _caller())
        earlier = (c for open_ in self._open for c in open_.calls if isinstance(c, MetricCall))
        value = twin.call(call, live, earlier)
        record.calls.append(call)
        return value


def _child_ids(module: nn.Module) -> list[int]:
    """Changes when a child, or a member of a ModuleList or ModuleDict among them, was replaced: a cheap look per step.

    Ids suffice: the metrics known so far are kept alive, so a new one has another id.
    """
    ids: list[int] = []
    for child in children(module):
        ids.append(id(child))
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            ids.extend(map(id, children(child)))
    return ids


def _caller() -> str:
    """Where the user's code made the call that is being recorded."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_NOT_THE_USER):
        frame = frame.f_back
    return f"recorded at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _add_note(error: Exception, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
