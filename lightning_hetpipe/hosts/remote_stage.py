"""A stage whose tasks run at a host, as the process of Lightning's loop has it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_hetpipe.emulation import Emulation, Padded
from lightning_hetpipe.errors import SettingError, VirtualWorkerLost
from lightning_hetpipe.hosts import orders
from lightning_hetpipe.hosts.host_process import HostProcess
from lightning_hetpipe.hosts.server_calls import HostHolder
from lightning_hetpipe.hosts.shared_weights import FoundStash, SharedStash
from lightning_hetpipe.hosts.stage_host import modes
from lightning_hetpipe.hosts.wire import CODE, Wire
from lightning_hetpipe.pipeline.graph_code import layers_as_data, new_variants
from lightning_hetpipe.pipeline.graph_layer import GraphLayer
from lightning_hetpipe.pipeline.message_code import STAYING
from lightning_hetpipe.pipeline.plain_code import NotPlain
from lightning_hetpipe.pipeline.split.member_pool import DeviceGroup
from lightning_hetpipe.pipeline.stage import FoundGradients, Layer, Stage
from lightning_hetpipe.pipeline.stage_messages import Backward, Cancel, Evaluate, Failure, Forward, StageState, Version
from lightning_hetpipe.pipeline.stage_thread import Parcel
from lightning_hetpipe.pipeline.streams import HostStream
from lightning_hetpipe.pipeline.weight_stash import VersionedLayers


class HostLink(Protocol):
    """A host, as this process has it."""

    wire: Wire

    @property
    def name(self) -> str: ...

    @property
    def node(self) -> str: ...

    def told(self) -> str: ...

    def join(self, seconds: float) -> None: ...

    def kill(self) -> None: ...


class HostLost(VirtualWorkerLost):
    """The process of a stage has ended while it was needed."""


LOST: tuple[type[Exception], ...] = (HostLost, *STAYING.values())
"""Errors that say that a host cannot go on."""


def reason_to_stay(layers: list[Layer]) -> str | None:
    """Tell why a stage with ``layers`` cannot run at a host; None if it can."""
    try:
        CODE.write(layers_as_data(layers))
    except NotPlain as reason:
        return str(reason)
    return None


def _written_group(group: DeviceGroup) -> list[Any]:
    """``group`` as data, with the number of its devices alone: ``UseDevice`` names them, or a CPU stands for each."""
    counts = group.counts
    return [len(group.devices), [*counts.shares], {layer: [*own] for layer, own in counts.splits.items()}, group.home]


class _RemoteStream(HostStream):
    """Stream of a stage that computes elsewhere."""

    def show(self, busy: float) -> None:
        """Show the seconds that it has computed there."""
        self._busy = busy


class RemoteStage(Stage):
    """A stage at a host. Its versions are here, in memory that the host sees, for user code and for the host.

    Live weights, gradients and optimizers stay in this process, so that Lightning and its callbacks see what they
    always do.

    Args:
        connect: Starts the host; by default a process of this machine.
        args: Those of :class:`~lightning_hetpipe.pipeline.stage.Stage`.
    """

    holder: HostHolder | None = None
    """The host, for the weights that it has."""
    emulation: Emulation | None = None
    """Emulation of the stages of this virtual worker, where their devices are not here."""
    whose = ""
    """Name of its virtual worker, where there are several, as the end of its own."""
    shows_gradients = True
    """True if the host sends gradients and state of a minibatch unasked, as the step waits for them."""

    def __init__(self, connect: Callable[[], HostLink] | None, *args: Any) -> None:
        self._start_host = connect or HostProcess
        self._host: HostLink | None = None
        self._answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()  # numbered as they come
        self._questions = count()
        self._asked: dict[tuple[int, str], float] = {}
        self._lock = threading.Lock()
        self._asking = threading.Lock()  # answers come in the order of questions
        self._shown: dict[int, orders.Shown] = {}
        self._lost: str | None = None
        self._broken: str | None = None  # the class's name of the error with which the host cannot go on
        self._known: list[int] = []
        self._is_set_up = False
        super().__init__(*args)
        self.stream = self._busy = _RemoteStream()

    # The stage's life.

    def start(self) -> None:
        if self._host is None:
            self._connect()
        settings, planned = self._settings, self.memory.planned
        pad = None if self.emulation is None else self.emulation.pad(self.index)
        self._known = self._variants()
        self._send(
            orders.SetUp(
                self.index,
                [[part.index, part.piece, part.stage, part.first, part.last] for part in self.segments],
                self._layers_as_data(),
                settings.in_flight,
                settings.torch_threads,
                settings.default_dtype,
                settings.recompute,
                settings.buffers,
                settings.generators.run_seed,
                settings.generators.virtual_worker,
                settings.generators.deterministic,
                None if planned is None else [planned.total, planned.limit, planned.room],
                self.memory.visits,
                self._watchdog.seconds,
                None if pad is None else [pad.forward, pad.backward],
                modes(),
                None if self._members is None else _written_group(self._members.group),
                self.shows_gradients,
            )
        )
        self._is_set_up = True

    def await_host(self) -> None:
        """Wait until the host has done all that it was told so far."""
        self._ask(orders.Bring(()))

    def _connect(self) -> None:
        """Start the host, which knows nothing of the stage yet."""
        host = self._host = self._start_host()
        name = f"{self._name}-results"
        self._receiver = threading.Thread(target=self._receive, args=(host,), name=name, daemon=True)
        self._receiver.start()

    def _layers_as_data(self) -> list[Any]:
        return layers_as_data(self.layers)

    def close(self) -> None:
        if self._host is None:
            return
        if self._watchdog.given_up is not None:
            self._host.kill()  # it may be stopped; whoever waits for its answers is told
        self._host.wire.end()

    def join(self, seconds: float) -> bool:
        if self._host is None:
            return True
        self._host.join(seconds)
        self._receiver.join(seconds)
        if self._receiver.is_alive():
            return False
        self._host.wire.close()
        return True

    def describe(self) -> str:
        if self._host is None:
            return f"stage {self.index} has no process yet"
        who = f"stage {self.index} ({self._host.name})"
        if self._lost is not None:
            return f"{who} {self._lost}"
        with self._lock:
            if not self._asked:
                return f"{who} is idle"
            (number, work), since = next(iter(self._asked.items()))
        return f"{who} was given the {work} of minibatch {number} {time.monotonic() - since:.1f} s ago"

    # Versions and states.

    def copy_layers(self) -> None:
        super().copy_layers()
        if self._is_set_up:
            self._known = self._variants()
            try:
                self._send(orders.NewLayers(self._layers_as_data()))
            except NotPlain as reason:
                raise SettingError(
                    f"the layers of stage {self.index} have changed, and now {reason}; leave stage_hosts out, or change"
                    " them before fit"
                ) from None

    def _new_stash(self, layers: nn.ModuleList) -> VersionedLayers:
        return SharedStash(layers, self._settings.version_buffers, self.device)

    def begin(self, version: Version, forwards: int) -> None:
        super().begin(version, forwards)
        self._shown.clear()
        self._send(orders.Begin(_without_weights(version), forwards, self._published()))

    def publish(self, version: Version) -> None:
        super().publish(version)
        self._send(orders.Publish(_without_weights(version), self._published()))

    def state(self, minibatch: int) -> StageState:
        found = self._shown.get(minibatch) or self._ask(orders.Look(minibatch))
        assert isinstance(found, orders.Looked | orders.Shown)
        for runner, left in zip(self._runners.values(), found.state.buffers, strict=True):
            runner.buffers.mirror(minibatch, left)  # so that publishing finds what callbacks have changed
        return found.state

    def take(self, minibatch: int) -> FoundGradients:
        found = FoundGradients()
        for number, each in self._taken(minibatch, ()).items():
            found.gradients[number] = sparse_of(each) if isinstance(each, orders.SparseTensor) else each
        return found

    def _taken(self, minibatch: int, numbers: Sequence[int]) -> Mapping[int, Any]:
        for number in [each for each in [*self._shown] if each < minibatch]:
            del self._shown[number]  # the step has taken nothing of it
        shown = self._shown.get(minibatch)
        taken = self._ask(orders.Take(minibatch, numbers)) if shown is None else shown.taken
        assert isinstance(taken, orders.Taken)
        self.memory.mirror(taken.memory)
        self._busy.show(taken.busy)
        if self.emulation is not None and taken.padded is not None:
            passes, overruns, *seconds = taken.padded
            self.emulation.mirror(self.index, Padded(int(passes), int(overruns), *seconds))
        return taken.gradients

    def delivered(self, minibatch: int) -> None:
        self._shown.pop(minibatch, None)
        self._send(orders.Delivered(minibatch))

    def _published(self) -> orders.PublishedWeights:
        assert isinstance(self.stash, FoundStash)
        return self.stash.published()

    # Messages.

    def put(self, parcel: Parcel) -> None:
        message, host = parcel.message, self._host
        assert host is not None
        if parcel.event is not None:
            parcel.event.synchronize()
        for event in parcel.others:
            event.synchronize()
        if not isinstance(message, Cancel):
            with self._lock:
                self._asked[message.minibatch, _work(message)] = time.monotonic()
        try:
            if isinstance(message, Forward):
                self._send_variants()
            self._send(message)
        except LOST as error:
            if not isinstance(message, Cancel):
                self._done(Failure(message.minibatch, error), None)
        except NotPlain as error:
            self._done(Failure(message.minibatch, SettingError(f"{error}; leave stage_hosts out")), None)

    def _variants(self) -> list[int]:
        """Number of variants of each layer's graph."""
        return [len(layer.module.code.graphs) for layer in self.layers if isinstance(layer.module, GraphLayer)]

    def _send_variants(self) -> None:
        """Send graphs that were made since the last ones were sent."""
        if self._variants() == self._known:
            return
        with self._lock:
            new = new_variants(self.layers, self._known)  # while others are added, which the next forward sends
            self._send(orders.NewVariants(new))
            self._known = [known + len(each["graphs"]) for known, each in zip(self._known, new, strict=True)]

    def _send(self, message: Any) -> None:
        assert self._host is not None
        if self._broken is not None:  # the host takes messages, but does nothing any more
            raise self._host_lost()
        try:
            self._host.wire.send(message)
        except OSError:
            raise self._host_lost() from None

    def _ask(self, message: Any) -> Any:
        """Send ``message`` and wait for the answer; any thread may."""
        with self._asking:
            self._send(message)
            return self._await_answer()

    def _await_answer(self) -> Any:
        """Wait for the answer to what was sent, which a host gives at once, whatever its stage computes.

        Lightning's thread has the lock over user code meanwhile, so that the watchdog does not count this time. Where a
        wait was interrupted, as by Ctrl-C, its answer comes before the one to this question.
        """
        assert self._host is not None
        found: list[Any] = []
        since, question = time.monotonic(), next(self._questions)

        def ready(seconds: float) -> bool:
            try:
                number, answer = self._answers.get(timeout=seconds)
                found.extend([answer] if number == question else [])
            except queue.Empty:
                if self._lost is not None:
                    raise self._host_lost() from None
                if time.monotonic() - since > self._watchdog.seconds:
                    raise self._end_silent(self._watchdog.seconds) from None
            return bool(found)

        self._watchdog.wait(ready, f"{threading.current_thread().name} for stage {self.index}")
        return found[0]

    def _end_silent(self, seconds: float) -> Exception:
        """End the host, which has not answered for so many ``seconds``; gives the error that says so."""
        assert self._host is not None
        self._lost = f"has not answered for {seconds:g} s, and was ended"
        self._host.kill()
        return self._host_lost()

    def _host_lost(self) -> Exception:
        assert self._host is not None
        if self._lost is None:
            self._lost = self._host.told()
        kind = STAYING.get(self._broken or "")
        who, where = f"the process of stage {self.index}", self._host.name
        if self._host.node:
            where += f" on {self._host.node}"
        if kind is not None:
            return kind(f"{who}{self.whose} ({where}) {self._lost}")
        advice = "" if self._settings.generators.virtual_worker else "; start again from the last checkpoint"
        return HostLost(f"{who}{self.whose} ({where}) {self._lost}{advice}", f"{who} ({where}) {self._lost}")

    def _receive(self, host: HostLink) -> None:
        torch.set_num_threads(self._torch_threads)
        numbers = count()
        while True:
            try:
                message = host.wire.receive()
            except (EOFError, NotPlain):
                break
            except Exception as unfit:  # such as want of memory for what has come
                self._lost = f"has sent what could not be taken ({type(unfit).__name__}: {unfit})"
                host.wire.end()
                break
            if isinstance(message, orders.Broken):
                kind = "" if message.kind in STAYING else f"{message.kind}: "
                self._lost, self._broken = f"cannot go on: {kind}{message.error}", message.kind
                break
            if isinstance(message, orders.ServerAnswered):
                assert self.holder is not None
                self.holder.answered(message)
                continue
            if isinstance(message, orders.Shown):
                self._shown[message.minibatch] = message
                continue
            if isinstance(message, orders.Taken | orders.Looked | orders.Brought):
                self._answers.put((next(numbers), message))
                continue
            with self._lock:
                for key in [key for key in self._asked if key[0] == message.minibatch]:
                    del self._asked[key]
            self._watchdog.moved()
            self._done(message, None)
        error = self._host_lost()
        if self.holder is not None:
            self.holder.lose(error)
        with self._lock:
            waiting = {number for number, _ in self._asked}
            self._asked.clear()
        for number in waiting:
            self._done(Failure(number, error), None)


def sparse_of(sent: orders.SparseTensor) -> Tensor:
    """The tensor that was ``sent``."""
    return torch.sparse_coo_tensor(sent.indices, sent.values, [*sent.shape], is_coalesced=sent.coalesced)


def _without_weights(version: Version) -> Version:
    return version._replace(parameters=(), moves=())


def _work(message: Forward | Backward | Evaluate) -> str:
    return type(message).__name__.lower()
