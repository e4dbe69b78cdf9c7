"""A host: one stage, in a process that runs none of the user's code.

It has the stage's layers as graphs, and its weights with their gradients, optimizer states and versions. All messages
come from the process of Lightning's loop, with which it ends.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.emulation import Emulation
from lightning_hetpipe.hosts import orders
from lightning_hetpipe.hosts.host_device import Computed, HostDevice
from lightning_hetpipe.hosts.host_memory import CPU, HeldTensors
from lightning_hetpipe.hosts.peer_hosts import PeerHosts
from lightning_hetpipe.hosts.server_calls import ServerCalls
from lightning_hetpipe.hosts.wire import Wire
from lightning_hetpipe.pipeline.graph_code import add_variants, layers_of_data
from lightning_hetpipe.pipeline.memory import keep_freed_memory
from lightning_hetpipe.pipeline.plain_code import NotPlain
from lightning_hetpipe.pipeline.stage import Layer, Stage
from lightning_hetpipe.pipeline.stage_messages import Failure, Parcel, Result, Version
from lightning_hetpipe.pipeline.streams import StreamEvent, Streams, move
from lightning_hetpipe.pipeline.threads import ReadersWriterLock, Watchdog
from lightning_hetpipe.server.protocol.shard import block_of
from lightning_hetpipe.server.transport.security import Security
from lightning_hetpipe.torch_private.tensors import address_of, strided_parts

SENDING = 5.0
"""Seconds at the end in which answers are still sent."""


def _matmul_precision() -> str | None:
    """Return the precision of matrix products, or None if ``torch.backends`` set it, which torch refuses to mix."""
    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision()
    return None


def _attribute(path: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    library, _, name = path.rpartition(".")
    owner = attrgetter(library)(torch.backends)
    return partial(getattr, owner, name), partial(setattr, owner, name)


_BACKENDS: Any = torch.backends
_MODES: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (_matmul_precision, lambda value: None if value is None else torch.set_float32_matmul_precision(value)),
    # Whether subnormal numbers are zero in this thread and the threads that it starts, which torch can only set.
    (lambda: not torch.tensor([torch.finfo(torch.float32).tiny]).mul(0.5).item(), torch.set_flush_denormal),
    (
        lambda: [torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()],
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    (lambda: _BACKENDS.mkldnn.is_available() and _BACKENDS.mkldnn.enabled, _BACKENDS.mkldnn.set_flags),
    *(
        (getattr(_BACKENDS.cuda, f"{way}_sdp_enabled"), getattr(_BACKENDS.cuda, f"enable_{way}_sdp"))
        for way in ("flash", "mem_efficient", "math", "cudnn")  # ways to compute attention
    ),
    *(_attribute(f"{work}.fp32_precision") for work in ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")),
    *(_attribute(f"{work}.fp32_precision") for work in ("cuda.matmul", "cudnn.conv", "cudnn.rnn")),
    *(_attribute(f"cudnn.{name}") for name in ("enabled", "deterministic", "benchmark")),
    *(_attribute(f"cuda.matmul.allow_{dtype}_reduced_precision_reduction") for dtype in ("fp16", "bf16")),
    _attribute("cuda.matmul.allow_fp16_accumulation"),
]
"""Functions that read and set torch's settings on which results depend."""


def modes() -> list[Any]:
    """Return the process's settings of torch on which results depend."""
    return [read() for read, _ in _MODES]


def set_modes(modes: Sequence[Any]) -> None:
    """Apply settings from :func:`modes`."""
    for (_, write), value in zip(_MODES, modes, strict=True):
        write(value)


class HostedStage(Stage):
    """The stage at its host. ``forget`` makes peer hosts drop a minibatch's tensors, after all earlier messages.
    ``arguments`` are the arguments of ``Stage``."""

    def __init__(self, forget: Callable[[int], None], **arguments: Any) -> None:
        self._have_forgotten = forget
        super().__init__(**arguments)

    def take_layers(self, layers: Sequence[Layer]) -> None:
        """Replace the layers, before the pipeline starts."""
        self.layers = [*layers]
        self.copy_layers()

    def _forget(self, minibatch: int) -> None:
        super()._forget(minibatch)
        self._have_forgotten(minibatch)


