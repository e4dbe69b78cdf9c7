"""Logs and counts made ahead of time appear at their own step exactly as in a plain run."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassF1Score, MulticlassPrecision
from torchmetrics.regression import MeanSquaredError
from torchmetrics.wrappers import BootStrapper, MetricTracker, MinMaxMetric, Running

from lightning_hetpipe.errors import SettingError
from tests.support.ahead import CLASSES, Model, Step, Watch, accuracy, auroc, fit, log_accuracy, scores
from tests.support.marks import quick


def log_levels(m: Any, out: Tensor, y: Tensor, i: int) -> None:
    loss = nn.functional.cross_entropy(out, y)
    m.log("default", loss)
    m.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
    m.log("epoch", loss, on_step=False, on_epoch=True, logger=False)
    m.log("number", float(i), True, batch_size=1)
    m.log("flag", i % 2, on_epoch=True)
    m.log("loss/dataloader_idx_1", loss, add_dataloader_idx=False)


def log_reductions(m: Any, out: Tensor, y: Tensor, i: int) -> None:
    value = out.mean()
    for reduce_fx in ("mean", "sum", "min", "max", torch.max):
        m.log(f"{reduce_fx}", value, on_step=True, on_epoch=True, reduce_fx=reduce_fx)
    m.log("sized", value, on_epoch=True, batch_size=2 * i + 1)


def log_dicts(m: Any, out: Tensor, y: Tensor, i: int) -> None:
    values: dict[str, Any] = {"a": out.sum(), "b": i}
    m.log_dict(values, on_step=True, on_epoch=True, prog_bar=True)
    values["b"] = -1
    values["a"].detach().add_(100)


def log_then_change_in_place(m: Any, out: Tensor, y: Tensor, i: int) -> None:
    value = out.detach().mean()
    m.log("before", value, on_step=True, on_epoch=True)
    m.mean.update(value)
    m.log("mean", m.mean, on_step=False, on_epoch=True)
    value.zero_()


def log_objects(m: Any, out: Tensor, y: Tensor, i: int) -> None:
    m.acc(out, y)
    m.log("acc", m.acc, on_step=True, on_epoch=True)
    m.mean.update(out.detach(), weight=2.0)
    m.log("mean", m.mean, on_step=False, on_epoch=True, metric_attribute="mean")
    m.auroc.update(out.softmax(1), y)
    m.log("auroc", m.auroc, on_step=False, on_epoch=True)


def log_values_of_forward(m: Any, out: Tensor, y: Tensor, i: int) -> None:
    m.log("acc", m.acc(out, y), on_step=True, on_epoch=True)
    m.log("auroc", m.auroc(out.softmax(1), y))
    m.log_dict(m.minmax(out, y))  # its minimum and maximum remember earlier minibatches


def log_collection(m: Any, out: Tensor, y: Tensor, i: int) -> None:
    if i % 3:
        m.scores.update(out, y)
    else:
        m.log_dict({f"batch_{k}": v for k, v in m.scores(preds=out, target=y).items()})
    m.log_dict(m.scores, on_step=False, on_epoch=True)
    m.scores["extra_mse"].update(out.argmax(1), y)  # a member alone


def log_held_anywhere(m: Any, out: Tensor, y: Tensor, i: int) -> None:
    m.by_name["a"](out, y)
    m.log("a", m.by_name["a"], on_step=True, on_epoch=True)
    m.listed[0].update(out.argmax(1), y)
    m.log("listed", m.listed[0], on_step=False, on_epoch=True)
    m.plain["x"][0](out.detach())
    if i == 6:
        m.log("plain", m.plain["x"][0].compute())


def log_computed(m: Any, out: Tensor, y: Tensor, i: int) -> None:
    m.acc.update(out, y)
    m.log("so_far", m.acc.compute())
    if i % 3 == 2:
        m.acc.reset()
    m.log_dict({"f": m.ratio(out, y), "r": m.running(out.mean())})
    m.precision.update(out, y)  # a part of the ratio
    m.log("ratio", m.ratio.compute())
    m.log("window", m.running.compute())


def log_tracker(m: Any, out: Tensor, y: Tensor, i: int) -> None:
    if i % 4 == 0:
        m.tracker.increment()
    m.log("now", m.tracker(out, y))
    m.log("best", m.tracker.best_metric())


def log_bootstrap(m: Any, out: Tensor, y: Tensor, i: int) -> None:
    m.log_dict(m.boot(out, y))
    m.log("drawn", torch.rand(()))


CASES: dict[str, tuple[Step, Callable[[], dict[str, Any]]]] = {
    "levels": (log_levels, dict),
    "reductions": (log_reductions, dict),
    "log_dict": (log_dicts, dict),
    "changed in place": (log_then_change_in_place, lambda: {"mean": MeanMetric()}),
    "objects": (log_objects, lambda: {"acc": accuracy(), "mean": MeanMetric(), "auroc": auroc()}),
    "values": (
        log_values_of_forward,
        lambda: {"acc": accuracy(), "auroc": auroc(), "minmax": MinMaxMetric(accuracy())},
    ),
    "collection": (log_collection, lambda: {"scores": scores()}),
    "held anywhere": (
        log_held_anywhere,
        lambda: {
            "by_name": nn.ModuleDict({"a": accuracy()}),
            "listed": nn.ModuleList([MeanSquaredError()]),
            "plain": {"x": [SumMetric()]},
        },
    ),
    "computed": (
        log_computed,
        lambda: (
            lambda p, f: {"acc": accuracy(), "precision": p, "ratio": p / f, "running": Running(SumMetric(), window=3)}
        )(MulticlassPrecision(CLASSES), MulticlassF1Score(CLASSES)),
    ),
    "tracker": (log_tracker, lambda: {"tracker": MetricTracker(accuracy())}),
    "bootstrap": (log_bootstrap, lambda: {"boot": BootStrapper(accuracy(), num_bootstraps=4)}),
}


@quick(
    "levels-1",
    "reductions-3",
    "changed in place-3",
    "collection-3",
    "held anywhere-3",
    "computed-3",
    "tracker-3",
)
@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_outsiders_see_what_a_plain_run_shows(case: str, ahead: int) -> None:
    step, metrics = CASES[case]
    plain_watch, plain_memory = fit(Model(step, **metrics()), None)
    watch, memory = fit(Model(step, **metrics()), ahead)
    assert memory.logged == plain_memory.logged
    assert len(watch.seen) == len(plain_watch.seen) == 2 * 8
    for seen, expected in zip(watch.seen, plain_watch.seen, strict=True):
        torch.testing.assert_close(seen, expected, rtol=0, atol=0, equal_nan=True)


class Fresh(L.Callback):
    """Gives each epoch a new metric, which the strategy has not seen when training began."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.acc = accuracy()
        pl_module._metric_attributes = None


