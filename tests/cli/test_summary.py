from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lightning_hetpipe.cli.summary import summary


@dataclass
class Stage:
    layers: list[str]
    layer_types: list[str]
    device: str = "cpu"
    parameters: int = 1234
    time_s: float = 0.0031
    busy: float = 0.914
    memory_bytes: int | None = 3 << 19


@dataclass
class Run:
    stages: list[Stage]
    in_flight: int = 1
    minibatches: int = 10
    samples_per_second: float = 3120.4
    emulated: bool = False


def test_the_table_shows_each_stage_aligned() -> None:
    run = Run([Stage(["net.0", "net.1", "net.2"], ["Conv2d", "Block", "Block"]), Stage(["net.3"], ["Linear"])])
    lines = summary(run, {}).splitlines()
    assert "Trained as a pipeline of 2 stages, 1 minibatch in flight" in lines
    header, first, second = lines[3:6]
    assert header.split() == ["stage", "device", "layers", "parameters", "ms", "per", "minibatch", "busy", "memory"]
    assert "net.0 – net.2  Conv2d, Block ×2" in first
    assert first.split()[-5:] == ["1,234", "3.1", "91%", "1.5", "MiB"]
    assert len(header) == len(first) == len(second)
    assert second.index("net.3") == first.index("net.0") == header.index("layers")
    assert "samples per second   3,120" in lines
    lines = summary(run, {}, virtual_workers=2).splitlines()
    assert "Trained as a pipeline of 2 stages, 1 minibatch in flight, as the first of 2 virtual workers" in lines
    assert "samples per second   3,120   of this virtual worker; each trains on a share of the data" in lines


def test_the_table_says_what_its_times_are() -> None:
    text = summary(Run([Stage(["net.0"], ["Linear"])]), {})
    assert "ms per minibatch: forward and backward" in text
    assert "memory: the most at once of weight versions" in text
    text = summary(Run([Stage(["net.0"], ["Linear"])], emulated=True), {})
    assert "ms per minibatch: what the stage takes on its emulated device" in text


def test_a_dash_stands_where_nothing_was_measured() -> None:
    stage = Stage(["net.0"], ["Linear"], time_s=0.0, busy=0.0, memory_bytes=None)
    run = Run([stage], minibatches=0, samples_per_second=0.0)
    lines = summary(run, {}).splitlines()
    assert lines[4].split()[-4:] == ["1,234", "–", "–", "–"]
    assert "samples per second   –" in lines


def test_a_run_without_the_pipeline_says_its_threads() -> None:
    assert "torch threads   4; stages of a pipeline use OMP_NUM_THREADS each, by default 1" in summary(
        None, {}, torch_threads=4
    )


def test_the_results_are_those_of_the_last_part_that_logged_any() -> None:
    text = summary(None, {"train_loss": 3.0, "test_acc": torch.tensor(0.98766), "test_bits_per_byte": 2.87139})
    assert text.splitlines()[1:] == ["test accuracy        98.77%", "test bits per byte   2.871"]
    assert "val loss   0.5" in summary(None, {"train_loss": 3.0, "val_loss": 0.5})


def test_paths_are_relative_and_the_command_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = summary(None, {}, checkpoint=str(tmp_path / "out" / "best.ckpt"), log_dir=str(tmp_path / "my logs"))
    assert text.splitlines()[1].split() == ["checkpoint", "out/best.ckpt"]
    assert text.endswith("tensorboard --logdir 'my logs'")


def test_a_run_that_left_nothing_says_nothing() -> None:
    assert summary(None, {}).strip() == ""
