"""Modules as people call them: with keywords of any kind, for outputs that hold more than tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from lightning.pytorch.demos.transformer import Transformer
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetpipe.capture.prepared_modules import without_checkpoints
from lightning_hetpipe.errors import SettingError
from tests.exact.pipelines import even
from tests.exact.running import assert_equal, expect, fit
from tests.oracle import Batch, Outputs
from tests.support.calling_models import Caches, Checkpoints, Generates, Rebinds, Scaled
from tests.support.marks import quick, slow_except
from tests.support.models import ADAMW, WORDS, Learner, vectors
from tests.support.strategies import stashing
from tests.support.trainers import quiet_trainer


def words(samples: int = 16) -> DataLoader[Any]:
    chance = torch.Generator().manual_seed(3)
    return DataLoader(TensorDataset(torch.randint(WORDS, (samples, 7), generator=chance)), 4)


def made(kind: type[Learner], **settings: Any) -> Any:
    torch.manual_seed(7)
    return kind(**settings)


@quick("3")
@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_cache_and_hidden_states(in_flight: int) -> None:
    """With batches of two sizes."""
    expected = expect(made(Caches), words(14), in_flight)
    assert_equal(expected, fit(made(Caches), words(14), strategy=even(4, 2, in_flight)))


class Reads(Caches):
    def compute(self, batch: Batch) -> Outputs:
        outputs = self.model(batch[0])
        return {"loss": outputs["cache"].states[0].sum()}


def test_a_cache_that_training_step_reads_is_named() -> None:
    with pytest.raises(SettingError, match="the pipelined module 'model' gives a Cache, of which its 'states' is used"):
        fit(made(Reads), words(), strategy=even(4, 2, 3))


class Gives(Caches):
    def compute(self, batch: Batch) -> Outputs:
        return {"loss": self.model(batch[0], labels=batch[0], cache=type(self).cache())["loss"]}

    class cache:
        def update(self, state: Any) -> Any:
            return state


def test_a_cache_that_training_step_gives_is_named() -> None:
    with pytest.raises(SettingError, match=r"'model' is given a cache, of which torch.export makes no input"):
        fit(made(Gives), words(), strategy=even(4, 2, 3, module=["model"]))


@quick("3")
@pytest.mark.parametrize("in_flight", [1, 3])
def test_evaluation_that_gives_a_cache(in_flight: int) -> None:
    """The call with labels is pipelined, those with a cache run outside."""

    def metrics(strategy: Any) -> Any:
        trainer = quiet_trainer(strategy=strategy, max_epochs=1)
        trainer.fit(made(Generates), words(), words())
        fitted = dict(trainer.callback_metrics)
        trainer.validate(made(Generates), words(), verbose=False)
        return [float(value) for value in (*fitted.values(), *trainer.callback_metrics.values())]

    assert in_flight > 1 or metrics(even(4, 2, 1)) == metrics("auto")
    if in_flight > 1:
        with pytest.warns(UserWarning, match="'model' .*is given a Cache"):
            found = metrics(even(4, 2, in_flight))
        plain = metrics("auto")
        assert len(found) == len(plain)
        assert found[3:] == plain[3:], "weights that were not trained"


class Demonstrates(Learner):
    """Lightning's own example, made small and without dropout, and its training_step."""

    def __init__(self) -> None:
        super().__init__(ADAMW)
        self.model = Transformer(vocab_size=WORDS, ninp=8, nhid=8, nlayers=1, dropout=0.0)

    def compute(self, batch: Batch) -> Outputs:
        (ids,) = batch
        return {"loss": F.nll_loss(self.model(ids[:, :-1], ids[:, 1:]), ids[:, 1:].flatten())}


@pytest.mark.slow  # tests/capture/test_data_checks.py has such masks
@pytest.mark.parametrize("in_flight", [1, 3])
def test_lightnings_transformer(in_flight: int) -> None:
    expected = expect(made(Demonstrates), words(), in_flight)
    assert_equal(expected, fit(made(Demonstrates), words(), strategy=stashing(stages=2, in_flight=in_flight)))


class Adapts(Learner):
    """LoRA by PEFT around a GPT-2, called by keywords."""

    def __init__(self) -> None:
        super().__init__(ADAMW)
        sizes: dict[str, Any] = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": WORDS, "n_positions": 8}
        still: dict[str, Any] = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        config = LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
        self.model = get_peft_model(hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **still)), config)

    def compute(self, batch: Batch) -> Outputs:
        return {"loss": self.model(input_ids=batch[0], labels=batch[0]).loss}


@pytest.mark.parametrize("in_flight", slow_except([1, 3], 3))
def test_lora(in_flight: int) -> None:
    expected = expect(made(Adapts), words(), in_flight)
    assert_equal(expected, fit(made(Adapts), words(), strategy=stashing(stages=2, in_flight=in_flight)))


@quick("3")
@pytest.mark.parametrize("in_flight", [1, 3])
def test_numbers_that_change(in_flight: int) -> None:
    """More values than there may be graphs, so that a number is an input; the other one has two graphs."""
    expected = expect(made(Scaled), vectors(44, 2), in_flight, max_epochs=1)
    assert_equal(expected, fit(made(Scaled), vectors(44, 2), strategy=even(2, 2, in_flight), max_epochs=1))


@quick("3")
@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_buffer_that_the_first_forward_makes(in_flight: int) -> None:
    expected = expect(made(Rebinds), vectors(14, 4), in_flight)
    assert_equal(expected, fit(made(Rebinds), vectors(14, 4), strategy=even(2, 2, in_flight)))


def test_checkpoints_with_keywords_run_without() -> None:
    """Models of people's own pass the layer's keywords, and the checkpoint's, in one call."""
    layer = nn.Module()
    vars(layer)["_gradient_checkpointing_func"] = checkpoint
    with without_checkpoints(layer):
        call: Any = layer._gradient_checkpointing_func
        given = call(lambda x, mask: x * mask, torch.ones(2), mask=torch.arange(2.0), use_reentrant=False)
    assert torch.equal(given, torch.tensor([0.0, 1.0]))
    assert layer._gradient_checkpointing_func is checkpoint


@pytest.mark.parametrize("in_flight", slow_except([1, 3], 3))
def test_gradient_checkpointing_is_recompute(in_flight: int, caplog: pytest.LogCaptureFixture) -> None:
    """Validation, without it, has a cache, and with it a constant that no graph of training has."""
    expected = expect(made(Checkpoints), words(), in_flight)
    strategy = stashing(stages=2, in_flight=in_flight)
    with caplog.at_level("INFO", "lightning.pytorch"):
        record = fit(made(Checkpoints), words(), strategy=strategy, val_loader=words())
    assert_equal(expected, record)
    said = sum("gradient checkpointing is enabled" in line for line in caplog.messages)
    assert said == (in_flight > 1)  # with one in flight the module's own checkpoints run, in a spread run
