"""hetpipe-host: computes stages for virtual workers whose leaders are on other machines, until a signal ends it."""

from __future__ import annotations

import sys
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from lightning_hetpipe.cli import config_checks
from lightning_hetpipe.cli.console_script import INTERRUPTED, TERMINATED, ConsoleScript
from lightning_hetpipe.cli.entry import enter, job, report
from lightning_hetpipe.cli.targets import TargetSignature
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.transport.security import Security, is_loopback, split

PROGRAM = ConsoleScript("hetpipe-host", ("security",), {"address": Any})

_SWEEP = {"-m", "--multirun", "hydra.mode=MULTIRUN"}
_SIGNALS = {2: INTERRUPTED, 15: TERMINATED}


def main() -> None:
    """The console script.

    Exit codes: 2 for a wrong setting; 130 for Ctrl-C; 143 for SIGTERM.
    """
    if _SWEEP.intersection(sys.argv[1:]):
        refusal = SettingError("-m would start hosts one after another; start hetpipe-host once for each address.")
        sys.exit(report(refusal, PROGRAM))
    enter(_application, PROGRAM)


@hydra.main(config_path="pkg://lightning_hetpipe.conf", config_name="host", version_base="1.3")
def _application(config: DictConfig) -> None:
    job(run, config, PROGRAM)


def run(config: DictConfig) -> None:
    """Serve until a signal, which ends the process.

    Raises:
        SettingError: for a setting that is unknown or wrong, or an address that cannot be had.
    """
    config_checks.check(config, PROGRAM)
    if not isinstance(config.address, str):
        raise SettingError(f"address={config.address} must be host:port, such as 127.0.0.1:7071 or [::1]:7071.")
    given: Any = OmegaConf.to_container(config.security, resolve=True)
    config_checks.check_arguments("security", given, TargetSignature.of(Security), "security")
    security = Security(**given)
    security.check(config.address)
    if security.token is None and not is_loopback(split(config.address)[0]):
        raise SettingError(
            f"address={config.address} is open to other machines, and HETPIPE_TOKEN is not set, so that anybody there"
            " could have computed here; set it to a long random value, the same for all hosts and virtual workers."
        )
    from lightning_hetpipe.hosts.host_server import serve  # only now: --help needs no torch
    from lightning_hetpipe.server.process.running import end

    def ready(address: str) -> None:
        if security.token is None:
            print(
                "hetpipe-host: HETPIPE_TOKEN is not set, so that any user of this machine may connect; set it to a"
                " long random value, the same for all hosts and virtual workers.",
                file=sys.stderr,
                flush=True,
            )
        print(f"hetpipe-host: serving {address}; Ctrl-C ends it.", flush=True)

    end(_SIGNALS.get(serve(config.address, security, ready), 0))


if __name__ == "__main__":
    main()