class Host:
    """The host at one end of ``wire``. ``security`` has certificates and token for its calls of servers, and for its
    peers, which find it at the address ``host``."""

    def __init__(self, wire: Wire, security: Security, host: str) -> None:
        self._wire = wire
        self._peers = PeerHosts(host, security)
        self._timeout = 0.0
        self._calls = ServerCalls(security)
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._held = HeldTensors()
        self._device = HostDevice()
        self._streams = Streams()
        self._emulation: Emulation | None = None
        self._stage: HostedStage | None = None
        self._undo = ExitStack()
        held, taken = self._held, self._device.taken
        self._methods: dict[str, Callable[..., Any]] = {
            "put": held.put,
            "put_block": lambda number, size: held.put_block(number, block_of(size)),
            "run": lambda *operators: taken(held.run(*operators)),
            "bring": lambda numbers: taken(held.bring(numbers)),
            "listen": self._peers.listen,
            "hand_over": self._peers.connect,
            "use_device": self._use_device,
            "call_server": lambda *call: self._calls.make(*held.found(call)),
            "set_up": self._set_up,
        }
        """Methods that the other process may call, among them the stage's once it is set up."""

    def run(self) -> bool:
        """Obey messages until none comes any more. Return False after an error. Messages are sent by a thread of their
        own. So a process that waits until this one takes a message never waits for a message that this one sends."""
        torch.set_num_threads(1)
        keep_freed_memory()
        sender = threading.Thread(target=self._send, name="hetpipe-host-sender", daemon=True)
        sender.start()
        with suppress(EOFError), self._undo as undo:
            undo.callback(sender.join, SENDING)  # otherwise the process could end before its last message is sent
            undo.callback(self._answers.put, None)
            undo.callback(self._calls.close)
            undo.callback(self._peers.close)
            try:
                while True:
                    self._obey(self._wire.receive())
            except EOFError:
                raise
            except Exception as error:
                self._answers.put(orders.Broken(error))
                # What still comes is taken, so that the other process finds the error and not a broken connection.
                while not isinstance(error, NotPlain):
                    self._wire.receive()
                return False
        return True

    def _obey(self, message: Any) -> None:
        if isinstance(message, orders.Do) and (method := self._methods.get(message.method)) is not None:
            number, result = message.number, method(*message.arguments)
            if isinstance(result, Future):
                result.add_done_callback(partial(self._answer_later, number))
            else:
                self._answer(number, result)
        elif self._stage is None:
            raise NotPlain("a message for a stage that is not set up")
        else:
            try:
                self._stage.put(Parcel(self._device.given(self._peers.receive(message, self._timeout))))
            except RuntimeError as error:
                self._answers.put(Failure(message.minibatch, error))

    def _answer(self, number: int | None, result: Any) -> None:
        if number is not None:
            self._answers.put(orders.Brought(number, result))

    def _answer_later(self, number: int | None, done: Future[Any]) -> None:
        if not done.cancelled():
            self._answer(number, done.result())

    def _use_device(self, *devices: Any) -> None:
        self._device.use(*devices)
        self._held.device = self._device.device

    def _set_up(self, setup: orders.SetUp) -> None:
        torch.set_num_threads(setup.settings.torch_threads)
        stage = self._stage = self._made(setup)
        self._methods |= {
            "begin": partial(self._begin, stage),
            "publish": lambda version: stage.publish(version.replaced(self._held.found)),
            "take_layers": lambda layers: stage.take_layers(layers_of_data(layers, self._found, self._device.device)),
            "add_variants": lambda graphs: add_variants(stage.layers, graphs),
            "take": partial(self._take, stage),
            "hold": lambda reading, index, number: self._held.put(number, stage.stash.tensor(index, reading)),
            "look": lambda minibatch: self._device.taken(stage.state(minibatch)),
            "delivered": stage.delivered,
        }
        stage.start()
        self._undo.callback(stage.close)

    def _made(self, setup: orders.SetUp) -> HostedStage:
        set_modes(setup.modes)
        self._timeout, device = setup.timeout, self._device.device
        own = layers_of_data(setup.layers, self._found, device)
        numbers = [number for segment in setup.segments for number in segment.layers]
        layers = dict(zip(numbers, own, strict=True))
        if setup.pad is not None:
            self._emulation = Emulation([setup.pad] * (setup.stage + 1))
        self._device.seed(setup.settings.generators, setup.stage)
        watchdog = Watchdog(setup.timeout, lambda: True, lambda: f"stage {setup.stage} at its host")
        group = setup.group
        stage = HostedStage(
            lambda minibatch: self._answers.put(orders.Forgotten(minibatch)),
            index=setup.stage,
            device=device,
            segments=setup.segments,
            layers=[layers.get(number, own[0]) for number in range(max(numbers) + 1)],
            settings=replace(setup.settings, before_pass=self._emulation),
            watchdog=watchdog,
            compute_lock=ReadersWriterLock(watchdog),
            exclusively=lambda number, who: nullcontext(),  # this process computes nothing else
            done=self._done,
            streams=self._streams,
            planned=setup.planned,
            visits=setup.visits,
            group=group and replace(group, devices=self._device.members or [device] * len(group.devices)),
        )
        stage.place = self._device.place
        return stage

    def _begin(self, stage: HostedStage, version: Version, forwards: int) -> None:
        """Start with an empty pipeline at ``version``."""
        stage.stream.synchronize()  # what was dropped may still be computed, on the weights that come next
        stage.begin(version.replaced(self._held.found), forwards)

    def _take(self, stage: Stage, minibatch: int, numbers: Sequence[int]) -> orders.Taken:
        """Hand over the gradients of ``minibatch``. Keep each under its weight's number among ``numbers``."""
        taken = stage.take(minibatch)
        found = taken.gradients
        self._streams.user.join(taken.event, found.values(), [stage.device])
        gradients = self._keep(found, numbers)
        levels = [[level.now, level.most] for level in stage.memory.levels()]
        padded = None if self._emulation is None else self._emulation.stages[stage.index]
        return orders.Taken(gradients, levels, stage.stream.busy_seconds(), padded)

    def _keep(
        self, gradients: dict[int, Tensor], numbers: Sequence[int]
    ) -> dict[int, orders.KeptTensor | orders.SparseTensor]:
        """Hold ``gradients`` under ``numbers``. Return their looks."""
        looks: dict[int, orders.KeptTensor | orders.SparseTensor] = {}
        taken: set[int | None] = set()
        for number, each in gradients.items():
            if each.layout is torch.strided:
                if (memory := address_of(each)) in taken:  # autograd may use one tensor for several gradients
                    each = each.clone(memory_format=torch.preserve_format)
                taken.add(memory)
                self._held.put(numbers[number], each)
                looks[number] = orders.KeptTensor(each.dtype, list(each.shape), list(each.stride()))
            else:
                sparse = move(each, CPU)
                indices, values = strided_parts(sparse)  # even of a tensor that is not coalesced
                looks[number] = orders.SparseTensor(indices, values, list(sparse.shape), sparse.is_coalesced())
        return looks

    def _found(self, held: Any) -> Tensor:
        """Return the tensor that is called ``held`` in layers as data."""
        assert isinstance(held, orders.Held)
        tensor: Tensor = self._held.found(held)
        return tensor.data  # whose changes in place are not counted in graphs

    def _done(self, result: Result, event: StreamEvent | None) -> None:
        self._answers.put(result if event is None else Computed(result, event))

    def _send(self) -> None:
        torch.set_num_threads(1)
        while (message := self._answers.get()) is not None:
            try:
                if isinstance(message, orders.Forgotten):
                    self._peers.forget(message.minibatch)
                    continue
                self._wire.send(self._peers.hand_over(self._device.brought(message)))
            except OSError:
                return  # the other process is gone, which the other thread finds out as well
            except Exception as error:
                number = getattr(message, "minibatch", None)  # an answer has none
                broken = orders.Broken(error)
                self._wire.send(broken if number is None else Failure(number, error))
