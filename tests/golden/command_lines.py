"""Commands inside the test's process, in a folder with a user's experiment and some profiles."""

from __future__ import annotations

import sys

from lightning_hetpipe.planning.plan.profile_file import save
from tests.cli.conftest import USERS_EXPERIMENT, USERS_MODEL
from tests.cli.test_plan import PROFILE
from tests.golden.cases import Place
from tests.support.composing import compose_once


def run(program: str, arguments: list[str], place: Place) -> None:
    from lightning_hetpipe.cli import hetpipe_host, hetpipe_plan, hetpipe_server, hetpipe_train

    mains = {
        "train": hetpipe_train.main,
        "plan": hetpipe_plan.main,
        "server": hetpipe_server.main,
        "host": hetpipe_host.main,
    }
    folder = place.folder
    (folder / "users_model.py").write_text(USERS_MODEL)
    (folder / "mine" / "experiment").mkdir(parents=True)
    (folder / "mine" / "experiment" / "mine.yaml").write_text(USERS_EXPERIMENT)
    save(PROFILE, folder / "p.json")
    (folder / "small.json").write_text((folder / "p.json").read_text().replace(str(24 << 30), "24"))
    (folder / "other.json").write_text('{"schema_version": 1, "in_flight": 2}')
    compose_once(place.patch)
    place.environment(PL_SEED_WORKERS="0")
    place.patch.delitem(sys.modules, "users_model", raising=False)
    quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none"]  # the process's logging stays as it is
    place.patch.setattr(sys, "argv", [f"hetpipe-{program}", *arguments, *quiet])
    mains[program]()
