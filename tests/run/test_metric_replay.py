"""The stand-ins for metrics and ``log``: what they let through, what they refuse, and what they leave behind."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torchmetrics import CatMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.regression import MeanSquaredError

from lightning_hetpipe.errors import Discarded, SettingError
from lightning_hetpipe.redirect import Redirect
from lightning_hetpipe.run.extensions.replay import Replay
from tests.support.ahead import CLASSES, Model, accuracy, auroc, log_accuracy, recording, replayed, scores


@pytest.fixture
def model() -> Any:
    return Model(log_accuracy, acc=accuracy(), scores=scores(), mse=MeanSquaredError(), listed=[SumMetric()])


@pytest.fixture
def replay(model: Model) -> Replay:
    installed = Replay(model)
    return installed


def test_a_wrong_keyword_fails_in_the_users_line(model: Any, replay: Replay) -> None:
    with pytest.raises(TypeError, match="on_stepp"), recording(replay):
        model.log("x", 1.0, on_stepp=True)
    with pytest.raises(TypeError, match="value"), recording(replay):
        model.log("x")


def test_an_error_of_a_metric_fails_in_the_users_line_and_leaves_no_trace(model: Any, replay: Replay) -> None:
    with recording(replay) as record:
        model.acc(torch.eye(CLASSES), torch.arange(CLASSES))
        with pytest.raises(RuntimeError):
            model.acc(torch.zeros(4, CLASSES), torch.zeros(3, dtype=torch.long))
        assert model.acc.compute() == 1
    assert model.acc.update_count == 0
    replayed(replay, record)
    assert (model.acc.update_count, float(model.acc.compute())) == (1, 1.0)


def test_a_metric_from_elsewhere_cannot_be_logged_unnoticed(model: Any, replay: Replay) -> None:
    other = SumMetric()
    with pytest.raises(SettingError, match="SumMetric that was not among the module's metrics"), recording(replay):
        model.log("x", other)


def test_reading_a_metric_that_would_synchronise_is_refused() -> None:
    model: Any = Model(log_accuracy, acc=MulticlassAccuracy(CLASSES, distributed_available_fn=lambda: True))
    replay = Replay(model)
    with recording(replay) as record:
        model.acc(torch.eye(CLASSES), torch.arange(CLASSES))
    with (
        pytest.raises(SettingError, match=r"MulticlassAccuracy\.compute\(\) .*sync_on_compute=False"),
        recording(replay),
    ):
        model.acc.compute()
    replayed(replay, record)
    assert model.acc.update_count == 1


def test_the_value_of_a_metric_keeps_its_gradient(model: Any, replay: Replay) -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with recording(replay) as record:
        value = model.mse(x * 3, torch.zeros(2))
    (gradient,) = torch.autograd.grad(value, x)
    torch.testing.assert_close(gradient, 9 * x.detach())
    replayed(replay, record)
    assert all(not state.requires_grad for state in model.mse.metric_state.values())


class Saved:
    """Part of an autograd graph that keeps a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_a_metric_does_not_keep_a_minibatchs_graph_alive() -> None:
    model: Any = Model(log_accuracy, mse=MeanSquaredError(), cat=CatMetric())  # the second one's state is a list
    replay = Replay(model)
    kept: list[weakref.ref[Saved]] = []

    def pack(tensor: torch.Tensor) -> Saved:
        saved = Saved(tensor.detach())  # an output that holds its own graph would keep it
        kept.append(weakref.ref(saved))
        return saved

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor), recording(replay) as record:
        values = model.mse(x.exp(), torch.zeros(2)), model.cat(x.exp())
    assert any(reference() is not None for reference in kept)
    assert values[0].requires_grad
    assert values[1].requires_grad
    del values
    gc.collect()
    assert all(reference() is None for reference in kept)
    replayed(replay, record)


def test_a_plain_first_minibatch_may_leave_graphs_in_the_metrics() -> None:
    model: Any = Model(log_accuracy, auroc=auroc(), mse=MeanSquaredError())
    replay = Replay(model)
    target = torch.arange(CLASSES)
    out = torch.eye(CLASSES, requires_grad=True).softmax(1)

    def count() -> Any:
        return model.auroc(out, target), model.mse(out[0], target)

    assert count()[1].grad_fn is not None
    assert any(item.grad_fn is not None for item in model.auroc.preds)
    with recording(replay) as record:
        count()
    replayed(replay, record)
    assert (model.auroc.update_count, model.mse.update_count) == (2, 2)


