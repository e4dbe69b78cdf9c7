"""Weights that are moved to other devices stay what they are."""

from __future__ import annotations

import torch
from torch import nn

from lightning_hetpipe.placement.spread import spread
from tests.support.accelerator import NAME, TestAccelerator
from tests.support.equality import assert_same


def test_weights_that_an_evaluation_moves_can_be_trained(accelerator: TestAccelerator) -> None:
    """They became inference tensors, of which no graph can be made: batches of other shapes left the pipeline."""
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)], nn.BatchNorm1d(4))
    before = [tensor.clone() for tensor in layers.state_dict().values()]
    with torch.inference_mode():
        spread(layers, [torch.device(NAME, index) for index in range(2)], [1.0, 1.0])
    assert {tensor.device.index for tensor in layers.state_dict().values()} == {0, 1}
    assert not any(tensor.data.is_inference() for tensor in (*layers.parameters(), *layers.buffers()))
    assert_same(before, [tensor.cpu() for tensor in layers.state_dict().values()])
    exported = torch.export.export(
        layers[0], (torch.ones(2, 4, device=next(layers[0].parameters()).device),), strict=False
    )
    assert exported is not None
