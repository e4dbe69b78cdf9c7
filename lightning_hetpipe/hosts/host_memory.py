"""Tensors at a host: their numbers in this process, and the table of them at the host."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lightning_hetpipe.hosts import orders
from lightning_hetpipe.pipeline.graph_code import operator_name, operator_of
from lightning_hetpipe.pipeline.streams import move
from lightning_hetpipe.pipeline.values import nested_tensors
from lightning_hetpipe.torch_private.graphs import OperatorOverload, schema_of

CPU = torch.device("cpu")

MOST_WAITING = 64
"""Largest number of operators that are sent together."""


class HostMemory:
    """Memory of a host, as seen from this process. Any thread may use it.

    Operators that nothing waits for are sent together. :meth:`flush` sends the remaining ones.

    Args:
        send: Sends an order. The host obeys one after the other.
        begin: Sends an order, and returns its future result.
        wait: Waits for a future result.
        accelerates: Whether the host computes on an accelerator.
    """

    def __init__(
        self,
        send: Callable[[orders.Do], None],
        begin: Callable[[orders.Do], Future[Any]],
        wait: Callable[[Future[Any]], Any],
        *,
        accelerates: bool = False,
    ) -> None:
        self._send = send
        self._begin = begin
        self._wait = wait
        self.accelerates = accelerates
        self._numbers = count()
        self._handles: WeakValueDictionary[int, Handle] = WeakValueDictionary()
        self.tensors: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        """Tensors of this process with values at the host, by their ``id``."""
        self._waiting: list[orders.Run] = []
        self._free: deque[int] = deque()
        self._lock = threading.RLock()  # garbage may be collected within

    def tell(self, method: str, *arguments: Any) -> None:
        """Make the host call ``method``, without a result, after all operators so far."""
        with self._lock:
            self.flush()
            self._send(orders.Do(method, arguments))

    def begin(self, method: str, *arguments: Any) -> Future[Any]:
        """Make the host call ``method`` after all operators so far. Return the future result."""
        with self._lock:
            self.flush()
            return self._begin(orders.Do(method, arguments))

    def ask(self, method: str, *arguments: Any) -> Any:
        """Make the host call ``method`` after all operators so far, and wait for the result."""
        return self._wait(self.begin(method, *arguments))

    def new(self) -> Handle:
        """Return the handle of a tensor that the host is about to have."""
        handle = Handle(self, next(self._numbers))
        self._handles[handle.number] = handle
        return handle

    def put(self, value: Tensor) -> Handle:
        """Copy ``value`` to the host. Raise NotPlain if the tensor cannot be sent."""
        handle = self.new()
        self.tell("put", handle.number, value)
        return handle

    def block(self, size: int) -> Handle:
        """Make zeroed bytes at the host, which servers on its machine see."""
        handle = self.new()
        self.tell("put_block", handle.number, size)
        return handle

    def run(
        self,
        func: OperatorOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        results: Sequence[int],
        answers: Sequence[int],
        *,
        waits: bool,
    ) -> Sequence[Tensor]:
        """Run ``func`` at the host. Return the changed arguments that are not there.

        Args:
            args, kwargs: Its arguments, with :class:`~lightning_hetpipe.hosts.orders.Held` for tensors at the host.
            results: Numbers of the tensors that it makes.
            answers: Places of changed arguments, some of which are not at the host.
            waits: Whether it may be sent later, because no tensor of this process is among its arguments.

        Raises:
            NotPlain: if the operator is not torch's own, or an argument cannot be sent.
        """
        order = orders.Run(operator_name(func), args, kwargs, results, answers)
        if answers:
            changed: Sequence[Tensor] = self._asked(order)
            return changed
        with self._lock:
            self._waiting.append(order)
            if not waits or len(self._waiting) >= MOST_WAITING:
                self.flush()
        return ()

    def value(self, func: OperatorOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result, other than tensors, of ``func`` at the host."""
        return self._asked(orders.Run(operator_name(func), args, kwargs, None, ()))

    def bring(self, numbers: Sequence[int]) -> Sequence[Tensor]:
        """Return copies of tensors that are at the host."""
        values: Sequence[Tensor] = self.ask("bring", numbers)
        return values

    def close(self) -> None:
        """Bring all tensors in use from the host, before it ends."""
        handles = [*self._handles.values()]
        for handle, value in zip(handles, self.bring([each.number for each in handles]), strict=True):
            handle.value = value

    def let_go(self, number: int) -> None:
        """Release a tensor. The host learns of it with the next operator."""
        self._free.append(number)  # no lock: garbage is collected anywhere

    def flush(self) -> None:
        """Send the waiting operators."""
        with self._lock:
            if self._waiting:
                self._send(self._taken())

    def _asked(self, order: orders.Run) -> Any:
        with self._lock:
            self._waiting.append(order)
            result = self._begin(self._taken())
        return self._wait(result)

    def _taken(self) -> orders.Do:
        free = [self._free.popleft() for _ in range(len(self._free))]
        taken, self._waiting = orders.Do("run", [self._waiting, free]), []
        return taken


