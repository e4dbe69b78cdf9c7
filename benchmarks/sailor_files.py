"""`python -m benchmarks.sailor_files`: writes the Sailor project's times of one model as a profile of `hetpipe-plan`.

The project (eth-easl/sailor, SOSP 2025) has these files, which its ``gather_profs.py`` writes:

    sailor_planner/profiles/MODEL/GPU/profile.json   {microbatch: {degree: {layer: [forward, backward, update]}}}
    simulations/profiles_tmp.json                    {MODEL: {GPU: the same}}
    llm_info.json                                    {MODEL: {degree: {layer: {"params_bytes": ..., ...}}}}

Times are in seconds, for one microbatch. Bytes are those of a microbatch of one sample. ``degree`` is the number of
GPUs that share each layer (tensor parallelism); devices here hold whole layers, so degree 1 is read. Layers are
numbered from 0: the embedding, the transformer's layers, the norm of some models, and the head with the loss.

``update`` is the optimizer's step on the model that was profiled, and stands at each layer. That model has two of the
transformer's layers (``--num_prof_layers 2`` in Sailor's ``profile.sh``), so each layer is given its share of the step,
by the bytes of its weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times
from lightning_hetpipe.planning.plan import profile_file
from lightning_hetpipe.planning.plan.json_file import Document

T = TypeVar("T", str, int)

NAME = "profile.json"
SIZES = "llm_info.json"

MEASURED = 2
"""Layers of the transformer in the model that Sailor measures."""

_WHOLE = "1"
"""Degree of tensor parallelism at which one GPU holds whole layers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert the times that ``arguments``, or the command line, name; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sailor_files")
    parser.add_argument("path", help="a file of times, a model's folder, or the folder of all models")
    parser.add_argument("--model", help="which one, if PATH has several models")
    parser.add_argument("--microbatch", type=int, help="samples of a microbatch, if PATH has several microbatches")
    parser.add_argument("--out", default=NAME, help="the file to write; profile.json by default")
    given = parser.parse_args(arguments)
    try:
        profile = load(given.path, given.model, given.microbatch)
    except SettingError as error:
        print(error, file=sys.stderr)
        return 2
    profile_file.save(profile, given.out)
    print(f"{given.out} has the times of {profile.model} at microbatch {profile.samples} on {', '.join(profile.times)}")
    return 0


def load(path: str | PathLike[str], model: str | None = None, microbatch: int | None = None) -> Profile:
    """Read the times of one model at one microbatch, on all GPUs for which ``path`` has them.

    Args:
        path: A file with times, a folder ``MODEL`` of such files, or a folder of such folders. A file
            ``llm_info.json``, with the bytes of layers, must be there or in a folder above.
        model: Needed where there are several.
        microbatch: Samples; needed where there are several.

    Raises:
        SettingError: one sentence with the file and what is wrong there, or what has to be chosen.
    """
    found = _models(Path(path))
    name = _chosen(found, model, "--model", f"{path} has the models")
    whole = {
        (int(samples), gpu): degrees[_WHOLE]
        for gpu, document in found[name].items()
        for samples, degrees in _numbered(document).items()
        if _WHOLE in degrees
    }
    if not whole:
        raise SettingError(
            f"{path} has times of {name} only for layers that several GPUs share (tensor parallelism), which this"
            " release does not plan; give the times of another model, or of other GPUs"
        )
    counts = sorted({samples for samples, _ in whole})
    samples = _chosen(counts, microbatch, "--microbatch", f"{path} has {name} at the microbatches")
    sizes = _sizes_file(Path(path))[name][_WHOLE]
    layers = _layers(sizes, samples)
    shares = _shares([layer.parameters for layer in layers])
    times = {}
    for (_, gpu), document in (each for each in whole.items() if each[0][0] == samples):
        entries = [*_numbered(document).values()]
        if len(entries) != len(layers):
            document.refuse(
                f"has {len(entries)} layers, where {sizes.file} has {len(layers)}; leave out or mend one of these files"
            )
        times[gpu] = [_times(*each) for each in zip(entries, shares, strict=True)]
    return Profile(name, samples, layers, times, {})


