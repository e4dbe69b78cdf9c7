"""The headline benchmark: what it emulates, the order in which replayed runs train, and what is kept and shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import headline
from benchmarks.harness import ProcessFailed
from benchmarks.headline import BEGIN, END, PICTURE, block, jobs, main, options, spread, table
from benchmarks.headline_cluster import (
    BUCKETS,
    COMPARED,
    LABS,
    METHODS,
    PAPER,
    SECONDS,
    UNEQUAL,
    batches,
    ddp_seconds,
    in_flight,
    plans,
    waves,
)
from benchmarks.headline_order import Rate, order, trained
from benchmarks.headline_pictures import STYLES, curves
from benchmarks.headline_runs import Found, Result, read
from benchmarks.headline_search import best_rate
from benchmarks.headline_task import BATCH, batch, network
from benchmarks.headline_worker import EmulatedRank, Job, own_batches
from benchmarks.results import block_in
from lightning_hetpipe.emulation import Pad
from lightning_hetpipe.rules.waves import dealt_samples
from tests.oracle import Recipe, train_together

RATE = Rate(0.01, 0.9)
DDP, BY_SPEED = METHODS["ddp"], METHODS["ddp_by_speed"]


def test_a_step_of_ddp_takes_as_long_as_its_slowest_rank_and_what_is_left_of_the_ring() -> None:
    slowest = SECONDS / min(UNEQUAL.speeds)
    ring = 2 * 7 / 8
    free, slow = replace(UNEQUAL, network=1e18), replace(UNEQUAL, network=1e7)
    assert ddp_seconds(free, DDP) == pytest.approx(slowest)
    assert ddp_seconds(slow, DDP) == pytest.approx(slowest * (1 / 3 + 2 / 3 / BUCKETS) + ring * slow.carries)
    assert ddp_seconds(UNEQUAL, DDP) == pytest.approx(slowest + ring * UNEQUAL.carries / BUCKETS)


def test_batches_by_speed_are_as_many_samples_in_the_least_time() -> None:
    """No rank could take one more without being the slowest."""
    for lab in LABS.values():
        sizes = batches(lab, BY_SPEED)
        assert sum(sizes) == sum(batches(lab, DDP)) == BATCH * len(lab.ranks)
        times = [size / speed for size, speed in zip(sizes, lab.ranks, strict=True)]
        assert all((size + 1) / speed >= max(times) for size, speed in zip(sizes, lab.ranks, strict=True))


def test_ranks_take_the_samples_of_a_step_side_by_side() -> None:
    sizes = (3, 1, 2)
    steps = zip(*(own_batches(sizes, rank, 20) for rank in range(3)), strict=True)
    assert [[place for part in step for place in part] for step in steps] == [
        [*range(6)],
        [*range(6, 12)],
        [*range(12, 18)],
    ]


def test_a_rank_has_gradients_when_its_device_would() -> None:
    """The last layer's first, the first layer's when the whole time is over; a late device is noted."""
    device = EmulatedRank(Pad(0.02, 0.04))
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(len(network(0)))))
    output = device.forward(net, torch.ones(2, 4))
    output.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert device.record.passes == 2
    device.began = 0.0  # long ago
    device.forward(net, torch.ones(2, 4))
    assert device.record.overruns >= 1
    assert device.record.longest > 1


def test_stages_are_planned_and_shares_follow_them() -> None:
    for lab in LABS.values():
        for plan in plans(lab):
            assert len(plan.stages) == len(lab.workers[0]) == in_flight(lab) - 1
    assert waves(UNEQUAL, METHODS["d0"]) == (3, 3, 3, 3)
    assert waves(UNEQUAL, METHODS["d0_shares"]) == (10, 8, 5, 3)
    assert len({plan.bottleneck for plan in plans(PAPER)}) == 1


@pytest.mark.parametrize("name", ["d0", "d4", "d4_shares"])
def test_nobody_pulls_more_than_d_waves_ahead(name: str) -> None:
    """Law L3; and with shares or D > 0 somebody does run ahead of the slowest, else the test would say little."""
    method = METHODS[name]
    pushed, pulled, ahead = [0] * 4, [0] * 4, 0
    last = 0.0
    for seconds, act, vw in order(UNEQUAL, method, 12):
        assert seconds >= last
        last = seconds
        if act == "push":
            pushed[vw] += 1
        elif act == "pull":
            pulled[vw] += 1
            assert pulled[vw] == pushed[vw] <= min(pushed) + (method.clock_distance or 0)
            ahead = max(ahead, pushed[vw] - min(pushed))
    assert pulled == [12] * 4
    assert ahead == (4 if name == "d4" else ahead) <= 4


def test_a_replay_with_no_distance_trains_as_the_oracle() -> None:
    method, count, seed = METHODS["d0_short"], 3, 1
    lengths = waves(UNEQUAL, method)
    samples = count * BATCH * sum(lengths)
    data = [
        [
            [
                batch(wave[at : at + BATCH], seed)
                for wave in dealt_samples(samples, BATCH, lengths, vw)
                for at in range(0, len(wave), BATCH)
            ]
        ]
        for vw in range(len(lengths))
    ]
    recipe = Recipe(lambda net: RATE.optimizer(net))

    def step(net: nn.Module, given: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(net(given[0]), given[1])}

    expected = train_together(network(seed), step, data, recipe, in_flight(UNEQUAL), lengths)[0]
    (*_, (_, done, net)) = trained(UNEQUAL, method, RATE, seed, samples)
    found = {key: value.detach() for key, value in net.named_parameters()}
    assert done == samples
    for key, weight in expected.states[-1].weights.items():
        assert torch.equal(found[key], weight)


def test_a_replay_of_ddp_steps_by_the_mean_over_all_samples_of_a_step() -> None:
    """BatchNorm sees the samples of a rank."""
    seed = 0
    ((_, done, net),) = trained(UNEQUAL, DDP, Rate(0.1, 0.0), seed, BATCH * len(UNEQUAL.ranks))
    plain = network(seed)
    for rank in range(len(UNEQUAL.ranks)):
        images, labels = batch(range(rank * BATCH, (rank + 1) * BATCH), seed)
        (F.cross_entropy(plain(images), labels) / len(UNEQUAL.ranks)).backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(plain.parameters(), 0.1).step()
    assert done == BATCH * len(UNEQUAL.ranks)
    for found, wanted in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


def test_the_target_is_reached_by_the_median_of_three_copies() -> None:
    assert Result([1.0, 2.0, 3.0], [0.95, 0.1, 0.2]).reached is None
    assert Result([1.0, 2.0, 3.0, 4.0], [0.2, 0.95, 0.8, 0.96]).reached == 4.0
    assert Result([1.0, 2.0], [0.95, 0.95]).reached is None


def _result(seconds: float, *minibatches: float) -> Result:
    return Result([0.5 * seconds, 0.7 * seconds, seconds], [0.5, 0.96, 0.97], 0.0, minibatches, 0.5)


def _made(seeds: tuple[int, ...] = (0, 1)) -> Found:
    return {
        Job(lab, method, RATE, seed): _result((200.0 if method == "ddp" else 100.0) * (seed + 1), 10.0, 20.0)
        for lab, methods in COMPARED.items()
        for method in methods
        for seed in seeds
    }


def test_times_are_compared_by_seed() -> None:
    found = _made()
    ratio = spread(found, "unequal", "d0", over="ddp")
    assert ratio
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.0)
    runs = "| DDP, equal batches | 0.01, momentum 0.9 | 300 (200 .. 400) | 1.00 | 30.0 | 9.4 | 0.0 % | – | – |"
    assert runs in table(found, {})
    replays = "| DDP, equal batches | 0.01, momentum 0.9 | – | – | – | 9.4 | – | 300 (200 .. 400) | 1.00 |"
    assert replays in table({}, found)
    found[Job("unequal", "d0", RATE, 1)] = Result([1.0], [0.5], 0.0, [1.0])
    assert spread(found, "unequal", "d0", over="ddp") is None


def test_the_picture_has_a_line_for_each_method_and_is_the_same_again() -> None:
    assert set(STYLES) == set(METHODS)
    picture = curves(_made())
    assert picture == curves(_made())
    assert all(f">{method.title}<" in picture for method in METHODS.values())


def test_the_rate_is_the_best_on_average_over_seeds() -> None:
    fast, slow = Rate(0.1, 0.0), Rate(0.2, 0.0)
    found = {
        Job("paper", "d0", fast, 0): _result(10.0),
        Job("paper", "d0", fast, 1): _result(12.0),
        Job("paper", "d0", slow, 0): _result(5.0),
        Job("paper", "d0", slow, 1): Result([1.0], [0.4]),
        Job("paper", "d4", Rate(0.3, 0.0), 0): _result(1.0),
    }
    assert best_rate(found, "paper", "d0") == fast
    assert best_rate(found, "paper", "d32") is None


@pytest.mark.parametrize(
    ("argument", "says"), [("labs=[lab]", "'lab'"), ("methods=[hogwild]", "'hogwild'"), ("ful=true", "ful")]
)
def test_settings_that_cannot_be(argument: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([argument]) == 2
    assert says in capsys.readouterr().err.splitlines()[0]


def test_runs_are_kept_and_not_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails, or was too slow on a busy machine, is made again the next time."""
    outcomes: dict[str, Result | ProcessFailed] = {
        "ddp": _result(9.0, 10.0, 20.0),
        "d0": _result(9.0, 1.0),
        "d4": ProcessFailed("it broke"),
    }
    made: list[str] = []

    def run(job: Job, limit: float) -> Result:
        made.append(job.method)
        outcome = outcomes[job.method]
        if isinstance(outcome, ProcessFailed):
            raise outcome
        return outcome

    page, kept, nowhere = tmp_path / "docs" / "page.md", tmp_path / "kept.jsonl", tmp_path / "nowhere"
    page.parent.mkdir()
    page.write_text(f"# Title\n\n{BEGIN}\n\n{END}\n\nMore.\n")
    monkeypatch.setattr(headline, "run", run)
    monkeypatch.setattr(headline, "PAGE", page)
    monkeypatch.setattr(headline, "KEPT", kept)
    searched = {Job("paper", method, RATE, 0): _result(1.0) for method in outcomes}
    monkeypatch.setattr(headline, "read", lambda file: searched if file == nowhere else read(file))
    monkeypatch.setattr(headline, "SEARCHED", nowhere)
    monkeypatch.setattr(headline, "REPLAYS", tmp_path / "replays.jsonl")
    arguments = ["labs=[paper]", "methods=[ddp,d0,d4]", f"folder={tmp_path}", "write=true"]
    assert main(arguments) == 1
    assert made == ["ddp", "d0", "d4"]
    made.clear()
    assert main(arguments) == 1
    assert made == ["d0", "d4"]
    assert list(read(kept)) == [Job("paper", "ddp", RATE, 0)]
    assert page.read_text().endswith(f"{END}\n\nMore.\n")
    assert "| DDP, equal batches |" in page.read_text()
    assert (page.parent / PICTURE).exists()


