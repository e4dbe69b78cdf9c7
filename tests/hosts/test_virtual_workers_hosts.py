"""Virtual workers whose stages are at hosts compute what the oracle does, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hosts.elsewhere import Hosts
from tests.support.marks import slow_except
from tests.wsp.launch import Job, run_all
from tests.wsp.test_exact import check, expected

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "resnet": ("resnet", {"even": True, "validate": True, "trainer": {"val_check_interval": 2}}, {"cuts": [2, 4]}),
    "dropout": ("transformer", {}, {}),
    "clipped": ("mlp", {"trainer": {"gradient_clip_val": 0.1}}, {"clip_norm": 0.1}),
    "tied": ("tied", {}, {}),
    "frozen": ("frozen", {}, {}),
}


@pytest.mark.parametrize("name", slow_except(CASES, "resnet"))
def test_two(name: str, tmp_path: Path, hosts: Hosts) -> None:
    task, more, options = CASES[name]
    job = Job(tmp_path, task, (4, 5), 3, 3, {"hosts": hosts.address, **more})
    (found,) = run_all(job)
    check(job, found, expected(job, 3, **options))
