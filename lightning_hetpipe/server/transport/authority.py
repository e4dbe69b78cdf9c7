"""Certificates of a cluster, by the program openssl: an authority, and one certificate that names all hosts."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning_hetpipe.errors import SettingError

CA, CA_KEY, CERTIFICATE, KEY = "ca.pem", "ca.key", "certificate.pem", "key.pem"
VARIABLES = "hetpipe.sh"
"""A shell's commands that have all programs find the others, with the token."""

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(\.(?!-)[A-Za-z0-9-]{1,63})*")
_SECONDS = 60.0

_SCRIPT = """\
# Of hetpipe-certificates; the same on every machine, and nobody else's to read.
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
export HETPIPE_CA=$here/{ca} HETPIPE_CERTIFICATE=$here/{certificate} HETPIPE_KEY=$here/{key}
export HETPIPE_TOKEN={token}
"""


def make(folder: Path, hosts: Sequence[str], days: int) -> bool:
    """Make what all machines of a cluster need, in ``folder``, which only this user may read.

    An authority and a token that are there are kept, so that other machines' certificates still fit.

    Args:
        folder: Is made where it is not there.
        hosts: Addresses and names by which machines reach each other.
        days: Those for which the certificates hold.

    Returns:
        True if there was an authority.

    Raises:
        SettingError: for hosts that no certificate can name, without openssl, and if a file cannot be written.
    """
    names = ",".join(_alternative(host) for host in hosts)
    if shutil.which("openssl") is None:
        raise SettingError(
            "certificates are made by the program openssl, which is not installed; install it, such as with apt"
            " install openssl"
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = (folder / CA_KEY).exists() and (folder / CA).exists()
        with TemporaryDirectory(dir=folder) as made:  # mode 700; moved when all is well
            new = Path(made)
            if known:
                for name in (CA, CA_KEY):
                    shutil.copy(folder / name, new / name)
            else:
                subject = ("-subj", "/CN=hetpipe authority", "-days", str(days))
                _openssl(new, "req", "-x509", *_NEW_KEY, *subject, "-keyout", CA_KEY, "-out", CA)
            _openssl(new, "req", *_NEW_KEY, "-subj", "/CN=hetpipe", "-keyout", KEY, "-out", "request.pem")
            (new / "names").write_text(f"subjectAltName={names}\n")
            signed = ("-CA", CA, "-CAkey", CA_KEY, "-CAcreateserial", "-days", str(days), "-extfile", "names")
            _openssl(new, "x509", "-req", "-in", "request.pem", *signed, "-out", CERTIFICATE)
            token = _token(folder) or secrets.token_hex(32)
            (new / VARIABLES).write_text(_SCRIPT.format(ca=CA, certificate=CERTIFICATE, key=KEY, token=token))
            for name in (CA, CA_KEY, CERTIFICATE, KEY, VARIABLES):
                (new / name).chmod(0o600)
                os.replace(new / name, folder / name)
    except OSError as error:
        raise SettingError(f"folder={folder} cannot be written: {error.strerror or error}") from error
    return known


def _alternative(host: str) -> str:
    """``host`` as a certificate names it."""
    try:
        return f"IP:{ipaddress.ip_address(host.strip('[]'))}"
    except ValueError:
        pass
    if not _NAME.fullmatch(host) or re.fullmatch(r"[0-9.]*", host):
        raise SettingError(
            f"hosts has {host!r}, which is no address and no name; give those by which machines reach each other,"
            " without ports, such as hosts=[10.0.0.1,node2]"
        )
    return f"DNS:{host}"


def _token(folder: Path) -> str | None:
    """The token that ``folder`` has."""
    script = folder / VARIABLES
    found = re.search(r"^export HETPIPE_TOKEN=(\S+)$", script.read_text(), re.MULTILINE) if script.exists() else None
    return None if found is None else found[1]


def _openssl(folder: Path, *words: str) -> None:
    done = subprocess.run(
        ["openssl", *words], cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if done.returncode:
        raise SettingError(f"openssl {words[0]} has failed: {done.stderr.strip() or done.returncode}")