class Handle:
    """A tensor in ``memory``, by ``number``. After the host has ended, ``value`` is the tensor itself."""

    __slots__ = ("__weakref__", "memory", "name", "number", "value")

    def __init__(self, memory: HostMemory, number: int) -> None:
        self.memory = memory
        self.number = number
        self.name = orders.Held(number)
        self.value: Tensor | None = None

    @property
    def owner(self) -> HostMemory | None:
        """The memory, or None after the host has ended."""
        return self.memory if self.value is None else None

    def bring(self) -> Tensor:
        """Return a copy of the tensor, or after the host has ended the tensor itself."""
        return self.memory.bring([self.number])[0] if self.value is None else self.value

    def __del__(self) -> None:
        if self.value is None:
            self.memory.let_go(self.number)


class HeldTensors:
    """The table at the host. Its tensors are on ``device``, where operators run."""

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}
        self.device = CPU

    def __len__(self) -> int:
        return len(self._held)

    def put(self, number: int, value: Tensor) -> None:
        self._held[number] = move(value, self.device)

    def put_block(self, number: int, block: Tensor) -> None:
        """Add ``block``, which stays where other processes see it."""
        self._held[number] = block

    def get(self, number: int) -> Tensor:
        return self._held[number]

    def bring(self, numbers: Sequence[int]) -> list[Tensor]:
        return [self._held[number] for number in numbers]

    def run(self, operators: Sequence[orders.Run], free: Sequence[int]) -> Any:
        """Run operators, and then drop the tensors numbered ``free``. Return the answer to the last operator, or None.

        Raises:
            NotPlain: if an operator is not torch's own.
        """
        answer = None
        with torch.no_grad():
            for each in operators:
                answer = self._run(each)
        for number in free:
            self._held.pop(number, None)
        return answer

    def _run(self, order: orders.Run) -> Any:
        func = operator_of(order.operator)
        args = [self.found(each) for each in order.args]
        kwargs = {name: self.found(each) for name, each in order.kwargs.items()}
        if "device" in kwargs:
            kwargs["device"] = self.device  # in place of the device as the other process sees it
        result = func(*args, **kwargs)
        if order.results is None:
            return result
        if order.results:
            known = {id(each) for each in nested_tensors((args, kwargs))}
            new = [each for each in nested_tensors(result) if id(each) not in known]
            self._held.update(zip(order.results, new, strict=True))
        if not order.answers:
            return None
        changed: list[Tensor] = []
        for place in order.answers:
            if place < len(args):
                changed += _sent(args[place], order.args[place])
            else:
                name = schema_of(func).arguments[place].name
                changed += _sent(kwargs.get(name), order.kwargs.get(name))
        return changed

    def found(self, value: Any) -> Any:
        """Return ``value``, on the host's device, with tensors in the place of their numbers."""
        if isinstance(value, orders.Held):
            return self._held[value.number]
        if isinstance(value, Tensor):
            return move(value, self.device)
        if isinstance(value, list | tuple):
            return [self.found(each) for each in value]
        return value


def _sent(value: Any, sent: Any) -> list[Tensor]:
    """Return the tensors of ``value`` that came with the order."""
    if isinstance(value, list):
        return [each for own, its in zip(value, sent, strict=True) for each in _sent(own, its)]
    return [value] if isinstance(sent, Tensor) else []
