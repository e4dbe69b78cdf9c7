"""Values of `compile` that are taken: the golden table has those that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.strategy import planned_devices

CPU = [torch.device("cpu")]


@pytest.mark.parametrize(
    ("value", "options"),
    [
        (False, None),
        (True, {}),
        ("aot_eager", {"backend": "aot_eager"}),
        ({"mode": "default", "dynamic": True}, {"mode": "default", "dynamic": True}),
        ({"options": {"max_autotune": True}}, {"options": {"max_autotune": True}}),
    ],
)
def test_what_torch_compile_is_given(value: Any, options: Any) -> None:
    assert HetPipeStrategy(compile=value).compile == options


def test_without_a_compiler_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_devices, "cpp_compiler_error", lambda: "No working C++ compiler found")
    planned_devices.check_compile({"backend": "aot_eager"}, CPU)
    planned_devices.check_compile({}, [torch.device("cuda")])
