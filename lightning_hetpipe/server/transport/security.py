"""Access to servers: certificates on both sides, a token, and no open address without certificates.

Callers that a server turns away are logged in few lines that are safe to print on a terminal.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from lightning_hetpipe.errors import SettingError

_FILES = ("ca", "certificate", "key")
_TOKEN = re.compile(r"[!-~]{1,4096}")  # characters that an HTTP header can carry

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Security:
    """Certificates and token of a server and of its clients.

    With ``ca``, ``certificate`` and ``key`` (paths of PEM files), connections are encrypted. Both sides must show a
    certificate that the ``ca`` signed, and the server's certificate must name the dialled host. With ``token``, every
    call must show the token. An address that is not a loopback address needs certificates, or ``insecure=True``.

    `from_environment` replaces None by HETPIPE_CA, HETPIPE_CERTIFICATE, HETPIPE_KEY and HETPIPE_TOKEN. If
    configurations are saved, give a token in no other way.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    token: str | None = field(default=None, repr=False)
    insecure: bool = False

    def from_environment(self, environment: Mapping[str, str] | None = None) -> Security:
        """Return a copy in which ``HETPIPE_*`` variables of ``environment`` (default: the process's) replace None."""
        known = os.environ if environment is None else environment
        left_out = [name for name in (*_FILES, "token") if getattr(self, name) is None]
        found: dict[str, Any] = {name: known.get(f"HETPIPE_{name.upper()}") or None for name in left_out}
        return replace(self, **found)

    @property
    def encrypted(self) -> bool:
        """True if connections are encrypted and both sides show certificates. Raises SettingError if some but not all
        of the three files are given."""
        missing = [name for name in _FILES if getattr(self, name) is None]
        if missing and len(missing) < len(_FILES):
            given = next(name for name in _FILES if name not in missing)
            raise SettingError(
                f"security.{given}={getattr(self, given)} needs security.{missing[0]} beside it; give ca, certificate"
                " and key, or none of them."
            )
        return not missing

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Read ca, certificate and key.

        Raises:
            SettingError: if a file cannot be read or is not PEM, or if the key does not belong to the certificate.
        """
        files = _pem("ca", self.ca), _pem("certificate", self.certificate), _pem("key", self.key)
        try:  # gRPC reports it only in its log, which is off
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(self.certificate or "", self.key, password="")
        except (ssl.SSLError, ValueError):
            raise SettingError(
                f"security.key={self.key} is not the key of security.certificate={self.certificate}; give the"
                " certificate and its own key, without a passphrase."
            ) from None
        return files

    def check(self, address: str) -> None:
        """Check that these settings are consistent and suffice for ``address``, ``host:port``.

        Raises:
            SettingError: if the address is malformed, or open to other machines and neither encrypted nor ``insecure``.
        """
        host = split(address)[0]
        if self.token is not None and not _TOKEN.fullmatch(self.token):
            raise SettingError(
                "security.token must be 1 to 4096 printable ASCII characters without spaces; make another."
            )
        if not self.encrypted and not self.insecure and not is_loopback(host):
            raise SettingError(
                f"address={address} is open to other machines and security has no certificates; give ca, certificate"
                " and key, or insecure=True on a network that you trust."
            )

    def admits(self, shown: str | bytes | None) -> bool:
        """Return True if a caller shows the right token. The time does not depend on where a wrong token differs."""
        if self.token is None:
            return True
        given = shown.encode("utf-8", "replace") if isinstance(shown, str) else shown or b""
        return hmac.compare_digest(given, self.token.encode())


def split(address: str) -> tuple[str, int]:
    """Split ``host:port``, with IPv6 addresses in brackets. Raise SettingError if the address is malformed."""
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]") if host.startswith("[") and host.endswith("]") else host
    number = int(port) if re.fullmatch(r"[0-9]{1,5}", port) else -1
    is_open_ipv6 = ":" in bare and bare == host
    if not bare or not 0 <= number < 1 << 16 or is_open_ipv6 or re.search(r"[\s/,]", host):
        raise SettingError(f"address={address} must be host:port, such as 127.0.0.1:5000 or [::1]:5000.")
    return bare, number


def joined(host: str, port: int) -> str:
    """Join host and port to an address for :func:`split`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches ``host``. A name other than localhost counts as another machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _pem(name: str, path: str | None) -> bytes:
    try:
        text = Path(path or "").read_bytes()
    except OSError as error:
        raise SettingError(
            f"security.{name}={path} cannot be read ({error.strerror}); give the path of a file."
        ) from None
    if b"-----BEGIN " not in text:
        raise SettingError(f"security.{name}={path} is no PEM file; give one that has a BEGIN line.")
    return text


EVERY = 60.0
"""Seconds within which a line is not repeated."""

MOST = 10
"""Largest number of lines within `EVERY` seconds."""

LONGEST = 300
"""Largest number of a peer's characters in a line."""


class Rejections:
    """Log of callers that were turned away, for any thread. ``say`` receives lines that begin with ``program``."""

    def __init__(
        self,
        say: Callable[[str], None] = _LOG.warning,
        now: Callable[[], float] = time.monotonic,
        program: str = "hetpipe server",
    ) -> None:
        self._say = say
        self._program = program
        self._now = now
        self._lock = threading.Lock()
        self._began = float("-inf")
        self._said: set[tuple[str, str]] = set()
        self._unsaid = 0

    def note(self, peer: str, why: str) -> None:
        """Log that ``peer``, in gRPC's notation, was turned away, unless this was just logged or lines are too many."""
        what = (host_of(peer), printable(why))
        with self._lock:
            unsaid = 0
            if (now := self._now()) - self._began >= EVERY:
                self._began, self._said, unsaid, self._unsaid = now, set(), self._unsaid, 0
            if what in self._said or len(self._said) >= MOST:
                self._unsaid += 1
                return
            self._said.add(what)
        more = f" (since the last such line {unsaid} more were)" if unsaid else ""
        self._say(f"{self._program}: turned away {what[0]}: {what[1]}{more}")


def host_of(peer: str) -> str:
    """Return the host of a peer, which gRPC writes as ipv4:10.0.0.1:4711 or ipv6:%5B::1%5D:4711."""
    return printable(unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]") or peer)


def printable(text: str) -> str:
    """Return the beginning of untrusted ``text`` as one line without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:LONGEST])
