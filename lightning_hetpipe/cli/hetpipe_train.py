"""hetpipe-train: train what a Hydra configuration says. Wrong settings of ours end it before Lightning is loaded."""

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
from lightning_hetpipe.cli.targets import STRATEGY, sections
from lightning_hetpipe.launch import supervision
from lightning_hetpipe.launch.command import quoted, this_program
from lightning_hetpipe.strategy import relations

PROGRAM = ConsoleScript(
    "hetpipe-train", config_checks.GROUPS, {**config_checks.SETTINGS, "test": bool, "ckpt_path": str | None}
)


def main() -> None:
    """Run the console script, with the exit codes of :mod:`~lightning_hetpipe.cli.entry`.

    A virtual worker that the others went on without exits with 1. A supervisor exits with the code of the process that
    trains.
    """
    sys.argv[1:] = planned(sys.argv[1:])
    supervision.supervised()  # before user code runs, which may start programs
    enter(_application, PROGRAM)


@hydra.main(config_path="pkg://lightning_hetpipe.conf", config_name="train", version_base="1.3")
def _application(config: DictConfig) -> float | None:
    """Run one job of Hydra's. Return the monitored metric's best value, which sweepers may optimise."""
    return job(_job, config, PROGRAM)


def _job(config: DictConfig) -> float | None:
    """Check the settings and train. With ``restarts``, train in another process, unless this is a job of a sweep."""
    restarts = _restarts(config)
    if restarts and supervision.can_supervise() and HydraConfig.get().mode != RunMode.MULTIRUN:
        program, number = this_program(is_first=True), supervision.own_number()
        supervisor = supervision.RunSupervisor(program, restarts, lambda path: [f"ckpt_path={quoted(path)}"], number)
        sys.exit(supervisor.run())
    config_checks.check(config, PROGRAM, config_checks.BUILT)
    config_checks.synchronisation(config)
    if OmegaConf.select(config, "strategy._target_") == STRATEGY:
        relations.plan(config.strategy.get("plan"))
    config_checks.check_targets(config)
    from lightning_hetpipe.cli import training  # with Lightning

    return training.job(config)


def _restarts(config: DictConfig) -> int:
    """Return the number of times that a run on one machine may be restarted. The run itself refuses other values."""
    if OmegaConf.select(config, "trainer.num_nodes") not in (None, 1):
        return 0
    callbacks = [each for each in sections(config) if each.path == "strategy.wsp" or "callbacks." in each.path]
    given = [each.values.get("restarts") for each in callbacks]
    return next((each for each in given if isinstance(each, int)), 0)


if __name__ == "__main__":
    main()
