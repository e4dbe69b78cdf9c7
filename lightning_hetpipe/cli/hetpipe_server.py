"""The commands that serve until a signal ends the process.

hetpipe-server serves parameters, or prints the status of a running server. hetpipe-host computes stages for leaders on
other machines.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from textwrap import indent
from typing import Annotated, Any, Literal, NoReturn

import hydra
from omegaconf import DictConfig, OmegaConf

from lightning_hetpipe.cli import config_checks
from lightning_hetpipe.cli.composition import SWEEPS
from lightning_hetpipe.cli.entry import enter, job, report
from lightning_hetpipe.cli.start_up import ConsoleScript
from lightning_hetpipe.cli.targets import YAML, built
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model.units import in_bytes
from lightning_hetpipe.planning.plan.table import aligned
from lightning_hetpipe.server.transport.interface import STATUS, CallRefused
from lightning_hetpipe.server.transport.security import Security, is_loopback, split
from lightning_hetpipe.settings import Bounds, declared

_ADDRESS = "host:port, such as 127.0.0.1:{0} or [::1]:{0}"

SERVER = ConsoleScript(
    "hetpipe-server",
    ("security", "service"),
    {
        "command": Literal["serve", "status"],
        "address": Annotated[str, _ADDRESS.format(5000)],
        "timeout": Annotated[float, Bounds(0.001)],
    },
)

HOST = ConsoleScript("hetpipe-host", ("security",), {"address": Annotated[str, _ADDRESS.format(7071)]})

Ready = Callable[[str], None]
"""Function that is called with the address that is being served."""

_COMMANDS = ("serve", STATUS)


def main() -> None:
    """Run hetpipe-server, with the exit codes of :mod:`~lightning_hetpipe.cli.entry`. 1 if no server answers."""
    command = sys.argv[1] if sys.argv[1:] else ""
    if command in _COMMANDS:
        sys.argv[1] = f"command={command}"
    elif command.isalpha():
        sys.exit(report(SettingError(f"{command} is not a command", f"give {' or '.join(_COMMANDS)}"), SERVER))
    _enter(_server, SERVER)


def host_main() -> None:
    """Run hetpipe-host, with the exit codes of :mod:`~lightning_hetpipe.cli.entry`."""
    _enter(_host, HOST)


def _enter(application: Callable[[], Any], program: ConsoleScript) -> None:
    """Run ``application``, unless the command line asks for a sweep, which would serve at one address after another."""
    if SWEEPS.intersection(sys.argv[1:]):
        text = f"-m would start {_served(program)} one after another; start {program.name} once for each address."
        sys.exit(report(SettingError(text), program))
    enter(application, program)


@hydra.main(config_path="pkg://lightning_hetpipe.conf", config_name="server", version_base="1.3")
def _server(config: DictConfig) -> None:
    job(run_server, config, SERVER)


@hydra.main(config_path="pkg://lightning_hetpipe.conf", config_name="host", version_base="1.3")
def _host(config: DictConfig) -> None:
    job(run_host, config, HOST)


def run_server(config: DictConfig) -> None:
    """Serve until a signal ends the process, or ask a running server and print its status.

    Raises:
        SettingError: if a setting is unknown or wrong, or the address cannot be used.
        CallRefused, Unreachable: as :func:`ask`.
    """
    config_checks.check(config, SERVER, needs=("service",))
    security = _security_of(config)
    if config.command == STATUS:
        print(laid_out(ask(config.address, security, config.timeout)))
        return
    config_checks.check_targets(config)  # with torch

    def served(security: Security, ready: Ready) -> int:
        from lightning_hetpipe.server.process.server_process import serve

        handler: Any = built(config, "service", object)
        return serve(handler, config.address, security, ready)

    _serve(config, SERVER, served)


def run_host(config: DictConfig) -> None:
    """Serve until a signal ends the process.

    Raises:
        SettingError: if a setting is unknown or wrong, or the address cannot be used.
    """
    config_checks.check(config, HOST)

    def served(security: Security, ready: Ready) -> int:
        from lightning_hetpipe.hosts.host_device import told_devices  # only now: --help needs no torch
        from lightning_hetpipe.hosts.host_server import HostServer
        from lightning_hetpipe.server.process.signals import until_signal

        def told(address: str) -> None:
            ready(address)
            if devices := told_devices():
                print(f"{HOST.name}: besides its CPU, this machine has {devices}.", flush=True)

        return until_signal(HostServer(config.address, security), told)

    _serve(config, HOST, served)


def _security_of(config: DictConfig) -> Security:
    """Return the ``security`` of ``config``. Raise SettingError if it does not suffice for the address."""
    security: Any = OmegaConf.to_container(config.security, resolve=True)
    declared(Security).check(security, "security", style=YAML)
    found = Security(**security)
    found.check(config.address)
    return found


def _serve(config: DictConfig, program: ConsoleScript, serve: Callable[[Security, Ready], int]) -> NoReturn:
    """Serve by ``serve``, which returns the signal that ended it, and end the process.

    Raises:
        SettingError: if the address is open to other machines, and there is no token.
    """
    security = _security_of(config)
    token = f"set it to a long random value, the same for all {_served(program)} and virtual workers."
    if security.token is None and not is_loopback(split(config.address)[0]):
        raise SettingError(
            f"address={config.address} is open to other machines, and HETPIPE_TOKEN is not set, so that anybody there"
            f" could call; {token}"
        )

    def ready(address: str) -> None:
        if security.token is None:
            unset = "HETPIPE_TOKEN is not set, so that any user of this machine may connect"
            print(f"{program.name}: {unset}; {token}", file=sys.stderr, flush=True)
        print(f"{program.name}: serving {address}; Ctrl-C ends it.", flush=True)

    from lightning_hetpipe.server.process.server_process import end  # only now: --help needs no gRPC

    end(128 + serve(security, ready))


def _served(program: ConsoleScript) -> str:
    """Return what ``program`` starts, in the plural."""
    return f"{program.name.removeprefix('hetpipe-')}s"


def ask(server: str, security: Security, timeout: float) -> dict[str, Any]:
    """Ask the server at address ``server`` for its status, and wait for up to ``timeout`` seconds.

    Raises:
        SettingError: if address or certificates cannot be used.
        CallRefused: if the server refuses, or answers with something other than a status.
        Unreachable: if nobody answers.
    """
    from lightning_hetpipe.server.transport.grpc_channel import GrpcChannel  # only now: --help needs no gRPC

    with closing(GrpcChannel(server, security, shared_memory=False)) as channel:
        answer = channel.call(STATUS, b"", timeout=timeout)
    try:
        status = json.loads(answer)
    except ValueError:
        status = None
    if not isinstance(status, dict):
        raise CallRefused(f"the server at {server} answered with no status; is it of this release?")
    return status


def laid_out(status: Mapping[str, Any]) -> str:
    """Lay out a whole status: single values as lines, then lists of mappings as tables and mappings as sections.

    Values of fields whose names end in ``bytes`` get units.
    """
    lines: list[list[str]] = []
    parts: list[str] = []
    for key, value in status.items():
        if _is_table(value):
            parts.append(f"{_words(key)}\n{indent(_table(value), '  ')}")
        elif isinstance(value, Mapping):
            parts.append(f"{_words(key)}\n{indent(laid_out(value), '  ')}")
        else:
            lines.append([_words(key), _shown(key, value)])
    first = ["\n".join(aligned(lines, left=(0, 1)))] if lines else []
    return "\n\n".join([*first, *parts])


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    keys = [*dict.fromkeys(key for row in rows for key in row)]
    cells = [[_words(key) for key in keys], *([_shown(key, row.get(key)) for key in keys] for row in rows)]
    return "\n".join(aligned(cells))


def _words(key: str) -> str:
    return _printable(key.replace("_", " "))


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("bytes") and isinstance(value, int):
        return in_bytes(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{_words(str(name))} {_shown(str(name), each)}" for name, each in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(_shown(key, each) for each in value) or "none"
    return _printable(f"{value:.3g}" if isinstance(value, float) else str(value))


def _printable(text: str) -> str:
    """Replace control characters: text of another machine must not send commands to the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


if __name__ == "__main__":
    main()
