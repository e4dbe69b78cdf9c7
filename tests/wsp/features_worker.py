"""One process of a launch of virtual workers, or of ddp, that uses many features of the Trainer one after the other.

Run as ``python -m tests.wsp.features_worker '{"strategy": "ddp", "uses": ["checkpoints", ...], ...}'``: each use is a
function of ``tests.wsp.uses`` and writes what it saw.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_hetpipe import HetPipeStrategy, WSPCallback
from tests.support.trainers import quiet_trainer
from tests.wsp import refused_uses, uses, uses_of_loops, uses_together

ALL = {
    **uses.USES,
    **uses_of_loops.USES,
    **uses_together.USES,
    **{name: run for name, (run, _) in refused_uses.REFUSED.items()},
}


class Bench:
    """Setting of a use.

    Args:
        folder: Of its own.
        kind: "ddp", or "hetpipe".
        settings: HetPipeStrategy's.
    """

    def __init__(self, folder: Path, kind: str, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.kind = kind
        self.settings = settings

    def strategy(self) -> Any:
        if self.kind == "ddp":
            return "ddp"
        wsp = WSPCallback(**self.settings.get("wsp", {}))
        return HetPipeStrategy(**{"virtual_workers": 2, "timeout": 60, **self.settings, "wsp": wsp})

    def trainer(self, *callbacks: L.Callback, **settings: Any) -> L.Trainer:
        """A quiet Trainer, with two processes."""
        devices = 2 if self.kind == "ddp" else 1
        defaults: dict[str, Any] = {"devices": devices, "max_epochs": 2, "default_root_dir": self.folder}
        return quiet_trainer(self.strategy(), callbacks=list(callbacks), **{**defaults, **settings})


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    folder = Path(job["folder"])
    for name in job["uses"]:
        torch.manual_seed(3)
        bench = Bench(folder / name, job["strategy"], job.get("settings", {}))
        bench.folder.mkdir(parents=True, exist_ok=True)
        print(f"[{os.environ.get('LOCAL_RANK', 0)}] {name}", file=sys.stderr, flush=True)
        try:
            found = ALL[name](bench)
        except Exception as error:
            if not job.get("go_on"):
                raise
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        rank = int(os.environ.get("LOCAL_RANK", 0))
        (folder / f"{name}.{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