def _models(path: Path) -> dict[str, dict[str, Document]]:
    """Times of each GPU, by model."""
    if path.is_dir():
        files = sorted([*path.glob(NAME), *path.glob(f"*/{NAME}"), *path.glob(f"*/*/{NAME}")])
    else:
        document = Document.read(path)
        if not _is_of_gpu(document.value):
            return {model: dict(gpus.items()) for model, gpus in document.items()}
        files = [path]
    if not files:
        raise SettingError(
            f"{path} has no {NAME}, nor GPU/{NAME} or MODEL/GPU/{NAME} as the Sailor project has; give another folder"
        )
    found: dict[str, dict[str, Document]] = {}
    for file in files:
        gpu = file.resolve().parent
        found.setdefault(gpu.parent.name, {})[gpu.name] = Document.read(file)
    return found


def _sizes_file(path: Path) -> Document:
    for folder in [path, *path.resolve().parents]:
        if (folder / SIZES).is_file():
            return Document.read(folder / SIZES)
    raise SettingError(
        f"{path} has times only, and neither its folder nor one above has a {SIZES} with the bytes of layers; copy"
        " sailor/Planner/llm_info.json there"
    )


def _layers(document: Document, samples: int) -> list[LayerBytes]:
    """Bytes of each layer for ``samples``.

    ``act_mem_bytes`` is what a forward allocates, and so has the output but not the input, which ``kept`` has too.
    """
    layers: list[LayerBytes] = []
    numbered = _numbered(document)
    for number, entry in numbered.items():
        weights, allocated, output, given = (
            entry[f"{each}_bytes"].whole() for each in ("params", "act_mem", "act_output", "act_input")
        )
        received = layers[-1].output if layers else samples * given
        sent = 0 if len(layers) + 1 == len(numbered) else samples * output  # the head's are the logits and the loss
        layer = LayerBytes(f"layer_{number}", weights, samples * allocated + received, sent, 0 if layers else received)
        layers.append(layer)
    return layers


def _shares(weights: list[int]) -> list[float]:
    """Share of each layer in the optimizer's step on the model that Sailor has measured, by bytes of ``weights``.

    The transformer's layers are those behind the first that have as many bytes as the second; two were measured.
    """
    end = next((number for number in range(1, len(weights)) if weights[number] != weights[1]), len(weights))
    measured = sum(weights[: min(end, 1 + MEASURED)]) + sum(weights[end:])
    return [each / measured if measured else 0.0 for each in weights]


def _times(entry: Document, share: float) -> Times:
    seconds = [each.number() for each in entry.entries()]
    if len(seconds) != 3:
        entry.refuse(f"has {len(seconds)} entries, and must have three: seconds of forward, backward and update")
    forward, backward, update = seconds
    return Times(forward, backward, share * update)


def _numbered(document: Document) -> dict[str, Document]:
    """Values of an object whose keys are numbers, in the order of these.

    Raises:
        SettingError: for another key, and where there are none.
    """
    items = dict(document.items())
    for key in items:
        if not _is_number(key):
            document.refuse(f"has the key '{key}', and must have numbers")
    if not items:
        document.refuse("is empty")
    return {key: items[key] for key in sorted(items, key=int)}


def _chosen(found: Iterable[T], asked: T | None, setting: str, has: str) -> T:
    """Return ``asked``, or the only one that was ``found``."""
    known = list(found)
    listed = f"{has} {', '.join(map(str, known))}"
    if asked is None and len(known) == 1:
        return known[0]
    if asked is None:
        raise SettingError(f"{listed}; choose one, as in {setting} {known[0]}")
    if asked not in known:
        raise SettingError(f"{listed}, and not {setting} {asked}; choose one of these")
    return asked


def _is_of_gpu(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(map(_is_number, value))


def _is_number(key: str) -> bool:
    return key.isascii() and key.isdigit()


if __name__ == "__main__":
    sys.exit(main())
