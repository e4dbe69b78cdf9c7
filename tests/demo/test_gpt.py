from __future__ import annotations

import math
from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_hetpipe.demo import GPT, SourceText
from lightning_hetpipe.demo.data import read_source, windows
from lightning_hetpipe.errors import SettingError
from tests.support.trainers import quiet_trainer


def test_a_target_is_the_byte_that_follows() -> None:
    inputs, targets = windows(torch.arange(11, dtype=torch.uint8), context=3).tensors
    assert inputs.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert targets.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_the_source_is_read_in_order_of_names_up_to_a_bound(tmp_path: Path) -> None:
    for name, text in [("b.py", "beta"), ("a.py", "alpha"), ("c.txt", "not read")]:
        (tmp_path / name).write_text(text)
    assert bytes(read_source(tmp_path, 100).tolist()) == b"alphabeta"
    assert bytes(read_source(tmp_path, 7).tolist()) == b"alphabe"


def test_the_text_is_the_standard_librarys_and_its_parts_follow_each_other() -> None:
    data = SourceText(context=8, max_bytes=4000, val_share=0.1)
    data.setup("fit")
    sizes = {name: len(part) for name, part in data.parts.items()}
    assert sizes == {"train": 3199 // 8, "val": 399 // 8, "test": 399 // 8}
    inputs, targets = next(iter(data.val_dataloader()))
    assert inputs.shape == targets.shape == (16, 8)
    assert b"import" in bytes(torch.cat([part.tensors[0].flatten() for part in data.parts.values()]).tolist())


def test_a_folder_without_source_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"holds 0 bytes of Python source.*set data\.folder"):
        SourceText(folder=str(tmp_path)).setup("fit")


def test_a_byte_sees_only_what_came_before() -> None:
    model = GPT(context=8, width=16, blocks=2, heads=2).eval()
    ids = torch.randint(0, 256, (2, 8))
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 256
    before, after = model(ids), model(changed)
    assert before.shape == (2, 8, 256)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_the_model_keeps_its_layers_in_one_sequential() -> None:
    model = GPT(context=8, width=16, blocks=3, heads=2)
    assert set(model.parameters()) == set(model.net.parameters())
    assert len(model.net) == 1 + 3 + 2


@pytest.mark.slow
def test_a_short_training_beats_guessing() -> None:
    L.seed_everything(1, verbose=False)
    trainer = quiet_trainer()
    model, data = GPT(context=32, width=32, blocks=1, heads=2, warmup=5), SourceText(context=32, max_bytes=60_000)
    trainer.fit(model, datamodule=data)
    (result,) = trainer.test(model, datamodule=data, verbose=False)
    assert result["test_loss"] < 0.7 * math.log(256)
    assert result["test_bits_per_byte"] == pytest.approx(result["test_loss"] / math.log(2), rel=1e-5)
