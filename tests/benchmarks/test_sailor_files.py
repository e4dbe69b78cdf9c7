"""Profiles of the Sailor project: both of its files with times, and what has to be chosen in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sailor_files import load, main
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model.profile import LayerBytes, Times
from lightning_hetpipe.planning.plan import profile_file
from tests.support.sailor import WEIGHTS, checkout, gpu, write


@pytest.fixture
def planner(tmp_path: Path) -> Path:
    """Two models, of which one was measured on two GPUs."""
    return checkout(tmp_path)


def test_bytes_are_of_the_whole_minibatch_and_an_update_is_divided_by_weights(planner: Path) -> None:
    found = load(planner / "sailor_planner" / "profiles" / "GPT", microbatch=2)
    assert (found.model, found.samples, found.memory, found.estimated) == ("GPT", 2, {}, {})
    assert found.layers == (
        LayerBytes("layer_0", 100, 2 * 50 + 6, 20, given=6),
        LayerBytes("layer_1", 40, 2 * 51 + 20, 22),
        LayerBytes("layer_2", 40, 2 * 52 + 22, 24),
        LayerBytes("layer_3", 40, 2 * 53 + 24, 26),
        LayerBytes("layer_4", 20, 2 * 54 + 26, 0),
    )
    updates = [weights / 200 * 40.0 for weights in WEIGHTS]
    expected = tuple(Times(2.0 * (n + 1), 2.0 * (2 * n + 1), updates[n]) for n in range(5))
    assert found.times == {"A100-40": expected, "V100-16": expected}


def test_all_ways_to_name_the_same_times(planner: Path) -> None:
    profiles = planner / "sailor_planner" / "profiles"
    whole = load(profiles, model="GPT", microbatch=2)
    assert load(profiles / "GPT", microbatch=2) == whole
    assert load(planner / "simulations" / "profiles_tmp.json", model="GPT", microbatch=2) == whole
    for path in (profiles / "GPT" / "A100-40" / "profile.json", profiles / "GPT" / "A100-40"):
        assert load(path, microbatch=2).times == {"A100-40": whole.times["A100-40"]}


def test_the_only_model_and_microbatch_need_not_be_chosen(planner: Path) -> None:
    found = load(planner / "sailor_planner" / "profiles" / "OPT")
    assert (found.model, found.samples, [*found.times]) == ("OPT", 4, ["A100-40"])


def test_a_gpu_without_times_at_the_microbatch_is_left_out(planner: Path) -> None:
    assert [*load(planner / "sailor_planner" / "profiles" / "GPT", microbatch=16).times] == ["A100-40"]


def test_the_script_writes_a_profile_of_ours(planner: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiles = str(planner / "sailor_planner" / "profiles")
    assert main([profiles, "--model", "GPT", "--microbatch", "2", "--out", str(tmp_path / "profile.json")]) == 0
    assert profile_file.load(tmp_path) == load(profiles, "GPT", 2)
    assert "has the times of GPT at microbatch 2 on A100-40, V100-16" in capsys.readouterr().out
    assert main([profiles]) == 2
    assert "has the models GPT, OPT; choose one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({}, r"profiles has the models GPT, OPT; choose one, as in --model GPT$"),
        ({"model": "gpt"}, r"profiles has the models GPT, OPT, and not --model gpt; choose one of these"),
        ({"model": "GPT"}, r"has GPT at the microbatches 1, 2, 16; choose one, as in --microbatch 1"),
        ({"model": "OPT", "microbatch": 5}, r"has OPT at the microbatches 4, and not --microbatch 5; choose"),
    ],
)
def test_a_choice_that_has_to_be_made(planner: Path, choices: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        load(planner / "sailor_planner" / "profiles", **choices)


def test_layers_that_several_gpus_share(planner: Path) -> None:
    folder = planner / "sailor_planner" / "profiles" / "OPT"
    write(folder / "A100-40" / "profile.json", gpu([4], degrees=(2, 4)))
    with pytest.raises(SettingError, match=r"OPT has times of OPT only for layers that several GPUs share .*; give"):
        load(folder)


def test_without_bytes(planner: Path) -> None:
    (planner / "llm_info.json").unlink()
    with pytest.raises(SettingError, match=r"OPT has times only, and neither .* has a llm_info.json .*; copy sailor/"):
        load(planner / "sailor_planner" / "profiles" / "OPT")


def test_a_folder_without_profiles(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"has no profile.json, nor GPU/profile.json or MODEL/GPU/profile.json as"):
        load(tmp_path)


TIMES_OF_OPT = "sailor_planner/profiles/OPT/A100-40/profile.json"


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        (
            TIMES_OF_OPT,
            lambda it: it["4"]["1"].pop("3"),
            r"OPT has 4 layers of OPT on A100-40, where .*info.json has 5; lea",
        ),
        (
            TIMES_OF_OPT,
            lambda it: it["4"]["1"]["3"].pop(),
            r"profile.json: \['4'\]\['1'\]\['3'\]=\[16.0, 28.0\] must be three: se",
        ),
        (
            TIMES_OF_OPT,
            lambda it: it["4"]["1"].update({"3": [1, -1, 0]}),
            r"\['4'\]\['1'\]\['3'\]\[1\]=-1 must be a number of at least 0",
        ),
        (TIMES_OF_OPT, lambda it: it["4"]["1"].update(head=[]), r"\['1'\] has the key 'head', which must be a number"),
        (
            TIMES_OF_OPT,
            lambda it: it["4"]["1"].clear(),
            r"profile.json: \['4'\]\['1'\]={} must be a mapping of at least one layer",
        ),
        (TIMES_OF_OPT, lambda it: it.update({"4": 3}), r"profile.json: \['4'\]=3 must be a mapping"),
        ("llm_info.json", lambda it: it.pop("OPT"), r"llm_info.json has no 'OPT'"),
        ("llm_info.json", lambda it: it["OPT"].pop("1"), r"llm_info.json has no '1' of OPT"),
        (
            "llm_info.json",
            lambda it: it["OPT"]["1"]["2"].pop("act_mem_bytes"),
            r"llm_info.json has no 'act_mem_bytes' of layer 2",
        ),
        (
            "llm_info.json",
            lambda it: it["OPT"]["1"]["2"].update(params_bytes=1.5),
            r"\['OPT'\]\['1'\]\['2'\]\['params_bytes'\]=1.5 must be a wh",
        ),
    ],
)
def test_wrong_files(planner: Path, file: str, change: Callable[[Any], object], says: str) -> None:
    value = json.loads((planner / file).read_text())
    change(value)
    write(planner / file, value)
    with pytest.raises(SettingError, match=says):
        load(planner / "sailor_planner" / "profiles" / "OPT")
