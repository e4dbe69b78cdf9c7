"""Connection to a host on another machine, which `hetpipe-host` there has made for it."""

from __future__ import annotations

import socket
from contextlib import suppress

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.hosts.secured_socket import RELEASE, Refused, connect
from lightning_hetpipe.hosts.wire import Wire
from lightning_hetpipe.server.transport.security import Security

ANSWERING = 60.0
"""Seconds in which a host has to answer: its process imports torch meanwhile."""


class HostConnection:
    """A host at ``address``.

    Args:
        address: The address.
        security: Certificates and token.
        node: Name of its node of a plan, for people.

    Raises:
        SettingError: if nobody answers there, or this process is not let in.
    """

    def __init__(self, address: str, security: Security, node: str = "") -> None:
        self._address = address
        self.node = node
        setting = f"stage_hosts: the host at {address}"
        security.check(address)
        try:
            _, connection = connect(address, security, RELEASE, ANSWERING)
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
        self._connection = connection
        self.wire = Wire(connection)

    @property
    def name(self) -> str:
        return f"host {self._address}"

    def told(self) -> str:
        """Say how it has ended, as the end of a sentence."""
        there = f", or {self.node} cannot be reached any more; see the output there" if self.node else ""
        return f"has closed the connection{there or ', or its machine cannot be reached any more'}"

    def kill(self) -> None:
        """End the connection, and with it the process."""
        with suppress(OSError):  # it has ended
            self._connection.shutdown(socket.SHUT_RDWR)
