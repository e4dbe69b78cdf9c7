"""State that a virtual worker resumes from when it comes back: it comes from another process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.errors import SettingError


class Own:
    """A class of the user's."""


def test_nothing_of_it_is_unpickled_and_what_would_be_is_named(tmp_path: Path) -> None:
    path, waited = tmp_path / "state.ckpt", list[str]()
    returning = SimpleNamespace(checkpoint=path, await_state=lambda: waited.append("state"))
    strategy: Any = HetPipeStrategy()
    strategy._workers.group = SimpleNamespace(seats=SimpleNamespace(returning=returning))
    torch.save({"state_dict": {}, "hyper_parameters": {"own": Own()}}, path)
    with pytest.raises(SettingError, match=r"it holds tests\.strategy\.test_returned_state\.Own; .*add_safe_globals"):
        strategy.load_checkpoint(path)
    assert waited == ["state"]
    with torch.serialization.safe_globals([Own]):
        assert isinstance(strategy.load_checkpoint(path)["hyper_parameters"]["own"], Own)
