"""Common parts of hetpipe-server and hetpipe-host, which serve until a signal ends them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

from omegaconf import DictConfig, OmegaConf

from lightning_hetpipe.cli.entry import report
from lightning_hetpipe.cli.start_up import ConsoleScript
from lightning_hetpipe.cli.targets import YAML
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.transport.security import Security, is_loopback, split
from lightning_hetpipe.settings import declared

_SWEEP = {"-m", "--multirun", "hydra.mode=MULTIRUN"}


def refuse_sweeps(program: ConsoleScript, served: str) -> None:
    """Exit with an error if the command line asks for a sweep, which would start servers or hosts one by one."""
    if _SWEEP.intersection(sys.argv[1:]):
        text = f"-m would start {served} one after another; start {program.name} once for each address."
        sys.exit(report(SettingError(text), program))


def address(port: int) -> Any:
    """Return the hint of a setting for an address. Errors show ``port`` as an example."""
    return Annotated[str, f"host:port, such as 127.0.0.1:{port} or [::1]:{port}"]


def security_of(config: DictConfig, served: str = "") -> Security:
    """Return the ``security`` of ``config``. If ``served`` is given, an address open to other machines needs a token.

    Raises:
        SettingError: if the security does not suffice for the address.
    """
    security: Any = OmegaConf.to_container(config.security, resolve=True)
    declared(Security).check(security, "security", style=YAML)
    found = Security(**security)
    found.check(config.address)
    if served and found.token is None and not is_loopback(split(config.address)[0]):
        raise SettingError(
            f"address={config.address} is open to other machines, and HETPIPE_TOKEN is not set, so that anybody there"
            f" could call; set it to a long random value, the same for all {served} and virtual workers."
        )
    return found


def announcing(program: ConsoleScript, security: Security, served: str) -> Callable[[str], None]:
    """Return a callback that prints the address being served, and first a warning if there is no token."""

    def ready(address: str) -> None:
        if security.token is None:
            print(
                f"{program.name}: HETPIPE_TOKEN is not set, so that any user of this machine may connect; set it to a"
                f" long random value, the same for all {served} and virtual workers.",
                file=sys.stderr,
                flush=True,
            )
        print(f"{program.name}: serving {address}; Ctrl-C ends it.", flush=True)

    return ready
