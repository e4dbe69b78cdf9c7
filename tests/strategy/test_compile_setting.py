"""Values of `compile`, and their refusals before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.strategy import compile_setting
from tests.support.small import Learner, assert_refused, refused

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


@pytest.mark.parametrize("value", [0, 1, None, "", ["inductor"], {"fullgraph": False}, {"backend": "eager", "x": 1}])
def test_a_value_of_another_kind(value: Any) -> None:
    with refused(f"compile={value!r} must be True or False, the name of a backend", "backend, mode, dynamic, options"):
        HetPipeStrategy(compile=value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nothing", "compile='nothing' is no backend of torch.compile here; name one of aot_eager"),
        ({"dynamic": "often"}, "compile's dynamic='often' must be True, False or None"),
        ({"options": 3}, "compile's options=3 must be a dictionary"),
        (
            {"options": {"zzz": 1}},
            "compile's options={'zzz': 1} are not inductor's: Unexpected optimization option zzz",
        ),
        ({"options": {"max_autotune": "yes"}}, "Unexpected type of attr max_autotune, got str should be bool; leave"),
        ({"mode": "fast"}, "compile's mode='fast' is none of torch.compile's; set one of default"),
        ({"backend": "eager", "mode": "default"}, "compile's mode='default' is inductor's, and the backend is 'eager'"),
        ({"mode": "reduce-overhead"}, "uses CUDA graphs, whose results the next minibatch overwrites"),
        ({"mode": "max-autotune"}, "set mode='max-autotune-no-cudagraphs'"),
        ({"options": {"triton.cudagraphs": True}}, "uses CUDA graphs"),
        ("cudagraphs", "uses CUDA graphs"),
    ],
)
def test_refused_before_anything_runs(value: Any, message: str) -> None:
    assert_refused(Learner(), message, strategy=HetPipeStrategy(stages=2, compile=value))


def test_without_a_compiler_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_setting, "cpp_compiler_error", lambda: "No working C++ compiler found")
    with refused("compile=True needs a C++ compiler for stages on the CPU", "No working C++ compiler", "install g++"):
        compile_setting.check({}, CPU)
    compile_setting.check({"backend": "aot_eager"}, CPU)
    compile_setting.check({}, [torch.device("cuda")])
