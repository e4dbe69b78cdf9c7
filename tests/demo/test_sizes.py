"""The demo's settings are refused by name where they make no sense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_hetpipe.demo.digits import Digits
from lightning_hetpipe.demo.gpt import GPT
from lightning_hetpipe.demo.resnet import ResNet
from lightning_hetpipe.demo.source_text import SourceText
from lightning_hetpipe.errors import SettingError

NAN = float("nan")


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (ResNet, {"lr": -1.0}, "lr=-1.0 must be at least 0"),
        (ResNet, {"weight_decay": NAN}, "weight_decay=nan must be at least 0"),
        (ResNet, {"blocks": 0}, "blocks=0 must be at least 1"),
        (GPT, {"dropout": 1.5}, "dropout=1.5 must be at least 0 and at most 1"),
        (GPT, {"betas": (0.5, 1.0)}, r"betas\[1\]=1.0 must be at least 0 and at most 1"),
        (Digits, {"val_share": 2.0}, "val_share=2.0 must be at least 0.01 and at most 0.98"),
        (Digits, {"val_share": 0.5, "test_share": 0.6}, r"val_share \+ test_share=1.1 must be"),
        (SourceText, {"val_share": 0.5}, "val_share=0.5 must be at least 0.001 and at most 0.45"),
    ],
)
def test_settings_out_of_range(make: Callable[..., Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make(**settings)