class Meddler(L.Callback):
    """Resets a metric between two steps."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step % 3 == 0:
            pl_module.acc.reset()


class Prefixed(Model):
    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        super().log(f"mine/{name}", value, *args, **kwargs)


@quick("Model-Fresh", "Prefixed-Meddler")
@pytest.mark.parametrize("callback", [Fresh, Meddler])
@pytest.mark.parametrize("cls", [Model, Prefixed])
def test_metrics_that_callbacks_replace_or_reset(cls: type[Model], callback: type[L.Callback]) -> None:
    plain_watch, plain_memory = fit(cls(log_accuracy, acc=accuracy()), None, callback())
    watch, memory = fit(cls(log_accuracy, acc=accuracy()), 3, callback())
    assert memory.logged == plain_memory.logged
    for seen, expected in zip(watch.seen, plain_watch.seen, strict=True):
        torch.testing.assert_close(seen, expected, rtol=0, atol=0)


def test_a_value_read_ahead_is_refused_if_a_callback_then_changes_the_metric() -> None:
    def step(m: Any, out: Tensor, y: Tensor, i: int) -> None:
        m.acc.update(out.roll(i % 2, 1), y)
        m.log("so_far", m.acc.compute())

    with pytest.raises(SettingError, match=r"MulticlassAccuracy\.compute\(\) ahead of time.*in_flight=1"):
        fit(Model(step, acc=accuracy()), 3, Meddler())


def bad_argument(m: Any, out: Tensor, y: Tensor, i: int) -> None:
    m.log("x", 1.0, on_step=False, on_epoch=i != 4)


def twice_differently(m: Any, out: Tensor, y: Tensor, i: int) -> None:
    m.log("x", 1.0, prog_bar=i == 4)


def suffixed(m: Any, out: Tensor, y: Tensor, i: int) -> None:
    m.log("x/dataloader_idx_0" if i == 4 else "x", 1.0)


def not_a_number(m: Any, out: Tensor, y: Tensor, i: int) -> None:
    m.log_dict({"x": "high" if i == 4 else 1.0})


def not_an_attribute(m: Any, out: Tensor, y: Tensor, i: int) -> None:
    m.held[0].update(1.0)
    m.log("x", m.held[0] if i == 4 else 1.0)


@pytest.mark.parametrize("step", [bad_argument, twice_differently, suffixed, not_a_number, not_an_attribute])
def test_an_error_of_log_surfaces_at_its_step_and_names_the_line(step: Step) -> None:
    found = []
    for ahead in (None, 3):
        watch = Watch()
        with pytest.raises(Exception, match=r".") as caught:
            fit(Model(step, held=[SumMetric()], acc=accuracy()), ahead, watch)
        assert len(watch.seen) == 4
        found.append(caught.value)
    plain, replayed = found
    assert type(replayed) is type(plain)
    assert str(replayed) == str(plain)
    line = next(frame.lineno for frame in traceback.extract_tb(plain.__traceback__) if frame.name == step.__name__)
    assert replayed.__notes__ == [f"recorded at {__file__}:{line} in {step.__name__}"]
