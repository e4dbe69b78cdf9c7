"""The examples run as a user runs them, learn something, and spread the layers of their models over stages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import forks

EXAMPLES = Path(__file__).parents[2] / "examples"

GPT2 = ["wte", "wpe", "h.0", "h.1", "h.2", "h.3", "ln_f"]
BLOCK = ["conv1", "bn1", "conv2", "bn2"]
RESNET = ["conv1", "bn1", *(f"layer1.{block}.{part}" for block in (0, 1) for part in BLOCK)]
RESNET += [f"layer2.0.{part}" for part in ("downsample.0", "downsample.1", *BLOCK)]
RESNET += [*(f"layer2.1.{part}" for part in BLOCK), "fc"]

LAYERS = {
    "hugging_face": [*(f"model.transformer.{layer}" for layer in GPT2), "model.lm_head"],
    "resnet": [f"model.{layer}" for layer in RESNET],
    "autoencoder": ["encoder.l1.0", "encoder.l1.2", "decoder.l1.0", "decoder.l1.2"],
}


def run(name: str, steps: int, folder: Path, *arguments: str) -> str:
    """Text that the example prints."""
    program = [str(EXAMPLES / f"{name}.py"), "--max-steps", str(steps), *arguments]
    ran = forks.run(*program, cwd=folder)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def metric(name: str, text: str) -> float:
    """A figure of the table that ``Trainer.test`` prints."""
    found = re.search(rf"\b{name}\W+([\d.]+)", text)
    assert found is not None, text
    return float(found[1])


@pytest.mark.parametrize(
    ("name", "steps", "stages", "learned", "at_least", "at_most"),
    [
        pytest.param(
            "hugging_face", 60, 3, "test_bits_per_byte", 0.5, 6.0, marks=pytest.mark.slow
        ),  # 8 without learning
        ("resnet", 40, 3, "test_acc", 0.5, 1.0),  # 0.1 by guessing
        # 1 with the mean image
        pytest.param("autoencoder", 300, 2, "test_unexplained", 0.0, 0.9, marks=pytest.mark.slow),
    ],
)
def test_an_example_trains_as_a_pipeline(
    name: str, steps: int, stages: int, learned: str, at_least: float, at_most: float, tmp_path: Path
) -> None:
    text = run(name, steps, tmp_path)
    assert at_least <= metric(learned, text) <= at_most
    ends = [
        (first, last or first) for first, last in re.findall(r"^ *\d +cpu +(\S+)(?: – (\S+))? ", text, re.MULTILINE)
    ]
    assert len(ends) == stages
    places = [(LAYERS[name].index(first), LAYERS[name].index(last)) for first, last in ends]
    assert [first for first, _ in places] == [0, *(last + 1 for _, last in places[:-1])]
    assert places[-1][1] + 1 == len(LAYERS[name])
    assert not list(tmp_path.iterdir())  # nothing left where it was started


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:stage . computed for longer than it is to take")
def test_the_picture_of_emulated_devices(tmp_path: Path) -> None:
    """The README's picture is made by this command."""
    text = run("mixed_devices", 15, tmp_path, "--picture", "timeline.png")
    assert len(re.findall(r"^ *\d +\S+ \(emulated\) .* \d+% ", text, re.MULTILINE)) == 3
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
