"""Stand-ins for torchvision's operators where its kernels do not load: a build for CUDA beside torch for CPUs.

To be imported before Lightning, which imports torchvision where it is installed; that fails without them.
"""

from __future__ import annotations

from ctypes import CDLL
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor


def define_operators() -> None:
    """Define torchvision's operators where its kernels do not load, as those of a build for CUDA beside torch for CPUs.

    It cannot be imported otherwise.
    """
    package = find_spec("torchvision")
    if package is None or hasattr(torch.ops.torchvision, "nms"):
        return
    try:
        CDLL(str(next(Path(str(package.origin)).parent.glob("_C*.so"))))
    except (OSError, StopIteration):
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        torch.library.impl("torchvision::nms", "CPU")(non_maximum_suppression)
        from torchvision import extension

        extension._has_ops = lambda: True  # which has looked for the kernels


def non_maximum_suppression(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Places of the boxes that no box of a higher score overlaps by more than ``threshold``."""
    from torchvision.ops import box_iou

    overlaps, kept = box_iou(boxes, boxes), list[int]()
    for place in scores.argsort(descending=True).tolist():
        if not any(overlaps[place, other] > threshold for other in kept):
            kept.append(place)
    return torch.tensor(kept, dtype=torch.long)


define_operators()
