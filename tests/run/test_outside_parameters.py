"""Tensors outside the pieces are looked at after every step."""

from __future__ import annotations

import lightning as L
import pytest
import torch

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.run.extensions.outside_parameters import OutsideParameters
from tests.support.waits import Waits


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool):
            for size in ((), (0,), (3,), (9000,), (4, 5)):
                self.register_buffer(f"{dtype}{size}".replace(".", " "), torch.ones(size, dtype=dtype))


def test_a_device_is_not_waited_for_once_per_tensor() -> None:
    with Waits() as waits:
        outside = OutsideParameters(Module())
        outside.continues(1)
    assert waits.count == 0


@pytest.mark.parametrize("name", [name for name, buffer in Module().named_buffers() if buffer.numel()])
def test_a_change_that_torch_does_not_count_is_seen(name: str) -> None:
    module = Module()
    outside = OutsideParameters(module)
    outside.continues(1)
    module.get_buffer(name).data.zero_()
    with pytest.raises(SettingError, match=name.replace("(", r"\(").replace(")", r"\)")):
        outside.continues(2)
