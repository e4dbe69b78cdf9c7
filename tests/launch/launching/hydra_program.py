"""A user's application of Hydra's, whose processes do what the test says."""

from __future__ import annotations

import logging
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from tests.launch.launching.obedient import Obedient


@hydra.main(config_path=None, version_base="1.3")
def application(config: DictConfig) -> None:
    logging.getLogger(__name__).info("says hello")
    job = HydraConfig.get()
    num = None if OmegaConf.is_missing(job.job, "num") else job.job.num
    given = OmegaConf.to_container(config, resolve=True)
    Obedient(config.address, config=given, folder=job.runtime.output_dir, num=num).obey()
    Path(job.runtime.output_dir, "done").touch()


if __name__ == "__main__":
    application()
