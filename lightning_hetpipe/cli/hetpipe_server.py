"""hetpipe-server: serve parameters until a signal ends the process, or print the status of a running server."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Annotated, Any, Literal, NoReturn

import hydra
from omegaconf import DictConfig

from lightning_hetpipe.cli import config_checks
from lightning_hetpipe.cli.entry import enter, job
from lightning_hetpipe.cli.serving import address, announcing, refuse_sweeps, security_of
from lightning_hetpipe.cli.start_up import ConsoleScript
from lightning_hetpipe.cli.targets import built
from lightning_hetpipe.planning.model.units import in_bytes
from lightning_hetpipe.planning.plan.table import aligned
from lightning_hetpipe.server.transport.interface import STATUS, CallRefused
from lightning_hetpipe.server.transport.security import Security
from lightning_hetpipe.settings import Bounds

PROGRAM = ConsoleScript(
    "hetpipe-server",
    ("security", "service"),
    {"command": Literal["serve", "status"], "address": address(5000), "timeout": Annotated[float, Bounds(0.001)]},
)

_COMMANDS = ("serve", STATUS)


def main() -> None:
    """Run the console script, with the exit codes of :mod:`~lightning_hetpipe.cli.entry`. 1 if no server answers."""
    if sys.argv[1:2] and sys.argv[1] in _COMMANDS:
        sys.argv[1] = f"command={sys.argv[1]}"
    refuse_sweeps(PROGRAM, "servers")
    enter(_application, PROGRAM)


@hydra.main(config_path="pkg://lightning_hetpipe.conf", config_name="server", version_base="1.3")
def _application(config: DictConfig) -> None:
    job(run, config, PROGRAM)


def run(config: DictConfig) -> None:
    """Serve until a signal ends the process, or ask a running server and print its status.

    Raises:
        SettingError: if a setting is unknown or wrong, or the address cannot be used.
        CallRefused, Unreachable: as :func:`ask`.
    """
    config_checks.check(config, PROGRAM, needs=("service",))
    config_checks.check_targets(config)
    if config.command == STATUS:
        print(laid_out(ask(config.address, security_of(config), config.timeout)))
    else:
        _serve(config, security_of(config, "servers"))


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


def _serve(config: DictConfig, security: Security) -> NoReturn:
    from lightning_hetpipe.server.process.server_process import end, serve

    handler: Any = built(config, "service", object)

    end(128 + serve(handler, config.address, security, announcing(PROGRAM, security, "servers")))


def laid_out(status: Mapping[str, Any]) -> str:
    """Lay out a whole status: single values as lines, then lists of mappings as tables and mappings as sections.

    Values of fields whose names end in ``bytes`` get units.
    """
    single = {key: value for key, value in status.items() if not isinstance(value, Mapping) and not _is_table(value)}
    parts = [_lines(single)] if single else []
    for key, value in status.items():
        if _is_table(value):
            parts.append(f"{_words(key)}\n{_table(value)}")
        elif isinstance(value, Mapping):
            parts.append(f"{_words(key)}\n{_indented(laid_out(value))}")
    return "\n\n".join(parts)


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _lines(fields: Mapping[str, Any]) -> str:
    width = max(map(len, fields))
    return "\n".join(f"{_words(key).ljust(width)}  {_shown(key, value)}" for key, value in fields.items())


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    keys = [*dict.fromkeys(key for row in rows for key in row)]
    cells = [[_words(key) for key in keys], *([_shown(key, row.get(key)) for key in keys] for row in rows)]
    return _indented("\n".join(aligned(cells)))


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" if line else line for line in text.splitlines())


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
