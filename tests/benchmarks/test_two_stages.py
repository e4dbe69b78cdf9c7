"""The two-stage benchmark: its variants train the same model, and its ratios are formed within rounds."""

from dataclasses import replace

import pytest
import torch

from benchmarks.harness import Measurement
from benchmarks.training_models import MODELS, build
from benchmarks.training_task import ModelName, Task
from benchmarks.two_stages import (
    DDP,
    ONE_THREAD,
    RATIOS,
    SCHEDULE_1F1B,
    TWO_STAGES,
    Round,
    choose,
    compare,
    limit,
    measure,
    measure_ddp,
    measure_schedule_1f1b,
    measure_two_at_once,
    report,
)

TINY = Task("plain", layers=4, width=8, batch=8, warmup=2, steps=3, tail=1)
GPT = replace(TINY, model="gpt")
STAGES_OVER_THREAD, STAGES_OVER_1F1B = RATIOS[:2]
MACHINE = {"cpu": "a cpu", "cores_used": "CPUs 0 and 1", "load_average": 0.0, "torch": "2", "lightning": "2"}


def measured(name: str, rate: float) -> dict[str, Measurement]:
    return {name: Measurement(name, rate, cores=1.0, threads=1, loss=0.5)}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "gpt", "bert"])
def test_the_peers_train_what_the_plain_trainer_trains(model: ModelName) -> None:
    task = replace(TINY, model=model)
    (plain,) = measure(task).values()
    pipelined = measure_schedule_1f1b(task, microbatches=(2, 4))
    (shared,) = measure_ddp(task).values()
    assert plain.loss is not None
    assert [*pipelined] == ["2", "4"]
    assert [value.loss for value in pipelined.values()] == pytest.approx([plain.loss] * 2, rel=1e-4)
    assert shared.loss == pytest.approx(plain.loss, rel=1e-4)


@pytest.mark.parametrize("model", [name for name, model in MODELS.items() if model.halves is not None])
def test_the_two_halves_are_the_whole(model: ModelName) -> None:
    """For a pipeline over two processes; so the optimizers of both see each parameter once."""
    task = replace(TINY, model=model)
    kind, net, others = MODELS[model], build(task), build(task)
    inputs, targets = kind.samples(task, 6, torch.Generator().manual_seed(0))
    assert kind.halves is not None
    first, last = kind.halves(others)
    assert torch.equal(last(first(inputs)), net(inputs))
    own = [parameter for half in (first, last) for parameter in half.parameters()]
    assert len({*map(id, own)}) == len(own)
    assert {*map(id, own)} == {*map(id, others.parameters())}
    assert kind.loss(net(inputs), targets).dim() == 0
    assert sum(parameter.numel() for parameter in own) == sum(parameter.numel() for parameter in net.parameters())


@pytest.mark.slow
def test_two_at_once_add_up_and_use_one_thread_each() -> None:
    (both,) = measure_two_at_once(TINY).values()
    assert both.threads == 1
    assert both.rate > 0


@pytest.mark.slow
def test_the_strategy_trains_too() -> None:
    (piped,) = measure(replace(TINY, variant="strategy")).values()
    assert piped.loss is not None
    layers = piped.notes["layers"]
    assert isinstance(layers, list)
    assert len(layers) == 2
    assert sum(layers) == TINY.layers


@pytest.mark.slow
def test_evaluation_is_of_the_same_model() -> None:
    (plain,) = measure(replace(TINY, loop="test")).values()
    (piped,) = measure(replace(TINY, loop="test", variant="strategy")).values()
    assert plain.loss is not None
    assert piped.loss == plain.loss


def test_ratios_are_formed_within_rounds() -> None:
    rounds: list[Round] = [
        {TWO_STAGES: measured("strategy", 18.0), ONE_THREAD: measured("plain", 10.0)},
        {TWO_STAGES: measured("strategy", 2.0), ONE_THREAD: measured("plain", 1.0)},
        {TWO_STAGES: measured("strategy", 19.0), ONE_THREAD: measured("plain", 10.0)},
        {ONE_THREAD: measured("plain", 10.0)},
    ]
    spread = compare(rounds, STAGES_OVER_THREAD)
    assert spread is not None
    # The medians' own ratio would be 1.8.
    assert (spread.median, spread.low, spread.high) == pytest.approx((1.9, 1.8, 2.0))
    assert compare(rounds, STAGES_OVER_1F1B) is None


def test_the_limit_of_two_stages_of_the_resnet_has_a_target() -> None:
    """It is formed from the times of one process; a round without two stages has none."""

    def timed(*times: float) -> Round:
        return {TWO_STAGES: {"strategy": replace(measured("strategy", 1.0)["strategy"], notes={"times": [*times]})}}

    rounds = [timed(0.06, 0.04), timed(0.05, 0.05), timed(6.0, 5.4), {ONE_THREAD: measured("plain", 10.0)}]
    spread = limit(rounds)
    assert spread is not None
    assert (spread.median, spread.low, spread.high) == pytest.approx((1.9, 1 / 0.6, 2.0))
    assert limit(rounds[3:]) is None
    targets: dict[ModelName, float | None] = {"resnet": 1.85, "gpt": None}
    for model, target in targets.items():
        figures = report(f"two_stages_{model}", MACHINE, replace(TINY, model=model), rounds[3:], {}).figures
        assert [figure.target for figure in figures if figure.name.startswith("limit")] == [target]


def test_the_peer_is_taken_at_its_best_median() -> None:
    rounds: list[Round] = [
        {SCHEDULE_1F1B: measured("2", 8.0) | measured("4", 9.0)},
        {SCHEDULE_1F1B: measured("2", 8.0) | measured("4", 1.0)},
        {SCHEDULE_1F1B: measured("2", 8.0) | measured("4", 2.0)},
    ]
    assert choose(rounds, SCHEDULE_1F1B) == "2"


def test_the_report_says_which_target_was_met_and_what_failed() -> None:
    notes = {"in_flight": 3, "busy": [0.9, 0.8], "times": [0.04, 0.06]}
    rounds: list[Round] = [
        {
            TWO_STAGES: {"strategy": replace(measured("strategy", 17.5)["strategy"], notes=notes)},
            ONE_THREAD: measured("plain", 10.0),
            SCHEDULE_1F1B: measured("2", 10.5),
        }
    ]
    outcome = report("two_stages_gpt", MACHINE, GPT, rounds, {DDP: "it broke"})
    lines = outcome.text.splitlines()

    def row(start: str) -> list[str]:
        return next(line for line in lines if line.startswith(start)).split()

    assert row("a/b")[-5:] == ["1.75", "..", "1.75", "1.80", "missed"]
    assert row("a/d")[-5:] == ["1.67", "..", "1.67", "1.60", "met"]
    assert row(TWO_STAGES)[-5:] == ["1.00", "0.5000", "in", "flight", "3"]
    assert "busy 90% and 80% of the time" in outcome.text
    assert row("limit")[-3:] == ["1.67", "..", "1.67"]
    assert row(DDP)[-1] == "failed"
    assert not any(line.startswith(("e ", "e/b")) for line in lines)  # not asked for with this model
    assert "it broke" in outcome.text
    assert not outcome.complete
