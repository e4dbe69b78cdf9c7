"""Fits of models that were taken apart: what is said of it, and where one stage is run instead."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.placement import decision
from lightning_hetpipe.run.extensions.minibatch_state import user_parts
from tests.exact.running import expect, fit
from tests.support.marks import slow_except
from tests.support.models import vectors
from tests.support.refused_models import Checked, Checks
from tests.support.small import assert_refused, pipeline


def made() -> Checks:
    torch.manual_seed(7)
    return Checks(2)


def test_one_line_says_what_is_pipelined(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fit(made(), vectors(12, 4), strategy=pipeline(3))
    told = [record.getMessage() for record in caplog.records if "taken apart" in record.getMessage()]
    assert len(told) == 1
    assert "pipelined are 'model.stem', 'model.blocks.0', 'model.blocks.1', 'model.head', which take" in told[0]
    assert "all else in it runs as user code, because 'model' decides by the values of its data" in told[0]


def test_one_stage_where_hand_overs_would_eat_the_gain(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nm is 1 then, so that it trains as a plain run does."""
    monkeypatch.setattr(decision, "HAND_OVER", 10.0)
    strategy, ours, plain = HetPipeStrategy(), made(), made()
    loader: DataLoader[Any] = vectors(22, 4)
    with caplog.at_level(logging.INFO):
        fit(ours, loader, strategy=strategy, devices=2)
    fit(plain, loader)
    assert all(map(torch.equal, ours.parameters(), plain.parameters()))
    assert strategy.last_run is not None
    assert (len(strategy.last_run.stages), strategy.last_run.in_flight) == (1, 1)
    told = [record.getMessage() for record in caplog.records if "one stage, as" in record.getMessage()]
    assert len(told) == 1
    assert "set stages for a pipeline all the same" in told[0]


def test_a_named_module_is_refused() -> None:
    assert_refused(
        made(),
        "'model' decides by the values of its data what to compute at refused_models.py",
        strategy=pipeline(3, module="model"),
        loader=vectors(12, 4),
    )


def test_parts_that_may_set_attributes() -> None:
    model = Checked(2)
    assert user_parts([model], [model.stem, *model.blocks, model.head]) == [model]
    assert model.blocks[0] in user_parts([model], [model.stem, model.head])
    assert not any(isinstance(part, nn.Dropout) for part in user_parts([model], []))


def test_stages_that_were_asked_for_are_made_all_the_same(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision, "HAND_OVER", 10.0)
    strategy = pipeline(1)
    with caplog.at_level(logging.INFO):
        fit(made(), vectors(8, 4), strategy=strategy, max_epochs=1)
    assert strategy.last_run is not None
    assert len(strategy.last_run.stages) == 2
    assert "so that a pipeline is hardly worth it; leave stages and in_flight out" in caplog.text


@pytest.mark.parametrize("layers", slow_except([3, 6, 24], 3))
def test_many_layers_taken_apart(layers: int) -> None:
    torch.manual_seed(7)
    ours = Checks(layers)
    strategy = pipeline(3)
    record = fit(ours, vectors(14, 4), strategy=strategy, max_epochs=1)
    torch.manual_seed(7)
    expected = expect(Checks(layers), vectors(14, 4), 3, max_epochs=1)
    assert all(
        torch.equal(one["loss"], other["loss"]) for one, other in zip(expected.outputs, record.outputs, strict=True)
    )
    assert strategy.last_run is not None
    assert sum(len(stage.layers) for stage in strategy.last_run.stages) >= layers + 2
    assert list(strategy.last_run.taken_apart) == ["model"]
    assert "user code: of 'model', the part around its pipelined modules" in str(strategy.last_run)