def test_replays_of_three_seeds_are_kept_and_not_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def replay(job: Job) -> Result:
        made.append(job.seed)
        return _result(9.0)

    nowhere = tmp_path / "nowhere"
    searched = {Job("paper", "ddp", RATE, 100): _result(1.0)}
    monkeypatch.setattr(headline, "replay", replay)
    monkeypatch.setattr(headline, "read", lambda file: searched if file == nowhere else read(file))
    monkeypatch.setattr(headline, "SEARCHED", nowhere)
    monkeypatch.setattr(headline, "REPLAYS", tmp_path / "replays.jsonl")
    for _ in range(2):
        assert main(["labs=[paper]", "methods=[ddp]", f"folder={tmp_path}", "replays=true"]) == 0
    assert made == [0, 1, 2]


def test_full_has_three_seeds() -> None:
    searched = _made((0,))
    assert {job.seed for job in jobs(options(["full=true"]), searched)} == {0, 1, 2}
    assert {job.seed for job in jobs(options([]), searched)} == {0}
    assert {(job.lab, job.method) for job in jobs(options([]), searched)} == {(job.lab, job.method) for job in searched}


def test_the_docs_have_the_table_of_the_runs_that_are_kept() -> None:
    found, said = read(headline.KEPT), block_in(headline.PAGE.read_text(), BEGIN, END)
    assert said == block(found, read(headline.REPLAYS), said.split("\n\n")[-2])
    assert (headline.PAGE.parent / PICTURE).read_text().startswith("<?xml")
