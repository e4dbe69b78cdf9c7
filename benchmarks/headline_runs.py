"""Runs of the headline benchmark: on network namespaces whose cables carry what the lab's links do."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.harness import Process, ProcessFailed
from benchmarks.headline_cluster import LABS, METHODS
from benchmarks.headline_task import accuracy, network
from benchmarks.headline_worker import Job
from benchmarks.kept_lines import add_line, lines
from tests.support import namespaces

TARGET = 0.95
"""Accuracy to be reached by the median of as many copies of the weights in a row:"""
IN_A_ROW = 3

WORKER = "benchmarks.headline_worker"
START = 1200.0
"""Seconds until the first copy, at most."""


@dataclass(frozen=True)
class Result:
    """Result of a run.

    Attributes:
        seconds: Of each copy of the weights, since the end of the first minibatch.
        accuracies: Of each copy.
        late: Share of the passes of emulated devices that took longer than they should, of the worst process.
        minibatches: Per second, of each process.
        load: Load average at the end.
    """

    seconds: Sequence[float]
    accuracies: Sequence[float]
    late: float = 0.0
    minibatches: Sequence[float] = ()
    load: float = 0.0

    @property
    def reached(self) -> float | None:
        """Seconds until the target; None if it was not reached."""
        for index in range(IN_A_ROW, len(self.seconds) + 1):
            if median(self.accuracies[index - IN_A_ROW : index]) >= TARGET:
                return self.seconds[index - 1]
        return None


Found = dict[Job, Result]


def machines(job: Job) -> int:
    """Machines that a run is on: nodes with DDP, else one for each virtual worker."""
    lab = LABS[job.lab]
    return len(lab.speeds) if METHODS[job.method].clock_distance is None else len(lab.workers)


def run(job: Job, limit: float) -> Result:
    """Train until the target, or for ``limit`` emulated seconds.

    Raises:
        ProcessFailed: if a process ends, or this machine makes no network namespaces.
    """
    bits = round(8 * LABS[job.lab].link.bandwidth / job.slower)
    told = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
    told["HETPIPE_TOKEN"] = secrets.token_urlsafe(32)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = replace(job, folder=name)
        logs = [(folder / f"log-{node}").open("w+b") for node in range(machines(job))]
        try:
            with namespaces.network(machines(job), f"{bits}bit", burst="16kb", latency="2s") as nodes:
                running = []
                for node, (machine, log) in enumerate(zip(nodes, logs, strict=True)):
                    environment = [f"{key}={value}" for key, value in {**told, "NODE_RANK": node}.items()]
                    prefix = tuple(machine.apart("env", *environment))
                    running.append(Process(WORKER, (job.to_json(),), prefix=prefix).start(log))
                return _watch(job, folder, running, logs, limit)
        except namespaces.Unavailable as why:
            raise ProcessFailed(str(why)) from None
        finally:
            for log in logs:
                log.close()


def _watch(
    job: Job, folder: Path, running: Sequence[subprocess.Popen[str]], logs: Sequence[Any], limit: float
) -> Result:
    seconds: list[float] = []
    accuracies: list[float] = []
    net = network(job.seed)
    started = time.monotonic()
    try:
        while True:
            for child, log in zip(running, logs, strict=True):
                if child.poll() is not None:
                    log.seek(0)
                    raise ProcessFailed(log.read().decode(errors="replace")[-3000:])
            for file in sorted(folder.glob("copy-*.pt")):
                copy = torch.load(file)
                file.unlink()
                net.load_state_dict({**net.state_dict(), **copy["weights"]})
                seconds.append(round(copy["seconds"], 3))
                accuracies.append(round(accuracy(net, job.seed), 4))
                result = Result(seconds, accuracies)
                if result.reached is not None or seconds[-1] > limit:
                    return replace(result, load=round(os.getloadavg()[0], 1), **_records(folder))
            if not seconds and time.monotonic() > started + START:
                raise ProcessFailed(f"no copy of the weights after {START:.0f} s")
            time.sleep(0.2)
    finally:
        for child in running:
            child.kill()
            child.communicate()


def _records(folder: Path) -> dict[str, Any]:
    late, rates = 0.0, []
    for file in sorted(folder.glob("record-*.json")):
        record = json.loads(file.read_text())
        passes, overruns = (sum(each[key] for each in record["devices"]) for key in ("passes", "overruns"))
        late = max(late, overruns / max(1, passes))
        rates.append(round(record["minibatches"] / record["seconds"], 3))
    return {"late": round(late, 4), "minibatches": rates}


def read(file: Path) -> Found:
    """The runs that ``file`` keeps."""
    return {Job.of(kept["job"]): Result(**kept["result"]) for kept in lines(file)}


def keep(file: Path, job: Job, result: Result) -> None:
    """Add a run to ``file``."""
    add_line(file, {"job": asdict(job), "result": asdict(result)})
