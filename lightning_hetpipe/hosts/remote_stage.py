"""A stage at a host: live weights, gradients, optimizer states and versions are there, and its tasks run there.

The live parameters become :class:`~lightning_hetpipe.hosts.remote_tensor.RemoteTensor`s, and stay the same objects. The
user's optimizer, clipping, callbacks and hooks work with them as ever, and their operators run at the host. When the
stage ends, values come home, and parameters are plain again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.emulation import Emulation
from lightning_hetpipe.errors import PipelineStalled, SettingError, VirtualWorkerLost
from lightning_hetpipe.hosts import orders
from lightning_hetpipe.hosts.host_memory import HostMemory
from lightning_hetpipe.hosts.remote_tensor import RemoteTensor, come_home, local, move_out, remote
from lightning_hetpipe.hosts.server_calls import HostHolder
from lightning_hetpipe.hosts.stage_host import modes
from lightning_hetpipe.hosts.wire import HostConnection
from lightning_hetpipe.pipeline.graph_code import layers_as_data, new_variants
from lightning_hetpipe.pipeline.graph_layer import GraphLayer
from lightning_hetpipe.pipeline.plain_code import STAYING, NotPlain
from lightning_hetpipe.pipeline.stage import FoundGradients, Stage
from lightning_hetpipe.pipeline.stage_messages import Cancel, Failure, Forward, Parcel, Version
from lightning_hetpipe.pipeline.streams import Stream
from lightning_hetpipe.pipeline.weight_stash import VersionBuffer, VersionedLayers
from lightning_hetpipe.rules.versions import Reading
from lightning_hetpipe.torch_private.tensors import take_in_foreach


class HostLost(VirtualWorkerLost):
    """Error: the process of a stage has ended while it was needed."""


LOST: tuple[type[Exception], ...] = (HostLost, *STAYING.values())
"""Errors by which a host cannot go on."""


class RemoteStash(VersionedLayers):
    """Versions of a stage's live ``layers`` at its host, whose tensors are in ``memory``."""

    def __init__(self, layers: nn.ModuleList, memory: HostMemory) -> None:
        super().__init__(layers)
        self._memory = memory

    def publish(self, version: Version) -> list[Tensor]:
        new = VersionBuffer(version.flags)
        self._held = {reading: self._held.get(reading, new) for reading in version.needed}
        return []

    def tensor(self, index: int, weights: Reading) -> Tensor:
        handle = self._memory.new()
        self._memory.tell("hold", weights, index, handle.number)
        return RemoteTensor(handle, self.parameters[index])


