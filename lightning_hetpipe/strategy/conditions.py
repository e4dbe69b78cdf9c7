"""What a profile was measured under: where any of it differs, what was kept on disk does not hold."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from typing import Any

import torch

from lightning_hetpipe.capture.profiling import METHOD, Study, code_of
from lightning_hetpipe.pipeline.values import Value
from lightning_hetpipe.planning.plan.profile_cache import Conditions

_WHEEL = re.compile(r"\+(cpu|cu\d+)$")


def conditions(study: Study, device: str, precision: str) -> Conditions:
    """Of measuring the layers of ``study`` on a device of that name.

    They are the same on a machine that has the device and on one that has not, so that a cache can be copied there:
    which of its wheels of one version torch came in is left out.
    """
    layers = [(layer.name, layer.module) for layer, _, _ in study.layers]
    return Conditions(
        layers=[(name, code_of(module)) for name, module in layers],
        parameters=[
            (f"{name}.{own}", tuple(each.shape), f"{each.dtype} {each.requires_grad} {_strides(each)}")
            for name, module in layers
            for own, each in [*module.named_parameters(), *module.named_buffers()]
        ],
        inputs=[each for _, value, _ in study.layers for each in _inputs(value)],
        precision=precision,
        torch=_WHEEL.sub("", torch.__version__),
        device=device,
        settings=_settings(study) | ({"processor": processor()} if device == "cpu" else {}),
    )


def processor() -> str:
    """What this machine's CPU is called, and the instructions that torch uses of it."""
    model = platform.processor()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), model)
    except OSError:  # another system
        pass
    return f"{model or platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _settings(study: Study) -> dict[str, str]:
    """What is set, in the process and of the Trainer's."""
    backends: Any = torch.backends
    found = {
        "method": METHOD,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default dtype": study.default_dtype,
        "autocast": [[str(dtype) for kind, dtype in piece.autocast.dtypes if dtype] for piece in study.pieces],
        "optimizer": f"{type(study.optimizer).__module__}.{type(study.optimizer).__qualname__}",
        # Those that decide how a step is computed are switches, or off at zero; how large the others are is no matter.
        "options": _switches({} if study.optimizer is None else study.optimizer.defaults),
        # These can be read whichever of torch's two ways to set them the user has taken.
        "matmul": [backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision],
        "convolutions": [backends.cudnn.conv.fp32_precision, backends.cudnn.benchmark, backends.mkldnn.enabled],
        "rnn": backends.cudnn.rnn.fp32_precision,
        "attention": [backends.cuda.flash_sdp_enabled(), backends.cuda.mem_efficient_sdp_enabled()],
    }
    return {name: str(value) for name, value in found.items()}


def _switches(options: Mapping[str, object]) -> dict[str, bool | None]:
    plain = {name: value for name, value in options.items() if value is None or isinstance(value, bool | int | float)}
    return {name: None if plain[name] is None else bool(plain[name]) for name in sorted(plain)}


def _inputs(value: Value) -> list[tuple[tuple[int, ...], str]]:
    tensors = zip(value.tensors, value.requires_grad, strict=True)
    others = [repr(each) for each in value.others if isinstance(each, bool | int | float | str)]
    return [
        *((tuple(each.shape), f"{each.dtype} {wanted} {_strides(each)}") for each, wanted in tensors),
        *(((), text) for text in others),
    ]


def _strides(tensor: torch.Tensor) -> str:
    """Channels that come last make convolutions faster, or slower."""
    return str(tensor.stride() if tensor.layout is torch.strided else tensor.layout)
