"""Pairs of everything that could matter to several virtual workers: D = 0 is the oracle, bit for bit, run after run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.support.equality import assert_same, difference
from tests.wsp.launch import Job, run_all
from tests.wsp.test_exact import check, expected, together
from tests.wsp.worker import shared_data

DTYPES = {"float32": None, "bfloat16": "bfloat16"}


def case(
    task: str,
    lengths: tuple[int, ...],
    stages: int | list[int],
    in_flight: int,
    wave: int,
    *,
    validate: int = 0,
    accumulate: int = 1,
    mean: bool = False,
    update_dtype: str | None = None,
    clip: tuple[str, float] | None = None,
    delays: int | None = None,
) -> tuple[Job, dict[str, Any]]:
    """A job, and what the oracle is told of it."""
    wsp = {"wave": wave, "aggregate": "mean" if mean else "sum", "update_dtype": update_dtype}
    trainer: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    options: dict[str, Any] = {"accumulate": accumulate, "mean": mean}
    if clip is not None:
        trainer |= {"gradient_clip_algorithm": clip[0], "gradient_clip_val": clip[1]}
        options[f"clip_{clip[0]}"] = clip[1]
    if validate:
        trainer["val_check_interval"] = validate
        options["cuts"] = range(validate, max(lengths) + 1, validate)
    if update_dtype is not None:
        options["update_dtype"] = getattr(torch, update_dtype)
    more = {"wsp": wsp, "trainer": trainer, "validate": bool(validate)}
    if delays is not None:
        more["delays"] = delays
    return Job(Path(), task, lengths, stages, in_flight, more), {"wave": wave, **options}


GRID: dict[int, list[tuple[Job, dict[str, Any]]]] = {
    2: [
        case("transformer", (6, 5), [1, 3], 3, 2, validate=4, accumulate=2, delays=1),
        case("resnet", (4, 6), [3, 1], 2, 5, mean=True, clip=("norm", 0.1), delays=2),
        case("by step", (5, 5), 2, 4, 3, validate=2, accumulate=3, clip=("value", 0.01)),
        case("mlp", (5, 4), 2, 3, 3, update_dtype="bfloat16"),
        case("by epoch", (4, 5), [1, 2], 2, 3, mean=True, update_dtype="float16", delays=3),
    ],
    3: [
        case("tied", (4, 4, 3), [2, 1, 3], 2, 3, mean=True, accumulate=2, delays=4),
        case("by epoch", (3, 6, 5), 2, 5, 4, validate=3, clip=("norm", 0.2), update_dtype="bfloat16"),
        case("transformer", (2, 5, 5), [1, 1, 2], 4, 1, accumulate=3),
    ],
    4: [
        case("mlp", (5, 4, 3, 2), [1, 2, 3, 4], 3, 1, clip=("norm", 0.1), delays=5),
        case("resnet", (3, 3, 3, 3), 2, 2, 2, mean=True, validate=2),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("workers", GRID)
def test_grid(workers: int, tmp_path: Path) -> None:
    cases = [*GRID[workers], GRID[workers][0]]  # run after run
    jobs = [Job(tmp_path / str(i), *list(vars(job).values())[1:]) for i, (job, _) in enumerate(cases)]
    for job in jobs:
        job.folder.mkdir()
    found = run_all(*jobs)
    for job, (_, options), each in zip(jobs, cases, found, strict=True):
        check(job, each, expected(job, **options))
    for one, other in zip(found[0], found[-1], strict=True):
        assert_same(one["outputs"], other["outputs"])
        assert_same(one["end"], other["end"])


@pytest.mark.slow
def test_models_with_something_special(tmp_path: Path) -> None:
    """Frozen, shared and unused parameters, buffers of whole numbers or in no checkpoint, three dtypes."""
    jobs = [Job(tmp_path / task, task, (4, 5)) for task in ("frozen", "tied", "unused", "buffers", "dtypes")]
    for job in jobs:
        job.folder.mkdir()
    for job, found in zip(jobs, run_all(*jobs), strict=True):
        check(job, found, expected(job, 3))


@pytest.mark.slow
def test_updates_of_half_the_size(tmp_path: Path) -> None:
    """bfloat16 halves what is pushed, to the byte; what is pulled stays."""
    jobs = [Job(tmp_path / name, more={"wsp": {"update_dtype": dtype}}) for name, dtype in DTYPES.items()]
    for job in jobs:
        job.folder.mkdir()
    bytes_of = {}
    for name, found in zip(DTYPES, run_all(*jobs), strict=True):
        logged = found[0]["logged"]
        pushed, pulled = (sum(each[f"hetpipe/{kind}_bytes"] for each in logged) for kind in ("push", "pull"))
        size = sum(weight.numel() for weight in found[0]["end"].weights.values())
        bytes_of[name] = pushed, pulled
        # Two epochs of a full and a short wave.
        assert pushed == 4 * size * (4 if name == "float32" else 2)
    assert bytes_of["float32"][0] == 2 * bytes_of["bfloat16"][0]
    assert bytes_of["float32"][1] == bytes_of["bfloat16"][1]


@pytest.mark.slow
def test_data_is_shared_out(tmp_path: Path) -> None:
    """As under ddp: each virtual worker has its part of a shuffled loader, another one in each epoch."""
    job = Job(tmp_path, more={"shares": 9})
    dataset = shared_data(job.task, 9).dataset
    data: list[list[Any]] = []
    for rank in range(2):
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=2, rank=rank, shuffle=True, seed=0)
        data.append([])
        for epoch in range(2):
            sampler.set_epoch(epoch)
            data[-1].append(list(DataLoader(dataset, 4, sampler=sampler)))
    assert difference(data[0][0], data[0][1]) is not None
    check(job, run_all(job)[0], together(job, 3, data))
