"""Encrypted sockets that one thread may read while another thread writes, the login at both ends, and a listener.

The listener (:class:`Door`) limits how many callers wait.
"""

from __future__ import annotations

import errno
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import Any

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.transport.interface import RELEASE as PACKAGE
from lightning_hetpipe.server.transport.security import Security, printable, split

RELEASE = f"lightning_hetpipe {PACKAGE} with torch {metadata.version('torch')}"
"""Release that both ends must have, so that operators have the same names and compute the same bits."""

INTRODUCING = 20.0
"""Seconds in which a caller must show its token, release and certificate."""

UNREACHABLE = 60.0
"""Seconds after which a machine that does not answer counts as lost."""

_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
"""Errors of accepting a connection after which the next connection may be accepted."""

_AGAIN = 0.1  # seconds until it is tried
_PART = 1 << 18
_HEAD = struct.Struct(">I")
_TLS = b"\x16"  # the type of the record that begins a handshake
_LONGEST = 1 << 16  # bytes

_ANOTHER_PROTOCOL = "it speaks another protocol"
_NO_CERTIFICATE = "it shows no certificate: it is another program, or was started without HETPIPE_CERTIFICATE"


class Refused(Exception):
    """Error that the other end does not let this process in, for the reason in the message."""


class SecuredSocket:
    """A connection over ``raw`` with certificates on both sides.

    ``ssl.SSLSocket`` has one state for both directions, which two threads must not use at once. Here the state is
    locked only while bytes are encrypted or decrypted, never during a wait for the network.

    Args:
        raw: Connected socket with a timeout, which limits the handshake.
        host: Name that the other side's certificate must have, or None at the side that was called.

    Raises:
        SettingError: if the files of ``security`` cannot be used.
        Refused: if the other side shows no certificate that the ``ca`` has signed.
    """

    def __init__(self, raw: socket.socket, security: Security, host: str | None) -> None:
        security.read()  # says what is wrong with the files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if host is None else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(str(security.certificate), security.key, password="")
        context.load_verify_locations(security.ca)
        context.verify_mode = ssl.CERT_REQUIRED
        self._raw = raw
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._state = context.wrap_bio(self._arrived, self._leaving, server_side=host is None, server_hostname=host)
        self._crypting, self._sending = threading.Lock(), threading.Lock()
        try:
            self._shake_hands()
        except ssl.SSLError as error:
            raise Refused(_unfit(error)) from None

    def _shake_hands(self) -> None:
        while True:
            try:
                self._state.do_handshake()
            except ssl.SSLWantReadError:
                self._raw.sendall(self._leaving.read())
                if not (data := self._raw.recv(_PART)):
                    raise Refused("the connection was closed while certificates were shown") from None
                self._arrived.write(data)
            else:
                self._raw.sendall(self._leaving.read())
                return

    def sendall(self, data: Any) -> None:
        memory = memoryview(data).cast("B")
        with self._sending:
            for first in range(0, len(memory), _PART):
                with self._crypting:
                    self._state.write(memory[first : first + _PART])
                    crypted = self._leaving.read()
                self._raw.sendall(crypted)

    def recv_into(self, memory: memoryview) -> int:
        while True:
            with self._crypting:
                try:
                    count: Any = self._state.read(len(memory), memory)  # with a buffer, the number of bytes
                    return int(count)
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLError as error:
                    raise ConnectionError(str(error)) from None
            if not (data := self._raw.recv(_PART)):
                return 0
            with self._crypting:
                self._arrived.write(data)

    def shutdown(self, how: int) -> None:
        self._raw.shutdown(how)

    def close(self) -> None:
        self._raw.close()


Connection = socket.socket | SecuredSocket


def _unfit(error: ssl.SSLError) -> str:
    if error.reason == "WRONG_VERSION_NUMBER":
        return _NO_CERTIFICATE
    return (
        f"certificates do not fit ({error.reason or error}): those of both machines must be of one authority, and name"
        " the hosts; docs/several-machines.md has the commands that make them"
    )