def test_a_change_from_outside_is_noticed(model: Any, replay: Replay) -> None:
    for reset, expected in ((False, 1.0), (False, 2.0), (True, 1.0)):
        if reset:
            model.listed[0].reset()
        with recording(replay) as record:
            model.listed[0].update(1.0)
            assert model.listed[0].compute() == expected
        replayed(replay, record)
        assert model.listed[0].compute() == expected


def test_logging_a_collection_ahead_does_not_touch_it(model: Any, replay: Replay) -> None:
    model.scores.update(torch.eye(CLASSES), torch.arange(CLASSES))
    model.scores.f1.update(torch.eye(CLASSES), torch.arange(CLASSES))
    with recording(replay):
        model.log_dict(model.scores)  # would give members of one compute group the same state
    assert (model.scores.f1.update_count, model.scores.precision.update_count) == (2, 1)


class Counted(SumMetric):
    copies = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        Counted.copies += 1
        super().__setstate__(state)


def test_a_metric_is_copied_once_not_per_step() -> None:
    Counted.copies = 0
    model: Any = Model(log_accuracy, total=Counted())
    replay = Replay(model)
    records = []
    for _ in range(5):
        with recording(replay) as record:
            model.total(1.0)
        records.append(record)
        if len(records) > 2:
            replayed(replay, records.pop(0))
    assert Counted.copies == 1
    assert float(model.total.sum_value) == 3.0


def test_only_the_recording_thread_is_ahead(model: Any, replay: Replay) -> None:
    with recording(replay) as record:
        model.mse(torch.ones(2), torch.zeros(2))
        other = threading.Thread(target=lambda: model.listed[0].update(5.0))
        other.start()
        other.join()
        model.listed[0].update(1.0)
        assert model.listed[0].compute() == 6.0
    assert (model.mse.update_count, float(model.listed[0].sum_value)) == (0, 5.0)
    replayed(replay, record)
    assert (model.mse.update_count, float(model.listed[0].sum_value)) == (1, 6.0)


def give_up(model: Any, replay: Replay) -> None:
    with recording(replay):
        model.listed[0].update(100.0)
        raise Discarded


def test_what_is_discarded_leaves_no_trace(model: Any, replay: Replay) -> None:
    records = []
    for value in (1.0, 10.0):
        with recording(replay) as record:
            model.listed[0].update(value)
        records.append(record)
    with pytest.raises(Discarded):
        give_up(model, replay)
    replayed(replay, records[0])
    replay.discarded()
    with recording(replay) as last:
        model.listed[0].update(1000.0)
        assert model.listed[0].compute() == 1001.0
    replayed(replay, last)
    assert model.listed[0].compute() == 1001.0


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_behave_plainly(model: Any, replay: Replay, duplicate: Callable[[Any], Any]) -> None:
    twice = duplicate(duplicate(model))
    with recording(replay):
        for name in ("acc", "scores"):
            getattr(twice, name)(torch.eye(CLASSES), torch.arange(CLASSES))
        twice.listed[0].update(2.0)
        with pytest.warns(UserWarning, match="not registered"):
            twice.log("x", 1.0)
    assert (twice.acc.update_count, twice.scores["mse"].update_count, float(twice.listed[0].sum_value)) == (1, 1, 2.0)
    assert model.acc.update_count == 0
    assert twice.log.__self__ is twice
    for name in ("forward", "reset", "update", "compute"):
        assert not isinstance(getattr(twice.acc, name), Redirect)
    assert twice.acc.reset.__self__ is twice.acc


def test_uninstall_leaves_no_trace(model: Any) -> None:
    def dicts() -> list[dict[str, Any]]:
        return [dict(vars(module)) for module in (*model.modules(), model.listed[0])]

    classes = [
        (cls, dict(vars(cls))) for cls in (Metric, MetricCollection, MulticlassAccuracy, L.LightningModule, Model)
    ]
    before, keys = dicts(), list(model.state_dict())
    replay = Replay(model)
    assert list(model.state_dict()) == keys
    with recording(replay):
        model.log("x", 1.0)
        model.acc(torch.eye(CLASSES), torch.arange(CLASSES))
    replay.closed()
    assert dicts() == before
    for cls, names in classes:
        assert dict(vars(cls)) == names
    with recording(replay):
        model.acc(torch.eye(CLASSES), torch.arange(CLASSES))
    assert model.acc.update_count == 1
