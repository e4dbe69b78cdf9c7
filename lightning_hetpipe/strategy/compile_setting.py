"""Setting ``compile``: the arguments of torch.compile for the layers of stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.torch_private.graphs import cpp_compiler_error, inductor_modes, inductor_options_error

INDUCTOR = "inductor"


def options(value: bool | str | Mapping[str, Any]) -> dict[str, Any] | None:
    """Return torch.compile's arguments for ``compile=value``, or None to compile nothing."""
    if isinstance(value, bool):
        return {} if value else None
    if isinstance(value, str):
        return {"backend": value}
    return {name: dict(given) if isinstance(given, Mapping) else given for name, given in value.items()}


def check(options: Mapping[str, Any], devices: Sequence[torch.device]) -> None:
    """Refuse arguments that torch.compile would refuse in the middle of training, and CUDA graphs."""
    backend, mode, further = options.get("backend", INDUCTOR), options.get("mode"), options.get("options")
    if not callable(backend) and backend not in (known := torch.compiler.list_backends(exclude_tags=())):
        raise SettingError(
            f"compile={backend!r} is no backend of torch.compile here; name one of {', '.join(sorted(known))}, or set"
            " compile=True"
        )
    if options.get("dynamic") not in (None, True, False):
        raise SettingError(f"compile's dynamic={options['dynamic']!r} must be True, False or None")
    if further is not None and not isinstance(further, Mapping):
        raise SettingError(f"compile's options={further!r} must be a dictionary")
    if backend == "cudagraphs":
        raise _cuda_graphs(options)
    if backend != INDUCTOR:
        if mode is not None:
            raise SettingError(f"compile's mode={mode!r} is inductor's, and the backend is {backend!r}; leave it out")
        return
    modes = inductor_modes()
    if mode is not None and mode not in modes:
        raise SettingError(f"compile's mode={mode!r} is none of torch.compile's; set one of {', '.join(modes)}")
    if {**modes.get(mode or "default", {}), **(further or {})}.get("triton.cudagraphs"):
        raise _cuda_graphs(options)
    if further and (reason := inductor_options_error(further)) is not None:
        raise SettingError(
            f"compile's options={dict(further)!r} are not inductor's: {reason}; leave that out, or give one that"
            " torch._inductor.list_options() names"
        )
    if any(device.type == "cpu" for device in devices) and (reason := cpp_compiler_error()) is not None:
        raise SettingError(
            f"compile=True needs a C++ compiler for stages on the CPU, and torch finds none ({reason}); install g++,"
            " name one in the environment variable CXX, or leave compile out"
        )


def _cuda_graphs(options: Mapping[str, Any]) -> SettingError:
    return SettingError(
        f"compile={dict(options)!r} uses CUDA graphs, whose results the next minibatch overwrites, and a pipeline has"
        " several in flight; set mode='max-autotune-no-cudagraphs', or leave it out"
    )