def check_names(security: Security, host: str) -> None:
    """Check that the certificate names ``host``, at which other nodes look for this process.

    Raises:
        SettingError: if it does not, or if the files cannot be used.
    """
    if not security.encrypted:
        return
    ours, theirs = socket.socketpair()

    def shown() -> None:
        with theirs, suppress(Refused, OSError):
            SecuredSocket(theirs, security, None)

    thread = threading.Thread(target=shown, name="hetpipe-own-certificate", daemon=True)
    thread.start()
    try:
        with ours:
            SecuredSocket(ours, security, host)
    except Refused as refused:
        raise SettingError(
            f"HETPIPE_CERTIFICATE={security.certificate} does not fit {host}, where the other nodes look for this one"
            f" ({refused}); make one that names all of them, by the commands of docs/several-machines.md"
        ) from None
    finally:
        thread.join()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections at ``host``. Port 0 takes any free port.

    Raises:
        OSError: if the address is not available.
    """
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


class Door:
    """Acceptor of connections, each in a thread of its own, from :meth:`open` to :meth:`close`.

    Args:
        serve: Called with a connection, which is closed afterwards, and with its origin.
        most: Largest number of connections. For a further connection, the longest silent one is ended.
        name: Name of the threads.
    """

    def __init__(
        self, listener: socket.socket, serve: Callable[[socket.socket, str], None], most: int, name: str
    ) -> None:
        self._listener, self._serve, self._most, self._name = listener, serve, most, name
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._there: dict[socket.socket, bool] = {}  # in the order in which they have come; True for a silent one
        self._closed = False

    def open(self) -> None:
        """Start to accept connections."""
        threading.Thread(target=self._take, name=self._name, daemon=True).start()

    def heard(self, connection: socket.socket) -> bool:
        """Record that the caller has sent something. Return False if ``connection`` was ended for another one."""
        with self._lock:
            is_there = connection in self._there
            if is_there:
                self._there[connection] = False
        return is_there

    def settle(self, connection: socket.socket) -> None:
        """Stop counting ``connection``."""
        with self._lock:
            self._there.pop(connection, None)

    def close(self, seconds: float | None = None) -> None:
        """Stop accepting connections, and wait up to ``seconds`` for the threads of existing connections."""
        with self._lock:
            self._closed, threads = True, [*self._threads]
        with suppress(OSError):  # wakes the thread that takes connections, which closing alone does not
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        while self._end_silent():
            pass
        until = None if seconds is None else time.monotonic() + seconds
        for thread in threads:
            thread.join(until and max(0.0, until - time.monotonic()))

    def _take(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if error.errno not in _PASSING:
                    return  # the listener is shut down
                if not self._end_silent():
                    time.sleep(_AGAIN)
                continue
            if len(self._there) >= self._most and not self._end_silent():
                connection.close()
                continue
            host = peer[0] if peer else ""
            thread = threading.Thread(target=self._run, args=(connection, host), name=self._name, daemon=True)
            with self._lock, suppress(RuntimeError):  # this process may have no more threads
                if not self._closed:
                    thread.start()
                    self._threads.add(thread)
                    self._there[connection] = True
                    continue
            connection.close()

    def _run(self, connection: socket.socket, host: str) -> None:
        try:
            with connection:
                self._serve(connection, host)
        finally:
            self.settle(connection)
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _end_silent(self) -> bool:
        """End the longest silent connection, if any. Its thread finds it closed."""
        with self._lock:
            connection = next((each for each, is_silent in self._there.items() if is_silent), None)
            if connection is None:
                return False
            del self._there[connection]
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        return True


def connect(address: str, security: Security, seconds: float, **more: Any) -> tuple[socket.socket, Connection]:
    """Connect to ``address``. Both sides show the credentials of ``security``, and their `RELEASE`.

    This side also shows ``more``, as JSON values. Return the socket, then without a timeout, and the connection over
    it.

    Raises:
        Refused: if one side does not let the other in.
        OSError: if nobody answers there.
        TimeoutError: if an answer takes longer than ``seconds``.
        SettingError: if the certificates cannot be used.
    """
    raw = socket.create_connection(split(address), seconds)
    try:
        keep_alive(raw)
        connection: Connection = SecuredSocket(raw, security, split(address)[0]) if security.encrypted else raw
        tell(connection, {"token": security.token, "release": RELEASE, **more})
        answer = hear(connection)
        if reason := answer.get("refused"):
            raise Refused(str(reason))
        if answer.get("release") != RELEASE:
            raise Refused(f"it is of release {answer.get('release')}, and this process of {RELEASE}")
    except BaseException:
        raw.close()
        raise
    raw.settimeout(None)
    return raw, connection


def admit(
    raw: socket.socket,
    security: Security,
    seconds: float,
    refused: Callable[[dict[str, Any]], str | None] = lambda shown: None,
) -> tuple[Connection, dict[str, Any]]:
    """Let in a caller of :func:`connect`. Return the connection over ``raw``, and what the caller has shown.

    ``refused`` returns why a caller with the right token and release is not let in, or None.

    Raises:
        Refused: if it shows another token, release or certificate, or for the reason of ``refused``.
        OSError: if it does not show them within ``seconds``.
    """
    raw.settimeout(seconds)
    keep_alive(raw)
    with _within(raw, seconds):
        connection: Connection = SecuredSocket(raw, security, None) if security.encrypted else raw
        shown = hear(connection)
        reason: str | None
        if not security.admits(shown.get("token") if isinstance(shown.get("token"), str) else None):
            reason = "HETPIPE_TOKEN is another one there; set the same one for both"
        elif shown.get("release") != RELEASE:
            said = printable(str(shown.get("release")))
            reason = f"it is of release {RELEASE}, and the caller of {said}; install the same on both"
        else:
            reason = refused(shown)
        tell(connection, {"release": RELEASE} if reason is None else {"refused": reason})
    if reason is not None:
        raise Refused(reason)
    raw.settimeout(None)
    return connection, shown


@contextmanager
def _within(raw: socket.socket, seconds: float) -> Iterator[None]:
    """Limit the context to ``seconds`` by a TimeoutError. The timeout of ``raw`` itself restarts with each byte."""
    over = threading.Event()

    def end() -> None:
        over.set()
        with suppress(OSError):  # the other side has ended
            raw.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (Refused, OSError):
        if over.is_set():
            raise TimeoutError(f"it has not shown who it is within {seconds:g} s") from None
        raise
    finally:
        timer.cancel()


def unlike(first: bytes, security: Security) -> str | None:
    """Return why :func:`admit` would refuse a caller with these first bytes (at most four), or None if it might not."""
    if security.encrypted:
        return None if first[:1] == _TLS else _NO_CERTIFICATE
    too_long = len(first) == _HEAD.size and _HEAD.unpack(first)[0] > _LONGEST
    return _ANOTHER_PROTOCOL if too_long else None


def tell(connection: Connection, message: dict[str, Any]) -> None:
    """Send ``message`` as JSON."""
    text = json.dumps(message).encode()
    connection.sendall(_HEAD.pack(len(text)) + text)


def hear(connection: Connection) -> dict[str, Any]:
    """Receive a message of the other side.

    Raises:
        Refused: if the other side has closed the connection, or sends something else.
    """
    (length,) = _HEAD.unpack(_heard(connection, _HEAD.size))
    if length > _LONGEST:
        raise Refused(_ANOTHER_PROTOCOL)
    try:
        found = json.loads(_heard(connection, length))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Refused(_ANOTHER_PROTOCOL)
    return found


def _heard(connection: Connection, length: int) -> bytearray:
    found = bytearray(length)
    with suppress(ConnectionError):
        if fill(connection, memoryview(found)):
            return found
    raise Refused("it has closed the connection")


def fill(connection: Connection, memory: memoryview) -> bool:
    """Receive as many bytes as ``memory`` has. Return False if the other side ends the connection before."""
    while len(memory):
        if not (count := connection.recv_into(memory)):
            return False
        memory = memory[count:]
    return True


def keep_alive(connection: socket.socket) -> None:
    """Send small messages at once, and notice after :data:`UNREACHABLE` seconds that the other machine is gone.

    Idle connections are probed. Data that was sent and not received has a limit of its own.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    third, sixth = max(1, round(UNREACHABLE / 3)), max(1, round(UNREACHABLE / 6))
    limits = {"KEEPIDLE": third, "KEEPINTVL": sixth, "KEEPCNT": 4, "USER_TIMEOUT": round(1000 * UNREACHABLE)}
    for name, value in limits.items():
        if hasattr(socket, f"TCP_{name}"):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
