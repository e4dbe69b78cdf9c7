"""hetpipe-certificates: makes the certificates and the token that machines of a cluster show each other."""

from __future__ import annotations

from pathlib import Path

import hydra
from omegaconf import DictConfig

from lightning_hetpipe.cli import config_checks
from lightning_hetpipe.cli.console_script import ConsoleScript
from lightning_hetpipe.cli.entry import enter, job
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.transport.authority import CA_KEY, VARIABLES, make

PROGRAM = ConsoleScript("hetpipe-certificates", (), {"hosts": list[str], "folder": str, "days": int})

LONGEST = 36500
"""Largest number of days."""


def main() -> None:
    """The console script.

    Exit codes: 2 for a wrong setting, or where openssl is missing or fails.
    """
    enter(_application, PROGRAM)


@hydra.main(config_path="pkg://lightning_hetpipe.conf", config_name="certificates", version_base="1.3")
def _application(config: DictConfig) -> None:
    job(run, config, PROGRAM)


def run(config: DictConfig) -> None:
    """Make the folder, and say what to do with it.

    Raises:
        SettingError: for a setting that is unknown or wrong; and as ``make`` does.
    """
    config_checks.check(config, PROGRAM, bounds={"days": (1, LONGEST)})
    if not config.hosts:
        raise SettingError("hosts=[] names no machine; give those that take part, such as hosts=[10.0.0.1,10.0.0.2].")
    folder = Path(config.folder).expanduser().absolute()
    known = make(folder, [*config.hosts], config.days)
    print(
        f"hetpipe-certificates: {folder} has a new certificate for {', '.join(config.hosts)}, for"
        f" {config.days} days{', of the authority that was there' if known else ''}. Copy the folder to every machine,"
        f" but for {CA_KEY}, which signs further ones, and there call: source {config.folder}/{VARIABLES}"
    )


if __name__ == "__main__":
    main()
