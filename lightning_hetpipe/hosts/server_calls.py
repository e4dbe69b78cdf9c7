"""Calls of parameter servers that a host makes for the client of its virtual worker, with the host's own weights.

The process of Lightning's loop decides when and what to call, and gets the answers without their bodies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.hosts import orders
from lightning_hetpipe.hosts.host_memory import HostMemory
from lightning_hetpipe.hosts.remote_tensor import RemoteTensor
from lightning_hetpipe.server.process.held_weights import HERE
from lightning_hetpipe.server.process.sessions import SessionChannel
from lightning_hetpipe.server.transport.interface import STATUS, CallRefused, Channel, Unreachable
from lightning_hetpipe.server.transport.security import Security

if TYPE_CHECKING:
    from lightning_hetpipe.server.transport.grpc_channel import GrpcChannel

AT_ONCE = 8
"""Largest number of calls that a host makes at the same time."""

GRACE = 10.0
"""Seconds by which a host may answer later than the server that it calls."""

REACHING = 5.0
"""Seconds in which a server must answer a host that calls it for the first time."""


class HostHolder:
    """The host as a :class:`~lightning_hetpipe.server.process.held_weights.WeightHolder`, in Lightning's process.

    Args:
        memory: Memory of the host.
        end: Ends the host, which has not answered for the given seconds, and returns the error for it.
    """

    def __init__(self, memory: HostMemory, end: Callable[[float], Exception]) -> None:
        self._memory = memory
        self._end = end
        self._reached: dict[str, str | None] = {}

    def block(self, size: int) -> Tensor:
        return RemoteTensor(self._memory.block(size), torch.empty(size, dtype=torch.uint8, device="meta"))

    def call(
        self, channel: Channel, method: str, header: bytes, body: Tensor | None, into: Tensor | None, timeout: float
    ) -> bytes:
        assert isinstance(channel, SessionChannel)
        return self._called(channel.address, channel.method(method), timeout, header.decode(), _held(body), _held(into))

    def cannot_reach(self, channel: Channel) -> str | None:
        """Return why the host cannot call the server of ``channel``, or None if it can."""
        assert isinstance(channel, SessionChannel)
        address = channel.address
        if address not in self._reached:
            try:
                self._called(address, STATUS, REACHING)
                self._reached[address] = None
            except (CallRefused, Unreachable) as reason:
                self._reached[address] = str(reason)
        return self._reached[address]

    def _called(
        self,
        address: str,
        method: str,
        timeout: float,
        header: str = "",
        body: orders.Held | None = None,
        into: orders.Held | None = None,
    ) -> bytes:
        longest, call = timeout + GRACE, (address, method, timeout, header, body, into)
        try:
            answer: orders.ServerAnswered = self._memory.begin("call_server", *call).result(longest)
        except TimeoutError:
            if body is None and into is None:
                raise Unreachable(f"the host that calls {address} has not answered for {longest:g} s") from None
            raise self._end(longest) from None  # else it could still use the blocks, in midst of the next call
        if answer.refused is not None:
            raise CallRefused(answer.refused)
        if answer.silent is not None:
            raise Unreachable(answer.silent)
        return answer.header.encode()


class ServerCalls:
    """The host's end, which calls servers with the certificates and the token of ``security``."""

    def __init__(self, security: Security) -> None:
        self._security = security
        self._channels: dict[str, GrpcChannel] = {}
        self._lock = threading.Lock()
        self._ended = False
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="hetpipe-host-calls")

    def make(self, *call: Any) -> Future[orders.ServerAnswered]:
        """Make the call of :meth:`_made` in another thread, and return its future answer."""
        return self._pool.submit(self._made, *call)

    def close(self) -> None:
        """End the running calls."""
        with self._lock:
            self._ended, channels = True, [*self._channels.values()]
        for channel in channels:
            channel.close()
        self._pool.shutdown(cancel_futures=True)

    def _made(
        self, address: str, method: str, timeout: float, header: str, body: Tensor | None, into: Tensor | None
    ) -> orders.ServerAnswered:
        try:
            answer = HERE.call(self._channel(address), method, header.encode(), body, into, timeout)
            return orders.ServerAnswered(answer.decode())
        except Unreachable as reason:
            return orders.ServerAnswered(silent=str(reason))
        except (CallRefused, SettingError) as reason:
            return orders.ServerAnswered(refused=str(reason))
        except Exception as error:
            return orders.ServerAnswered(refused=f"{type(error).__name__}: {error}")

    def _channel(self, address: str) -> GrpcChannel:
        from lightning_hetpipe.server.transport.grpc_channel import GrpcChannel  # few hosts call servers

        with self._lock:
            if self._ended:
                raise Unreachable("this host ends")
            if address not in self._channels:
                self._channels[address] = GrpcChannel(address, self._security)
            return self._channels[address]


def _held(block: Tensor | None) -> orders.Held | None:
    if block is None:
        return None
    assert isinstance(block, RemoteTensor)
    return block.handle.name
