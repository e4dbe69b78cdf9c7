"""Number of stages, and what is said about it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from lightning_hetpipe.placement.layout import stage_count


@pytest.mark.parametrize(("devices", "layers", "stages"), [(1, 4, 1), (3, 4, 3), (4, 4, 4), (6, 4, 4), (2, 1, 1)])
@pytest.mark.filterwarnings("ignore")
def test_auto_is_a_stage_for_each_device_while_there_are_layers(devices: int, layers: int, stages: int) -> None:
    assert stage_count("auto", devices, layers) == stages


@pytest.mark.parametrize(
    ("devices", "layers", "message"),
    [
        (1, 4, "there is one device, .* as one stage, without a pipeline; for more, set stages"),
        (1, 1, "the pipelined module is one layer"),
        (6, 4, "6 devices, but only 4 layers: 2 stay idle"),
        (2, 1, "2 devices, but only 1 layer: 1 stays idle"),
    ],
)
def test_what_a_user_would_not_expect_is_said(devices: int, layers: int, message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        stage_count("auto", devices, layers)


@pytest.mark.parametrize(("stages", "devices"), [("auto", 3), (1, 1), (2, 1)])
def test_what_was_asked_for_needs_no_words(stages: Any, devices: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stage_count(stages, devices, 4)
