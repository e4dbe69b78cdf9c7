"""The GPUs that are known by name, however it is written, and how far estimates from data sheets are off."""

from __future__ import annotations

import math
from itertools import permutations

import pytest

from benchmarks import reference_profile
from lightning_hetpipe.planning.model.catalogue import canonical, gpus, known, nearest_gpu, speed_by
from tests.planning.reference import MISSING, OPT_350M


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Titan-RTX", "Titan-RTX"),
        ("TITAN RTX", "Titan-RTX"),
        ("NVIDIA TITAN RTX", "Titan-RTX"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("rtx3090", "RTX-3090"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX-3090-Ti"),
        ("GeForce GTX 1080 Ti", "GTX-1080-Ti"),
        ("Tesla V100-SXM2-16GB", "V100-16"),
        ("Tesla V100-PCIE-32GB", "V100-PCIe-32"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80"),
        ("NVIDIA H100 80GB HBM3", "H100-80"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla K80", "K80"),
        ("Tesla M40 24GB", "M40-24"),
        ("NVIDIA H20", "H20-96"),
        ("NVIDIA A800-SXM4-80GB", "A800-80"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX-4090-Laptop"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("Quadro RTX 8000", "Quadro-RTX-8000"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_names_as_people_and_torch_write_them(written: str, name: str) -> None:
    assert known(written) == gpus()[name]
    assert canonical(written) == name


def test_every_name_and_alias_means_one_gpu() -> None:
    for gpu in gpus().values():
        assert all(known(name) == gpu for name in (gpu.name, *gpu.aliases))


def test_every_entry_is_complete_and_plausible() -> None:
    """A figure in another unit, or with sparsity, would stand out."""
    assert {"GTX-1080-Ti", "RTX-2080-Ti", "RTX-3090", "RTX-4090", "RTX-5090", "A100-80", "H200", "B200"} <= set(gpus())
    for gpu in gpus().values():
        assert 4 <= gpu.memory / 2**30 <= 192
        assert 1e11 <= gpu.bandwidth <= 1e13
        assert 1e12 <= gpu.fp32 <= 2e14
        assert gpu.tf32 is None or 1 <= gpu.tf32 / gpu.fp32 <= 16
        assert gpu.half is None or 1.9 <= gpu.half / gpu.fp32 <= 31
        assert gpu.source


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("RTX-3O90", "did you mean 'RTX-3090'?"),
        ("1080ti", "did you mean 'GTX-1080-Ti'?"),  # once "H100", which has as many letters in common
        ("4070 mobile", "did you mean 'RTX-4070"),
        ("V100-64", "did you mean 'V100-"),
        ("abacus", ""),
    ],
)
def test_for_an_unknown_name_the_nearest_is_suggested(wrong: str, says: str) -> None:
    suggested = nearest_gpu(wrong, gpus())
    assert says in suggested if says else not suggested
    assert known(wrong) is None
    assert canonical(wrong) == wrong


def relative_speed(name: str, than: str, precision: str = "32") -> float:
    return gpus()[name].speed(precision) / gpus()[than].speed(precision)


def test_relative_speeds_agree_with_each_other() -> None:
    for one, other, third in permutations(["GTX-1080-Ti", "V100-16", "RTX-4090", "H200"], 3):
        through = relative_speed(one, other) * relative_speed(other, third)
        assert relative_speed(one, third) == pytest.approx(through)


def test_precision_matters_where_there_are_tensor_cores() -> None:
    assert relative_speed("A100-40", "GTX-1080-Ti", "16") > relative_speed("A100-40", "GTX-1080-Ti")
    assert relative_speed("A100-40", "GTX-1080-Ti") > relative_speed("A100-40", "GTX-1080-Ti", "32-highest")


@pytest.mark.skipif(not OPT_350M.exists(), reason=MISSING)
def test_the_error_of_estimates_is_what_the_documentation_says() -> None:
    """All pairs of seven GPUs on which others have measured OPT-350M; that "RTX-2080" has a Ti's 11 GiB."""
    profile = reference_profile.load(OPT_350M)
    assert profile.memory["RTX-2080"] == gpus()["RTX-2080-Ti"].memory != gpus()["RTX-2080"].memory
    name = {each: each for each in profile.times} | {"RTX-2080": "RTX-2080-Ti"}
    seconds = {each: sum(t.forward + t.backward for t in times) for each, times in profile.times.items()}
    off = {
        (one, other): abs(math.log(relative_speed(name[one], name[other]) * seconds[one] / seconds[other]))
        for one, other in permutations(seconds, 2)
    }
    assert len(off) == 42
    mean, worst = math.exp(sum(off.values()) / len(off)), math.exp(max(off.values()))
    assert f"factor of {mean:.2f} on average, and of {worst:.2f} at worst" in " ".join((speed_by.__doc__ or "").split())
