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
from lightning_hetpipe.torch_private.graphs import OperatorOverload

CPU = torch.device("cpu")

MOST_WAITING = 64
"""Largest number of operators that are sent together."""


class HostMemory:
    """Memory of a host, as seen from this process. Any thread may use it.

    Operators that nothing waits for are sent together. :meth:`flush` sends the remaining ones.

    Args:
        send: Sends an order. The host obeys one after the other.
        wait: Waits for a future result, which :meth:`answered` sets.
        accelerates: Whether the host computes on an accelerator.
    """

    def __init__(
        self, send: Callable[[orders.Do], None], wait: Callable[[Future[Any]], Any], *, accelerates: bool = False
    ) -> None:
        self._send = send
        self._wait = wait
        self.accelerates = accelerates
        self._numbers = count()
        self._results: dict[int, Future[Any]] = {}  # to come
        self._ended: Exception | None = None
        self._asking = threading.Lock()  # never held while an order is sent
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
        number, result = next(self._numbers), Future[Any]()
        with self._asking:
            if self._ended is not None:
                raise self._ended
            self._results[number] = result
        with self._lock:
            self.flush()
            self._send(orders.Do(method, arguments, number))
        return result

    def ask(self, method: str, *arguments: Any) -> Any:
        """Make the host call ``method`` after all operators so far, and wait for the result."""
        return self._wait(self.begin(method, *arguments))

    def answered(self, answer: orders.Brought) -> None:
        """Set the result that an order waits for."""
        with self._asking:
            result = self._results.pop(answer.number, None)
        if result is not None:
            result.set_result(answer.result)

    def end(self, error: Exception) -> None:
        """Raise ``error`` in each thread that waits for a result, now and later."""
        with self._asking:
            self._ended = error
        for result in self._results.values():
            result.set_exception(error)

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
        *,
        waits: bool,
    ) -> None:
        """Run ``func`` at the host.

        Args:
            args, kwargs: Its arguments, with :class:`~lightning_hetpipe.hosts.orders.Held` for tensors at the host.
            results: Numbers of the tensors that it makes.
            waits: Whether it may be sent later, because no tensor of this process is among its arguments.

        Raises:
            NotPlain: if the operator is not torch's own, or an argument cannot be sent.
        """
        with self._lock:
            self._waiting.append(orders.Run(operator_name(func), args, kwargs, results))
            if not waits or len(self._waiting) >= MOST_WAITING:
                self.flush()

    def value(self, func: OperatorOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result, other than tensors, of ``func`` at the host."""
        return self.ask("run", [orders.Run(operator_name(func), args, kwargs, None)], ())

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
                free = [self._free.popleft() for _ in range(len(self._free))]
                order, self._waiting = orders.Do("run", [self._waiting, free]), []
                self._send(order)


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

    def put(self, number: int, value: Tensor) -> None:
        self._held[number] = move(value, self.device)

    def put_block(self, number: int, block: Tensor) -> None:
        """Add ``block``, which stays where other processes see it."""
        self._held[number] = block

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
        return None

    def found(self, value: Any) -> Any:
        """Return ``value``, on the host's device, with tensors in the place of their numbers."""
        if isinstance(value, orders.Held):
            return self._held[value.number]
        if isinstance(value, Tensor):
            return move(value, self.device)
        if isinstance(value, list | tuple):
            return [self.found(each) for each in value]
        return value
