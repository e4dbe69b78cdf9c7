"""Replay: what a ``training_step`` that runs ahead logs and counts takes effect at its own step (law L9).

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning as L
from torch import Tensor

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.threads import PerThread
from lightning_hetpipe.pipeline.user.batch_in_flight import BatchInFlight
from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.run.extensions.metric_calls import (
    CHANGES,
    LogCall,
    MetricCall,
    Record,
    ShadowMetric,
    caller,
    child_ids,
    find_metrics,
    group,
    is_metric,
    methods_of,
)
from lightning_hetpipe.run.lifecycle import Around, Extension
from lightning_hetpipe.torch_private.tensors import pytree


class Replay(Extension):
    """Records what the user's step on ``module`` logs and counts; makes these calls at its own step, in ``context``.

    Until this is closed, stand-ins for these methods are in ``module``. User code must not be concurrent: a ``replay``
    and the sections of user code inside ``recording`` exclude each other, and records are begun in the order of their
    minibatches.
    """

    def __init__(self, module: L.LightningModule, context: Callable[[], Around] = nullcontext) -> None:
        self._module = module
        self._context = context
        self._records: dict[int, Record] = {}  # of minibatches in flight
        self._replaying: PerThread[bool] = PerThread()
        self._record: PerThread[Record] = PerThread()
        self._open: list[Record] = []  # begun and not fully replayed, in order of minibatches
        self._log = {name: Redirect(module, name, self._on_log) for name in ("log", "log_dict")}
        self._signatures = {name: inspect.signature(redirect.original) for name, redirect in self._log.items()}
        self._metrics: list[Redirect] = []
        self._shadows: dict[int, ShadowMetric] = {}  # by id of the metric
        self._find_metrics()

    @contextmanager
    def user_step(self, minibatch: int) -> Iterator[None]:
        with self.recording() as self._records[minibatch]:
            yield

    def finished(self, minibatch: BatchInFlight, args: Sequence[Any]) -> None:
        with self._context():
            self.replay(self._records.pop(minibatch.number))

    def discarded(self) -> None:
        while self._records:
            self.discard(self._records.popitem()[1])

    def closed(self) -> None:
        """Removes every stand-in, and what is recorded and was not replayed. The module is as it was before."""
        self._remove_metrics()
        for redirect in self._log.values():
            redirect.remove()
        self._open.clear()

    @contextmanager
    def recording(self) -> Iterator[Record]:
        """Records what this thread logs and counts inside, into the record that is given."""
        if self._children != child_ids(self._module):
            self._find_metrics()  # a hook has replaced a metric
        record = Record()
        self._open.append(record)
        try:
            with self._record.holding(record):
                yield record
        except BaseException:
            self.discard(record)
            raise

    def discard(self, record: Record) -> None:
        """Forgets a record that will not be replayed, because its look-ahead is thrown away."""
        if record in self._open:
            self._open.remove(record)
            for shadow in self._shadows.values():
                shadow.drop()

    def replay(self, record: Record) -> None:
        """Makes the recorded calls, in Lightning's thread at the record's step.

        Raises whatever they raise, with a note that names the line of ``training_step`` that made the call.
        """
        try:
            while record.calls:
                call = record.calls.popleft()
                try:
                    with self._replaying.holding(True):
                        if isinstance(call, LogCall):
                            self._log[call.method].original(*call.args, **call.kwargs)
                        else:
                            call.replay(self._shadows[id(call.metric)].drawing)
                except Exception as error:
                    error.add_note(call.where)
                    raise
        finally:
            if record in self._open:
                self._open.remove(record)

    def _find_metrics(self) -> None:
        self._remove_metrics()
        waiting = (call.metric for record in self._open for call in record.metric_calls)
        metrics = {id(metric): metric for metric in (*find_metrics(self._module), *waiting)}
        for members in group(metrics.values()):
            shadow = ShadowMetric(members)
            self._shadows.update(dict.fromkeys(members, shadow))
        self._metrics = [
            Redirect(metric, method, self._on_metric) for metric in metrics.values() for method in methods_of(metric)
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
        record.calls.append(LogCall(redirect.name, kept_args, kept_kwargs, caller()))

    def _on_metric(self, redirect: Redirect, *args: Any, **kwargs: Any) -> Any:
        record, shadow = self._record.get(), self._shadows[id(redirect.owner)]
        if record is None:
            if redirect.name in CHANGES and not self._replaying.get():
                shadow.drop()
            return redirect.original(*args, **kwargs)
        # One clone serves both: with its graph for the value returned now, without it for the replay.
        live = pytree.tree_map_only(Tensor, Tensor.clone, (args, kwargs))
        kept_args, kept_kwargs = pytree.tree_map_only(Tensor, Tensor.detach, live)
        call = MetricCall(redirect.owner, redirect.name, kept_args, kept_kwargs, caller())
        value = shadow.call(call, live, (earlier for open_ in self._open for earlier in open_.metric_calls))
        record.calls.append(call)
        return value
