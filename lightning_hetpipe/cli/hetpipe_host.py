"""hetpipe-host: compute stages for leaders on other machines, until a signal ends the process."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

from lightning_hetpipe.cli import config_checks
from lightning_hetpipe.cli.entry import enter, job
from lightning_hetpipe.cli.serving import address, announcing, refuse_sweeps, security_of
from lightning_hetpipe.cli.start_up import ConsoleScript

PROGRAM = ConsoleScript("hetpipe-host", ("security",), {"address": address(7071)})


def main() -> None:
    """Run the console script, with the exit codes of :mod:`~lightning_hetpipe.cli.entry`."""
    refuse_sweeps(PROGRAM, "hosts")
    enter(_application, PROGRAM)


@hydra.main(config_path="pkg://lightning_hetpipe.conf", config_name="host", version_base="1.3")
def _application(config: DictConfig) -> None:
    job(run, config, PROGRAM)


def run(config: DictConfig) -> None:
    """Serve until a signal ends the process.

    Raises:
        SettingError: if a setting is unknown or wrong, or the address cannot be used.
    """
    config_checks.check(config, PROGRAM)
    security = security_of(config, "hosts")
    from lightning_hetpipe.hosts.host_device import told_devices  # only now: --help needs no torch
    from lightning_hetpipe.hosts.host_server import HostServer
    from lightning_hetpipe.server.process.server_process import end
    from lightning_hetpipe.server.process.signals import until_signal

    def ready(address: str) -> None:
        announcing(PROGRAM, security, "hosts")(address)
        if devices := told_devices():
            print(f"{PROGRAM.name}: besides its CPU, this machine has {devices}.", flush=True)

    end(128 + until_signal(HostServer(config.address, security), ready))


if __name__ == "__main__":
    main()
