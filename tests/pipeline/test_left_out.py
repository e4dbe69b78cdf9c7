"""Objects that no pipeline hands on leave a placeholder that Lightning may handle, and that nobody may use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.trainer.connectors.logger_connector.result import recursive_detach
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.plain_code import PlainCode
from lightning_hetpipe.pipeline.values import LeftOut, Value

USES: list[Callable[[Any], Any]] = [
    lambda cache: cache.layers,
    lambda cache: cache[0],
    lambda cache: list(cache),
    lambda cache: bool(cache),
    lambda cache: len(cache),
    lambda cache: cache(),
    lambda cache: 0 in cache,
]


@pytest.mark.parametrize("use", USES)
def test_its_use_names_it(use: Callable[[Any], Any]) -> None:
    with pytest.raises(SettingError, match=r"'net' gives a Cache, .* let the module return the tensors"):
        use(LeftOut("Cache", "net"))


def test_lightning_detaches_and_moves_it() -> None:
    output = {"loss": torch.ones(2, requires_grad=True) * 2, "cache": LeftOut("Cache", "net")}
    assert output["cache"] is not None
    for handled in (
        move_data_to_device(output, torch.device("cpu")),
        recursive_detach(output),
        apply_to_collection(output, Tensor, torch.clone),
    ):
        assert repr(handled["cache"]) == "<Cache of 'net', left out>"


def test_it_crosses_as_structure() -> None:
    value = Value.of({"x": torch.ones(2), "cache": LeftOut("Cache", "net")})
    code = PlainCode([])
    assert value.others == Value.of({"x": torch.ones(2)}).others
    text, _ = code.write(value.spec)
    spec = code.read(text, torch.empty)
    assert repr(Value(value.tensors, value.requires_grad, value.others, spec).tree(value.tensors)["cache"]) == (
        "<Cache of 'net', left out>"
    )
