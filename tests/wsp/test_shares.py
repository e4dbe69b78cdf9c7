"""Virtual workers with waves and shares of the data of their own train what the oracle does, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_hetpipe.rules.waves import dealt_samples
from tests.oracle import Run, State
from tests.support.equality import assert_same
from tests.wsp.launch import Job, finished, run_all, start
from tests.wsp.test_checkpoints import check_checkpoint
from tests.wsp.test_exact import check, together
from tests.wsp.worker import Evaluated, shared_data, task_of


def job(folder: Path, batches: int, shares: Sequence[int], task: str = "mlp", **more: Any) -> Job:
    """A launch that divides ``batches`` of shuffled data."""
    folder.mkdir(exist_ok=True)
    wsp = {"shares": list(shares), **more.pop("wsp", {})}
    in_flight = more.pop("in_flight", 2)
    return Job(folder, task, (0,) * len(shares), 2, in_flight, {"shares": batches, "wsp": wsp, **more})


def divided(task: str, batches: int, lengths: Sequence[Sequence[int]]) -> list[list[list[Any]]]:
    """The batches of each virtual worker in each epoch; ``lengths`` are those of the waves in each epoch."""
    loader = shared_data(task, batches)
    samples, size = len(loader.dataset), loader.batch_size  # type: ignore[arg-type]
    assert size is not None
    data: list[list[list[Any]]] = [[] for _ in lengths[0]]
    for epoch, of_epoch in enumerate(lengths):
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch)).tolist()
        for vw, epochs in enumerate(data):
            mine = [order[place] for places in dealt_samples(samples, size, of_epoch, vw) for place in places]
            epochs.append(list(DataLoader(loader.dataset, size, sampler=mine)))
    return data


def expected(of: Job, epochs: int = 2, **options: Any) -> list[Run]:
    shares = of.more["wsp"]["shares"]
    return together(of, shares, divided(of.task, of.more["shares"], [shares] * epochs), **options)


def resumed_from(path: Path, states: Sequence[State], done: Sequence[int], of: Job, epochs: int = 2) -> list[Run]:
    """The oracle's run of ``of`` from the checkpoint at ``path``, saved within the first epoch.

    Args:
        states: Those of each virtual worker then.
        done: The minibatches that each had done.
    """
    shares = of.more["wsp"]["shares"]
    data = divided(of.task, of.more["shares"], [shares] * epochs)
    for mine, count in zip(data, done, strict=True):
        mine[0] = mine[0][: len(mine[0]) - count]  # an ordinary loader starts again from its first batch
    saved = torch.load(path, weights_only=False)
    module = Evaluated(task_of(of.task, 0))
    module.load_state_dict(saved["state_dict"])
    weights = {name: weight.detach() for name, weight in module.named_parameters()}
    buffers = dict(module.named_buffers())
    resumed = [(count, State(weights, buffers, state.optimizer)) for count, state in zip(done, states, strict=True)]
    return together(of, shares, data, resumed=resumed)


def test_unequal_waves_shares_and_cuts(tmp_path: Path) -> None:
    """The waves are (2, 4), three in an epoch, and a last one of (1, 2).

    Virtual worker 0's third minibatch, at which a validation is due, lies in the second wave, its sixth in the third;
    its fifth step, at which a checkpoint is due, in the third wave of the first epoch, and its tenth in the second of
    the second: all do so at the ends of these waves. Another run goes on from the first checkpoint. In a last one,
    virtual worker 0 saves after its last minibatch, while the other one has a wave to go after as many waves.
    """
    cuts = job(tmp_path / "cuts", 21, [2, 4], "drops", validate=True, saves={"every_n_train_steps": 5})
    cuts.more["trainer"] = {"val_check_interval": 3}
    mean = job(tmp_path / "mean", 9, [4, 1], wsp={"aggregate": "mean"}, in_flight=3)
    again = job(tmp_path / "again", 21, [2, 4], "drops", resume=str(cuts.folder / "step=6.ckpt"))
    ahead = job(tmp_path / "ahead", 10, [2, 6], saves={"every_n_train_steps": 2})
    found = run_all(cuts, mean, again, ahead)
    runs = expected(cuts, cuts=[2, 3])
    check(cuts, found[0], runs)
    assert [len(each["outputs"]) for each in found[0]] == [14, 28]
    one, other = found[0]
    assert len(one["validated"]) == 4
    assert_same(one["validated"], other["validated"])
    assert_same(one["validated"][0], {**runs[0].states[4].weights, **runs[0].states[4].buffers})
    assert one["metrics"]["count"] == 3  # of the batches of the validation, one and two
    assert sorted(cuts.folder.glob("*.ckpt")) == [cuts.folder / "step=11.ckpt", cuts.folder / "step=6.ckpt"]
    for step in (6, 11):
        check_checkpoint(cuts.folder / f"step={step}.ckpt", runs[0].states[step])
    check(mean, found[1], expected(mean, mean=True))  # which divides by N, as ever
    states = [run.states[count] for run, count in zip(runs, (6, 12), strict=True)]
    check(again, found[2], resumed_from(cuts.folder / "step=6.ckpt", states, (6, 12), again))
    runs = expected(ahead)
    check(ahead, found[3], runs)
    assert [len(each["outputs"]) for each in found[3]] == [4, 16]
    for step in (2, 4):
        check_checkpoint(ahead.folder / f"step={step}.ckpt", runs[0].states[step])


def test_shares_follow_the_rates_of_the_epoch_before(tmp_path: Path) -> None:
    """The first epoch is dealt equally. Then virtual worker 1 is 2.5 times as fast, and stays so within the noise;
    after the third epoch it has become as slow as the other one. A run that goes on from the end of the second epoch
    has its shares, which the checkpoint holds. In another run the epochs with fewer batches of virtual worker 0 than
    ``val_check_interval`` validate at their end."""
    paces = [[2.0, 5.0], [2.1, 4.9], [2.0, 2.0], [9.0, 1.0]]
    lengths = [(2, 2), (2, 5), (2, 5), (2, 2)]
    more = {"wsp": {"shares": "auto"}, "shares": 17, "saves": {"every_n_epochs": 1, "save_on_train_epoch_end": True}}
    whole, again = (Job(tmp_path / name, lengths=(0, 0), in_flight=2) for name in ("whole", "again"))
    for one in (whole, again):
        one.folder.mkdir()
        one.more = {**more, "paces": paces, "validate": True, "trainer": {"max_epochs": 4, "val_check_interval": 0.5}}
    data = divided("mlp", 17, [(1, 1), *lengths[1:]])
    assert [[len(epoch) for epoch in mine] for mine in data] == [[9, 5, 5, 9], [8, 12, 12, 8]]
    saved = whole.folder / f"step={9 + 5}.ckpt"
    again.more |= {"resume": str(saved), "paces": paces[2:]}
    rare = Job(tmp_path / "rare", lengths=(0, 0), in_flight=2, more={**more, "paces": paces[1:], "validate": True})
    rare.folder.mkdir()
    rare.more["trainer"] = {"max_epochs": 3, "val_check_interval": 9}  # of 9 minibatches, 5 and 9
    found, resumed, seldom = run_all(whole, again, rare)
    assert [len(each["validated"]) for each in seldom] == [3, 3]
    assert [len(each["outputs"]) for each in seldom] == [9 + 5 + 9, 8 + 12 + 8]
    # Of 9 minibatches validations come after 4 and 8, of 5 after 2 and 4; when virtual worker 0 has come to its eighth,
    # the other one has come to its last, so that this validation is at the end.
    cuts = {0: [2], 1: [1, 2], 2: [1, 2], 3: [2]}
    runs = together(whole, dict(enumerate(lengths)), data, cuts=cuts)
    check(whole, found, runs)
    assert [len(each["validated"]) for each in found] == [8, 8]
    assert_same(found[0]["validated"], found[1]["validated"])
    assert torch.load(saved, weights_only=True)["hetpipe"]["shares"] == [2, 5]
    assert {each["hetpipe/wave"] for each in found[1]["logged"]} == {2.0, 5.0}
    assert_same([each["end"] for each in found], [each["end"] for each in resumed])


@pytest.mark.slow
def test_all_take_part_in_validations_until_max_steps(tmp_path: Path) -> None:
    """Virtual worker 1 comes to its sixth step in the third wave, and the other one in its sixth: of the validations
    that are due after 2, 4 and 6 minibatches, the later ones are the last."""
    one = job(tmp_path, 24, [1, 2], validate=True)
    one.more["trainer"] = {"val_check_interval": 2, "max_steps": 6}
    found, _ = finished(one)
    assert [len(each["outputs"]) for each in found] == [6, 6]
    assert [len(each["validated"]) for each in found] == [2, 2]
    assert_same(found[0]["validated"], found[1]["validated"])
    assert [each["metrics"]["count"] for each in found] == [3, 3]


@pytest.mark.slow
def test_a_server_that_dies_leaves_no_trace(tmp_path: Path) -> None:
    """Law L5 holds whatever the lengths of waves, as updates are counted by waves."""
    one = job(tmp_path / "dies", 17, [2, 5], fault=(1, 3, "server"), wsp={"lease": 9.0})
    found, said = finished(one)
    check(one, found, expected(one))
    assert said.count("died by SIGKILL and was started again") == 2, said  # once in each epoch


@pytest.mark.slow
def test_others_go_on_without_one_that_is_lost(tmp_path: Path) -> None:
    """They still validate together, at ends of waves of virtual worker 0, and the second epoch is dealt among them."""
    one = job(tmp_path / "lost", 25, [1, 2, 2], fault=(1, 3, "SIGKILL"), wsp={"lease": 9.0}, validate=True)
    one.more["trainer"] = {"val_check_interval": 3}
    done = start(one)
    assert done.returncode == 1
    assert "this run went on without virtual worker 1, which died by SIGKILL" in done.stderr
    ends = [torch.load(one.folder / f"{vw}.pt", weights_only=False) for vw in (0, 2)]
    assert_same(ends[0]["end"].weights, ends[1]["end"].weights)
    assert [len(each["outputs"]) for each in ends] == [5 + 8, 10 + 17]
    assert_same(ends[0]["validated"], ends[1]["validated"])
    assert len(ends[0]["validated"]) == 1 + 2
    missed = re.search(r"virtual worker 1 was lost after 1 wave of epoch 0: (\d+) of its (\d+) samples", done.stderr)
    assert missed is not None
    assert int(missed[2]) - int(missed[1]) == 2 * 4, "a wave of two minibatches was trained on"
