"""What lies outside the pieces is looked at after every step."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.private import ThreadDispatchMode
from lightning_hetpipe.strategy.outside import Outside


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool):
            for size in ((), (0,), (3,), (9000,), (4, 5)):
                self.register_buffer(f"{dtype}{size}".replace(".", " "), torch.ones(size, dtype=dtype))


class Scalars(ThreadDispatchMode):
    """Counts the numbers that Python asks for one by one: on a GPU it waits for each."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_device_is_not_waited_for_once_per_tensor() -> None:
    with Scalars() as scalars:
        outside = Outside(Module())
        outside.check(1)
    assert scalars.count == 0


@pytest.mark.parametrize("name", [name for name, buffer in Module().named_buffers() if buffer.numel()])
def test_a_change_that_torch_does_not_count_is_seen(name: str) -> None:
    module = Module()
    outside = Outside(module)
    outside.check(1)
    module.get_buffer(name).data.zero_()
    with pytest.raises(SettingError, match=name.replace("(", r"\(").replace(")", r"\)")):
        outside.check(2)
