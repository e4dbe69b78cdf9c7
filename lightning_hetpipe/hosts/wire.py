"""Wire between two processes, such as a leader and a host: messages as frames on a connected socket, in order.

    | length of the text, 8 bytes | text | the bytes of each tensor |

The bytes of large tensors go from the sender's tensor to the socket, and from there into the receiver's tensor.
:class:`HostConnection` is the leader's end.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.hosts import orders
from lightning_hetpipe.hosts.secured_socket import Connection, Refused, connect, fill
from lightning_hetpipe.pipeline import stage_messages
from lightning_hetpipe.pipeline.plain_code import NotPlain, PlainCode
from lightning_hetpipe.server.transport.security import Security

_LENGTH = struct.Struct(">Q")

SMALL = 1 << 16
"""Largest bytes of a tensor that is sent together with the text."""

LONGEST = 1 << 30
"""Largest bytes of a message without its tensors. Graphs of large models take a few million."""

CODE = PlainCode([*stage_messages.RECORDS, *orders.RECORDS])

ANSWERING = 60.0
"""Seconds in which a host must answer, including its import of torch."""


class Wire:
    """One end of the wire at ``connection``. Any thread may send, but only one receives."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Send ``message``. Its tensors must not change meanwhile.

        Raises:
            NotPlain: if it is no message.
            OSError: if the other process has ended.
        """
        text, tensors = CODE.write(message)
        with self._lock:
            small = bytearray(_LENGTH.pack(len(text)) + text)
            try:
                for tensor in tensors:
                    if len(tensor) > SMALL:
                        self._connection.sendall(small)
                        self._connection.sendall(tensor)
                        small = bytearray()
                    else:
                        small += tensor
                self._connection.sendall(small)
            except OSError:
                raise
            except BaseException:  # such as Ctrl-C: nobody could read what follows a part of a message
                self.kill()
                raise

    def receive(self) -> Any:
        """Return the next message.

        Raises:
            EOFError: if no other message comes.
            NotPlain: for bytes that are no message.
        """
        head = bytearray(_LENGTH.size)
        self._fill(memoryview(head))
        (length,) = _LENGTH.unpack(head)
        if length > LONGEST:
            raise NotPlain(f"a message of {length} bytes beside its tensors")
        text = bytearray(length)
        self._fill(memoryview(text))
        return CODE.read(bytes(text), self._take)

    def end(self) -> None:
        """End sending. What the other process has sent can still be received."""
        with suppress(OSError):  # it has ended
            self._connection.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """End the connection in both directions, and with it a host's process."""
        with suppress(OSError):  # it has ended
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()

    def _take(self, length: int) -> Tensor:
        found = torch.empty(length, dtype=torch.uint8)
        array: Any = found.numpy()
        self._fill(memoryview(array))
        return found

    def _fill(self, memory: memoryview) -> None:
        with suppress(OSError):  # it has ended, or its machine cannot be reached any more
            if fill(self._connection, memory):
                return
        raise EOFError("the other process has ended")


class HostConnection:
    """Connection to a host at ``address``, with the certificates and the token of ``security``.

    ``node`` is the name of the host's node in a plan, for people.

    Raises:
        SettingError: if nobody answers there, or if this process is not let in.
    """

    def __init__(self, address: str, security: Security, node: str = "") -> None:
        self._address = address
        self.node = node
        setting = f"stage_hosts: the host at {address}"
        security.check(address)
        try:
            _, connection = connect(address, security, ANSWERING)
        except Refused as refused:
            raise SettingError(f"{setting} does not let this process in: {refused}") from None
        except TimeoutError:
            raise SettingError(
                f"{setting} does not answer within {ANSWERING:.0f} s; is that hetpipe-host, and do both have"
                " certificates, or neither?"
            ) from None
        except OSError as error:
            raise SettingError(
                f"{setting}: nobody answers there ({error.strerror or error}); start hetpipe-host on that machine, with"
                " address=0.0.0.0 and this port, or correct the address"
            ) from None
        self.wire = Wire(connection)

    @property
    def name(self) -> str:
        return f"host {self._address}"

    def told(self) -> str:
        """Describe how the host has ended, as the end of a sentence."""
        there = f", or {self.node} cannot be reached any more; see the output there" if self.node else ""
        return f"has closed the connection{there or ', or its machine cannot be reached any more'}"
