from __future__ import annotations

import sys

import lightning as L
import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_hetpipe.demo import Digits, ResNet
from lightning_hetpipe.demo.data import load_images
from lightning_hetpipe.demo.models import one_cycle
from lightning_hetpipe.errors import SettingError
from tests.support.trainers import quiet_trainer


def parts(data: Digits) -> list[TensorDataset]:
    data.setup("fit")
    found = [*data.parts.values()]
    assert len(found) == 3
    return found


def test_the_images_are_real_and_their_parts_make_up_the_whole() -> None:
    images, labels = load_images()
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype is torch.float32
    assert (images.min().item(), images.max().item()) == (0, 1)
    split = parts(Digits())
    assert sorted(torch.cat([part.tensors[1] for part in split]).tolist()) == sorted(labels.tolist())
    together = {image.numpy().tobytes() for part in split for image in part.tensors[0]}
    assert together == {image.numpy().tobytes() for image in images}


def test_every_class_is_divided_alike() -> None:
    for part in parts(Digits()):
        counts = part.tensors[1].bincount().float()
        assert len(counts) == 10
        assert (counts / counts.mean() - 1).abs().max() < 0.1


def test_the_split_depends_on_its_seed_alone() -> None:
    same, again, other = (parts(Digits(split_seed=seed))[0].tensors[0] for seed in (0, 0, 1))
    torch.manual_seed(7)
    assert torch.equal(same, again)
    assert not torch.equal(same, other)


def test_without_scikit_learn_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SettingError, match=r'pip install "lightning-hetpipe\[examples\]"'):
        Digits().setup("fit")


def test_the_network_keeps_its_layers_in_one_sequential() -> None:
    model = ResNet(width=4, blocks=3, classes=7)
    assert model(torch.rand(5, 1, 8, 8)).shape == (5, 7)
    assert set(model.parameters()) == set(model.net.parameters())
    assert len(model.net) == 3 + 3 + 3


def test_the_learning_rate_rises_then_falls_to_zero() -> None:
    rates = [one_cycle(step / 30) for step in range(31)]
    peak = rates.index(max(rates))
    assert rates[peak] == pytest.approx(1)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert one_cycle(1) == pytest.approx(0)
    assert one_cycle(1.5) == pytest.approx(0)  # resumed for more epochs than were planned


@pytest.mark.slow
def test_two_epochs_teach_it_most_digits() -> None:
    L.seed_everything(1, verbose=False)
    trainer = quiet_trainer(max_epochs=2)
    model, data = ResNet(), Digits()
    trainer.fit(model, datamodule=data)
    (result,) = trainer.test(model, datamodule=data, verbose=False)
    assert result["test_acc"] > 0.8