class RemoteStage(Stage):
    """The stage at a host, as the process of Lightning's loop sees it.

    Args:
        connect: Connects to the host.
        accelerators: Number and name, on the host's machine, of the stage's accelerator and of each group member's, or
            empty.
        arguments: Arguments of :class:`~lightning_hetpipe.pipeline.stage.Stage`. This process sees the host's device as
            a CPU.
    """

    emulation: Emulation | None = None
    """Emulation of the stages of this virtual worker, if their devices are not here."""
    whose = ""
    """Name of its virtual worker, if there are several, as the end of the stage's name."""

    def __init__(
        self, connect: Callable[[], HostConnection], accelerators: Sequence[tuple[int, str]], **arguments: Any
    ) -> None:
        self._accelerators = accelerators
        self._moved: list[nn.Parameter] = []
        self._asked: dict[tuple[int, str], float] = {}
        self._lock = threading.Lock()
        self._lost: str | None = None
        self._broken: BaseException | None = None  # with which the host cannot go on
        self._known: list[int] = []  # number of variants of each layer's graph that the host has
        self._adding = threading.Lock()
        self._host_memory = HostMemory(self._send, self._await, accelerates=bool(self._accelerators))
        self.holder = HostHolder(self._host_memory, self._end_silent)
        """The host as the holder of its weights."""
        name = f"hetpipe-stage-{arguments['index']}-results"
        self._receiver = threading.Thread(target=self._receive, name=name, daemon=True)
        self._host = connect()
        try:
            super().__init__(**arguments)
        except BaseException:
            self.close()  # nobody else can close it yet
            raise
        self.stream = Stream()
        if self._accelerators:
            number, name = self._accelerators[0]
            self.place = f"{name}:{number} of {self._host.name}"

    # The stage's life.

    def start(self) -> None:
        self._known = self._variants()
        self._host_memory.tell(
            "set_up",
            orders.SetUp(
                stage=self.index,
                segments=self.segments,
                layers=self._layers_as_data(),
                settings=replace(self._settings, before_pass=None, compile=None),
                planned=self.memory.planned,
                visits=self.memory.visits,
                timeout=self._watchdog.seconds,
                pad=None if self.emulation is None else self.emulation.pad(self.index),
                modes=modes(),
                group=None if self._members is None else self._members.group,
            ),
        )

    def await_host(self) -> None:
        """Wait until the host has done all orders so far.

        Raises:
            SettingError: if the host has no such device.
            torch.OutOfMemoryError: if the device has no room for the weights.
        """
        self._host_memory.bring(())

    def close(self) -> None:
        try:
            if self._receiver.ident is not None and self._lost is None:
                with suppress(*LOST, PipelineStalled):
                    self._come_home()
        finally:
            if self._receiver.ident is not None and self._watchdog.given_up is not None:
                self._host.wire.kill()  # it may be stopped, and threads that wait for its answers get an error
            self._host.wire.end()

    def join(self, seconds: float) -> bool:
        self._receiver.join(seconds)
        if self._receiver.is_alive():
            return False
        self._host.wire.close()
        return True

    def describe(self) -> str:
        who = f"stage {self.index} ({self._host.name})"
        if self._lost is not None:
            return f"{who} {self._lost}"
        with self._lock:
            if not self._asked:
                return f"{who} is idle"
            (number, work), since = next(iter(self._asked.items()))
        return f"{who} was given the {work} of minibatch {number} {time.monotonic() - since:.1f} s ago"

    # Weights.

    def has(self, parameter: Tensor) -> bool:
        """Return True if the host has ``parameter``."""
        return isinstance(parameter, RemoteTensor) and parameter.handle.owner is self._host_memory

    def adopt(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Move the states that ``optimizers`` keep of its weights to the host."""
        own = set(self._moved)
        for optimizer in optimizers:
            for parameter, state in optimizer.state.items():
                if parameter not in own:
                    continue
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                        state[name] = remote(value, self._host_memory)

    def copy_layers(self) -> None:
        if self._receiver.ident is None:
            self._receiver.start()
            self._use_devices()
        self._move_out()
        super().copy_layers()
        if self._known:  # the host has the layers as they were
            self._known = self._variants()
            try:
                self._host_memory.tell("take_layers", self._layers_as_data())
            except NotPlain as reason:
                raise SettingError(
                    f"the layers of stage {self.index} have changed, and now {reason}; leave stage_hosts out, or change"
                    " them before fit"
                ) from None

    def _use_devices(self) -> None:
        take_in_foreach(RemoteTensor)
        if self._accelerators:
            own, *members = self._accelerators
            self._host_memory.tell("use_device", self._host.name, own, members)
            self._host_memory.bring(())  # fails before any weight leaves for a host without the device

    def _move_out(self) -> None:
        every = nn.ModuleList([layer.module for layer in self.layers]).parameters()
        own = [parameter for parameter in every if not isinstance(parameter, RemoteTensor)]
        for parameter in own:
            move_out(parameter, self._host_memory)
        self._moved += own

    def _come_home(self) -> None:
        """Bring all values into this process: weights, gradients, optimizer states, and other tensors in use."""
        self._host_memory.close()
        for tensor in [*self._host_memory.tensors.values()]:
            if isinstance(tensor, RemoteTensor) and tensor.handle.owner is None and _is_leaf(tensor):
                come_home(tensor)

    def _layers_as_data(self) -> list[Any]:
        return layers_as_data(self.layers, self._in_message)

    def _in_message(self, tensor: Tensor) -> Any:
        """Return ``tensor`` as it is in a message: its number if the host has it, otherwise its value."""
        if isinstance(tensor, RemoteTensor) and tensor.handle.owner is self._host_memory:
            return tensor.handle.name
        return local(tensor).detach()

    def _new_stash(self, layers: nn.ModuleList) -> VersionedLayers:
        return RemoteStash(layers, self._host_memory)

    # Versions and states.

    def begin(self, version: Version, forwards: int) -> None:
        super().begin(version, forwards)
        self._host_memory.tell("begin", version.replaced(self._in_message), forwards)

    def publish(self, version: Version) -> None:
        super().publish(version)
        self._host_memory.tell("publish", version.replaced(self._in_message))

    def _published(self, version: Version) -> None:
        """Do nothing: the host counts and computes its versions."""

    def state(self, minibatch: int) -> Sequence[Sequence[Tensor]]:
        found: Sequence[Sequence[Tensor]] = self._host_memory.ask("look", minibatch)
        for runner, left in zip(self._runners.values(), found, strict=True):
            runner.buffers.mirror(minibatch, left)  # so that publishing finds what callbacks have changed
        return found

    def take(self, minibatch: int) -> FoundGradients:
        handles = [self._host_memory.new() for _ in self.stash.parameters]
        taken: orders.Taken = self._host_memory.ask("take", minibatch, [handle.number for handle in handles])
        self.memory.mirror(taken.memory)
        self.stream.mirror(taken.busy)
        if self.emulation is not None and taken.padded is not None:
            self.emulation.stages[self.index] = taken.padded
        found = FoundGradients()
        for number, each in taken.gradients.items():
            if isinstance(each, orders.SparseTensor):
                found.gradients[number] = torch.sparse_coo_tensor(
                    each.indices, each.values, [*each.shape], is_coalesced=each.coalesced
                )
            else:
                like = torch.empty_strided(each.shape, each.stride, dtype=each.dtype, device="meta")
                found.gradients[number] = RemoteTensor(handles[number], like)
        return found

    def delivered(self, minibatch: int) -> None:
        self._host_memory.tell("delivered", minibatch)

    # Other hosts.

    def listen(self, secret: str) -> int:
        """Let hosts of other stages with ``secret`` connect to the host. Return its port."""
        port: int = self._host_memory.ask("listen", secret)
        return port

    def hand_over(self, *hosts_and_segments: Any) -> list[str | None]:
        """Make the host call ``PeerHosts.connect``. Return for each other host why it cannot be reached, or None."""
        reasons: list[str | None] = self._host_memory.ask("hand_over", self.index, *hosts_and_segments)
        return reasons

    # Messages.

    def put(self, parcel: Parcel) -> None:
        message = parcel.message
        if parcel.event is not None:
            parcel.event.synchronize()
        for event in parcel.others:
            event.synchronize()
        if not isinstance(message, Cancel):
            with self._lock:
                self._asked[message.minibatch, type(message).__name__.lower()] = time.monotonic()
        try:
            if isinstance(message, Forward):
                self._send_variants()
            self._host_memory.flush()
            self._send(message)
        except LOST as error:
            if not isinstance(message, Cancel):
                self._done(Failure(message.minibatch, error), None)
        except NotPlain as error:
            self._done(Failure(message.minibatch, SettingError(f"{error}; leave stage_hosts out")), None)

    def _variants(self) -> list[int]:
        """Return the number of variants of each layer's graph."""
        return [len(layer.module.code.graphs) for layer in self.layers if isinstance(layer.module, GraphLayer)]

    def _send_variants(self) -> None:
        """Send graphs that are not at the host yet."""
        if self._variants() == self._known:
            return
        with self._adding:
            new = new_variants(self.layers, self._known)  # while others are added, which the next forward sends
            self._host_memory.tell("add_variants", new)
            self._known = [known + len(each["graphs"]) for known, each in zip(self._known, new, strict=True)]

    def _send(self, message: Any) -> None:
        if self._broken is not None:  # the host takes messages, but does nothing any more
            raise self._host_lost()
        try:
            self._host.wire.send(message)
        except OSError:
            raise self._host_lost() from None

    def _await(self, result: Future[Any]) -> Any:
        """Wait for a result, which a host gives at once, whatever its stage computes. Lightning's thread holds the lock
        over user code meanwhile, so the watchdog does not count this time."""
        since = time.monotonic()

        def ready(seconds: float) -> bool:
            try:
                result.exception(seconds)
            except TimeoutError:
                if time.monotonic() - since > self._watchdog.seconds:
                    raise self._end_silent(self._watchdog.seconds) from None
                return False
            return True

        self._watchdog.wait(ready, f"{threading.current_thread().name} for stage {self.index}")
        return result.result()

    def _end_silent(self, seconds: float) -> Exception:
        """End the host, which has not answered for ``seconds``. Return the error."""
        self._lost = f"has not answered for {seconds:g} s, and was ended"
        self._host.wire.kill()
        return self._host_lost()

    def _host_lost(self) -> Exception:
        if self._lost is None:
            self._lost = self._host.told()
        kind = STAYING.get(type(self._broken).__name__)
        who, where = f"the process of stage {self.index}", self._host.name
        if self._host.node:
            where += f" on {self._host.node}"
        if kind is not None:
            return kind(f"{who}{self.whose} ({where}) {self._lost}")
        advice = "" if self._settings.generators.virtual_worker else "; start again from the last checkpoint"
        return HostLost(f"{who}{self.whose} ({where}) {self._lost}{advice}", f"{who} ({where}) {self._lost}")

    def _receive(self) -> None:
        torch.set_num_threads(self._settings.torch_threads)
        while True:
            try:
                message = self._host.wire.receive()
            except (EOFError, NotPlain):
                break
            except Exception as unfit:  # such as lack of memory for a message
                self._lost = f"has sent what could not be taken ({type(unfit).__name__}: {unfit})"
                self._host.wire.end()
                break
            if isinstance(message, orders.Broken):
                text = "\n".join([str(message.error), *getattr(message.error, "__notes__", ())])
                self._lost, self._broken = f"cannot go on: {text}", message.error
                break
            if isinstance(message, orders.Brought):
                self._host_memory.answered(message)
                continue
            with self._lock:
                for key in [key for key in self._asked if key[0] == message.minibatch]:
                    del self._asked[key]
            self._watchdog.moved()
            self._done(message, None)
        error = self._host_lost()
        self._host_memory.end(error)
        with self._lock:
            waiting = {number for number, _ in self._asked}
            self._asked.clear()
        for number in waiting:
            self._done(Failure(number, error), None)


def _is_leaf(tensor: Tensor) -> bool:
    with suppress(RuntimeError):  # torch does not tell it of a view from no_grad whose base was changed with gradients
        return tensor.is_leaf
    return False
