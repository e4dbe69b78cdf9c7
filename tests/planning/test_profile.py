"""Profiles: which times hold for which device, as files in two forms, estimates, and profiles that are joined."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from benchmarks import reference_profile
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model.catalogue import gpus
from lightning_hetpipe.planning.model.cluster import Device, Link
from lightning_hetpipe.planning.model.profile import SHORTEST, LayerBytes, Profile, Times
from lightning_hetpipe.planning.plan.profile_file import load, save
from tests.planning.drawing import profiles
from tests.planning.reference import MISSING, OPT_350M
from tests.support.marks import explores

LAYERS = [LayerBytes("a", 4, 8, 2), LayerBytes("b", 0, 1, 1)]
TIMES = [Times(1.0, 2.0, 0.5), Times(3.0, 4.0)]


def profile(*names: str) -> Profile:
    return Profile("m", 4, LAYERS, dict.fromkeys(names, TIMES), {})


@explores(40)
@given(profiles())
def test_a_round_trip(mine: Profile) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save(mine, Path(folder, "profile.json"))
        assert load(Path(folder, "profile.json")) == mine


def test_times_of_a_device_however_its_name_is_written_and_by_its_speed() -> None:
    mine = profile("Titan-RTX", "own")
    assert mine.times_on(Device("NVIDIA TITAN RTX", speed=2)) == [Times(0.5, 1.0, 0.25), Times(1.5, 2.0, 0.0)]
    with pytest.raises(
        SettingError,
        match="it has those of Titan-RTX, own, and the catalogue of GPUs does not know it; did you mean 'own'",
    ):
        mine.times_on(Device("owl"))
    assert profile("own").times_on(Device("owl")) == TIMES  # the only one there is


def test_a_device_with_a_speed_stands_beside_estimated_ones() -> None:
    """It was refused: what its speed is relative to was no longer the only device that the profile knew."""
    mine = profile("RTX-3090").with_estimates([Device("T4"), Device("mine", speed=2)])
    assert set(mine.times) == {"RTX-3090", "T4"}
    assert mine.times_on(Device("mine", speed=2)) == [Times(0.5, 1.0, 0.25), Times(1.5, 2.0, 0.0)]
    with pytest.raises(SettingError, match=r"it has those of RTX-3090, T4, .* or say its speed"):
        mine.times_on(Device("mine"))


def test_estimates_come_from_the_gpu_that_is_nearest() -> None:
    mine = profile("RTX-3090", "GTX-1080-Ti", "own").with_estimates(
        [Device("RTX-4090"), Device("P40"), Device("nvidia rtx 3090"), Device("own"), Device("T4", speed=3)]
    )
    assert mine.estimated == {"RTX-4090": "RTX-3090", "P40": "GTX-1080-Ti"}
    assert set(mine.times) == {"RTX-3090", "GTX-1080-Ti", "own", "RTX-4090", "P40"}
    ratio = gpus()["RTX-4090"].speed() / gpus()["RTX-3090"].speed()
    assert mine.times_on(Device("RTX-4090")) == [each.divided(ratio) for each in TIMES]


def test_a_cpu_stands_for_the_fastest() -> None:
    """Only ratios are known of a model that was profiled on a laptop: who is how much slower than whom."""
    mine = profile("cpu").with_estimates([Device("RTX-3090"), Device("T4"), Device("abacus")])
    assert mine.estimated == {"RTX-3090": "cpu", "T4": "cpu"}
    assert mine.times_on(Device("RTX-3090")) == TIMES
    slower = mine.times_on(Device("T4"))[0].forward
    assert slower == pytest.approx(gpus()["RTX-3090"].speed() / gpus()["T4"].speed() * TIMES[0].forward)


def test_a_cpu_whose_speed_was_measured_gives_seconds() -> None:
    """They follow from the ratio of speeds, so that links are compared with them; no layer takes less than launches."""
    gpu = gpus()["RTX-3090"].speed()
    mine = replace(profile("cpu"), times={"cpu": [*TIMES[:1], Times(0.001, 0.9, 0.2)]}, speeds={"cpu": gpu / 1000})
    found = mine.with_estimates([Device("RTX-3090"), Device("T4"), Device("abacus")])
    assert found.estimated == {"RTX-3090": "cpu", "T4": "cpu"}
    large, small = found.times_on(Device("RTX-3090"))
    assert large == pytest.approx(Times(0.001, 0.002, 0.0005))
    assert small == pytest.approx(Times(SHORTEST.forward, 0.0009, 0.0002))
    assert found.times_on(Device("T4"))[0] == pytest.approx(TIMES[0].divided(gpus()["T4"].speed() / gpu * 1000))
    assert found.times_on(Device("cpu")) == [*mine.times["cpu"]]


def test_a_gpu_that_was_profiled_is_believed_rather_than_a_cpu() -> None:
    mine = replace(profile("cpu", "V100-16"), speeds={"cpu": 1e12}).with_estimates([Device("P4")])
    assert mine.estimated == {"P4": "V100-16"}


def test_without_a_gpu_that_is_known_there_are_no_estimates() -> None:
    assert profile("one", "two").with_estimates([Device("RTX-3090")]) == profile("one", "two")


def test_profiles_of_one_model_on_several_devices_are_joined() -> None:
    both = profile("RTX-3090").with_estimates([Device("T4")]).joined(Profile("m", 4, LAYERS, {"T4": TIMES}, {"T4": 9}))
    assert (set(both.times), both.memory, both.estimated) == ({"RTX-3090", "T4"}, {"T4": 9}, {})
    assert both.times["T4"] == tuple(TIMES)
    with pytest.raises(SettingError, match="are of different layers or minibatches; profile anew"):
        both.joined(Profile("m", 5, LAYERS, {"T4": TIMES}, {}))


@pytest.mark.skipif(not OPT_350M.exists(), reason=MISSING)
def test_the_reference_profile() -> None:
    mine = reference_profile.load(OPT_350M)
    assert (mine.model, mine.samples, len(mine.layers), len(mine.times)) == ("OPT-350", 4, 26, 7)
    assert mine.times_on(Device("GH200"))[5] == Times(0.003569, 0.010343, 0.001368)


def test_weights_of_a_file_without_frozen_ones_are_trained(tmp_path: Path) -> None:
    """As of an earlier release's; a layer has no more frozen bytes than bytes."""
    file = tmp_path / "p.json"
    save(Profile("m", 4, [replace(LAYERS[0], frozen=3), LAYERS[1]], {"own": TIMES}, {}), file)
    value = json.loads(file.read_text())

    def layers() -> list[int]:
        file.write_text(json.dumps(value))
        return [layer.frozen for layer in load(file).layers]

    assert layers() == [3, 0]
    del value["layers"][0]["frozen_bytes"]
    assert layers() == [0, 0]
    value["layers"][1]["frozen_bytes"] = 1
    with pytest.raises(
        SettingError, match=r"p\.json: the profile of m has frozen_bytes=1 in 'b', of parameter_bytes=0"
    ):
        layers()


def test_our_form_has_a_version(tmp_path: Path) -> None:
    save(profile("own"), tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text())["schema_version"] == 1


def test_what_a_module_sends_is_sent_by_each_of_its_calls() -> None:
    link = Link(1000.0, 1.0)
    once = Profile("m", 1, LAYERS, {"own": TIMES}, {})
    twice = Profile("m", 1, LAYERS, {"own": TIMES}, {}, calls=[(0, 2), (0, 2)])
    assert once.crossing(link, 1) == 1.0 + LAYERS[0].output / 1000
    assert twice.crossing(link, 1) == 2 * (1.0 + LAYERS[0].output // 2 / 1000)
