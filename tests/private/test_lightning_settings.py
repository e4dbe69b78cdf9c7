"""Private names of Lightning for settings of a Trainer, launchers, and ends of a run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.tuner.tuning import Tuner

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe import lightning_private as of_lightning
from tests.private.guarding import guards
from tests.support.small import Learner, batches
from tests.support.trainers import quiet_trainer


@guards()
def test_the_writer_of_checkpoints() -> None:
    strategy, io = HetPipeStrategy(), TorchCheckpointIO()
    of_lightning.set_checkpoint_io(strategy, io)
    assert super(HetPipeStrategy, strategy).checkpoint_io is io, "a user's plugin would not write checkpoints"


@guards("_layer_sync")
def test_synchronised_batchnorm() -> None:
    strategies = [quiet_trainer(HetPipeStrategy(), sync_batchnorm=sync).strategy for sync in (False, True)]
    asked = [of_lightning.synchronises_batchnorm(s) for s in strategies if isinstance(s, ParallelStrategy)]
    assert asked == [False, True], "sync_batchnorm=True would be dropped silently"


@guards("_average_model")
def test_averages() -> None:
    averaging = EMAWeightAveraging()
    trainer = quiet_trainer(HetPipeStrategy(), callbacks=[averaging])
    assert of_lightning.averages(trainer) == []
    module = Learner()
    averaging.setup(trainer, module, "fit")
    numbers = {tensor.numel() for tensor in of_lightning.averages(trainer)}
    wanted = {tensor.numel() for tensor in module.state_dict().values()} | {1}
    assert numbers == wanted, "virtual workers would evaluate and end with averages of their own"


@guards("_device")
def test_where_averages_are_kept() -> None:
    averaging = EMAWeightAveraging(decay=0.5), StochasticWeightAveraging(0.1, device=None)
    trainer, module = quiet_trainer("auto", callbacks=[*averaging]), Learner()
    of_lightning.average_on_host(trainer, undo := ExitStack())
    vars(module)["_device"] = torch.device("meta")  # as Lightning tells it of the root device, before it is moved
    averaging[0].setup(trainer, module, "fit")
    devices = {tensor.device.type for tensor in of_lightning.averages(trainer)}
    assert devices == {"cpu"}, "the root device would hold all averages of a model that is spread"
    assert averaging[1]._device == torch.device("cpu")
    undo.close()
    assert [callback._device for callback in averaging] == [None, None]


@guards()
def test_several_optimizers() -> None:
    class Two(Learner):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([parameter], lr=0.1) for parameter in list(self.parameters())[:2]]

    with pytest.raises(RuntimeError) as raised:
        quiet_trainer("auto").fit(Two(), batches(1))
    assert of_lightning.wants_several_optimizers(raised.value), "users would be advised manual optimization"


@guards("_Launcher")
def test_launchers() -> None:
    required = of_lightning.BaseLauncher.__abstractmethods__
    assert required == {"is_interactive_compatible", "kill", "launch"}, "our launcher would lack a method"


@guards("_TunerExitException")
def test_the_end_of_tuning() -> None:
    ended: list[type[BaseException]] = []

    class Watched(of_lightning.BaseLauncher):
        is_interactive_compatible = True

        def kill(self, signum: Any) -> None:
            raise NotImplementedError

        def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                ended.append(type(error))
                raise

    strategy = SingleDeviceStrategy()
    strategy._launcher = Watched()
    Tuner(quiet_trainer(strategy)).lr_find(Learner(), batches(3), num_training=2, update_attr=False)
    assert ended == [of_lightning.TunerExit], "the end of lr_find would end the other virtual workers"
