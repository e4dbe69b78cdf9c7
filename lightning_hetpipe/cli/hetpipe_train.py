"""hetpipe-train: trains what a Hydra configuration says. Wrong settings of ours end it before Lightning is loaded."""

from __future__ import annotations

import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lightning_hetpipe.cli import config_checks
from lightning_hetpipe.cli.composition import planned
from lightning_hetpipe.cli.entry import enter, job
from lightning_hetpipe.cli.start_up import ConsoleScript
from lightning_hetpipe.cli.targets import STRATEGY
from lightning_hetpipe.launch import supervision
from lightning_hetpipe.launch.command import quoted, this_program
from lightning_hetpipe.strategy import relations

PROGRAM = ConsoleScript(
    "hetpipe-train", config_checks.GROUPS, {**config_checks.SETTINGS, "test": bool, "ckpt_path": str | None}
)

_supervised_code = 0
"""Exit code of the process that has trained, where this one has supervised it."""


def main() -> None:
    """The console script.

    Exit codes: 0; 1 for a failure, with its traceback, or of a virtual worker without which the others went on; 2 for a
    wrong setting; 130 for Ctrl-C; 143 for SIGTERM; that of the process that trains, where this one supervises it.
    """
    sys.argv[1:] = planned(sys.argv[1:])
    supervision.supervised()  # before code of a user's runs, which may start programs
    enter(_application, PROGRAM)
    if _supervised_code:
        sys.exit(_supervised_code)


@hydra.main(config_path="pkg://lightning_hetpipe.conf", config_name="train", version_base="1.3")
def _application(config: DictConfig) -> float | None:
    """Run one job of Hydra's; return the monitored metric's best value, which sweepers may optimise."""
    return job(_job, config, PROGRAM)


def _job(config: DictConfig) -> float | None:
    """Check the settings and train. With ``restarts`` another process does, unless this is a job of a sweep."""
    restarts = _restarts(config)
    if restarts and supervision.can_supervise() and HydraConfig.get().mode != RunMode.MULTIRUN:
        _supervise(restarts)
        return None
    config_checks.check(config, PROGRAM, config_checks.BUILT)
    config_checks.synchronisation(config)
    if OmegaConf.select(config, "strategy._target_") == STRATEGY:
        relations.plan(config.strategy.get("plan"))
    config_checks.check_targets(config)
    from lightning_hetpipe.cli import training  # with Lightning

    return training.job(config)


def _restarts(config: DictConfig) -> int:
    """Number of times that a run on one machine is started again; the run itself refuses what is no such number."""
    if OmegaConf.select(config, "trainer.num_nodes") not in (None, 1):
        return 0
    given = [section.get("restarts") for section in _wsp_sections(config)]
    return next((each for each in given if isinstance(each, int)), 0)


def _wsp_sections(config: DictConfig) -> list[DictConfig]:
    """The sections that may set the synchronisation of virtual workers."""
    callbacks = OmegaConf.select(config, "trainer.callbacks")
    named = [*callbacks.values()] if isinstance(callbacks, DictConfig) else []
    return [each for each in (OmegaConf.select(config, "strategy.wsp"), *named) if isinstance(each, DictConfig)]


def _supervise(restarts: int) -> None:
    """Run in another process, at most ``restarts`` times again; its exit code is that of this one."""
    global _supervised_code
    program = this_program(is_first=True)
    supervisor = supervision.RunSupervisor(
        program.command, program.folder, restarts, lambda path: [f"ckpt_path={quoted(path)}"], supervision.own_number()
    )
    _supervised_code = supervisor.run()


if __name__ == "__main__":
    main()
