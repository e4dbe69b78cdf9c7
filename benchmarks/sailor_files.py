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
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, TypeVar

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model.profile import Bytes, LayerBytes, Profile, Seconds, Times
from lightning_hetpipe.planning.plan import profile_file
from lightning_hetpipe.planning.plan.json_file import read
from lightning_hetpipe.settings import Length

T = TypeVar("T", str, int)
V = TypeVar("V")

NAME = "profile.json"
SIZES = "llm_info.json"

MEASURED = 2
"""Layers of the transformer in the model that Sailor measures."""

_WHOLE = "1"
"""Degree of tensor parallelism at which one GPU holds whole layers."""


def _is_number(key: str) -> bool:
    return key.isascii() and key.isdigit()


Number = Annotated[str, _is_number, "a number"]
Layers = Annotated[
    Mapping[Number, Annotated[tuple[Seconds, Seconds, Seconds], "three: seconds of forward, backward and update"]],
    Length(1),
    "a mapping of at least one layer",
]
Gpu = Mapping[Number, Annotated[Mapping[Number, Layers], "a mapping of degrees"]]
"""Times on a GPU, by microbatch and degree."""
Sizes = Annotated[Mapping[str, Bytes], "bytes by name"]


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
        (int(samples), gpu): _numbered(degrees[_WHOLE])
        for gpu, its in found[name].items()
        for samples, degrees in its.items()
        if _WHOLE in degrees
    }
    if not whole:
        raise SettingError(
            f"{path} has times of {name} only for layers that several GPUs share (tensor parallelism), which this"
            " release does not plan; give the times of another model, or of other GPUs"
        )
    counts = sorted({samples for samples, _ in whole})
    samples = _chosen(counts, microbatch, "--microbatch", f"{path} has {name} at the microbatches")
    file = _sizes_file(Path(path))
    sizes = read(file, Mapping[str, Annotated[Mapping[str, Mapping[Number, Sizes]], "a mapping of degrees"]])
    for key, there in ((name, sizes), (_WHOLE, sizes.get(name, ()))):
        if key not in there:
            raise SettingError(f"{file} has no '{key}' of {name}; give the file of these times")
    layers = _layers(sizes[name][_WHOLE], samples, file)
    shares = _shares([layer.parameters for layer in layers])
    times = {}
    for (_, gpu), entries in (each for each in whole.items() if each[0][0] == samples):
        if len(entries) != len(layers):
            raise SettingError(
                f"{path} has {len(entries)} layers of {name} on {gpu}, where {file} has {len(layers)}; leave out or"
                " mend one of these files"
            )
        times[gpu] = [
            Times(forward, backward, share * update)
            for (forward, backward, update), share in zip(entries.values(), shares, strict=True)
        ]
    return Profile(name, samples, layers, times, {})


def _models(path: Path) -> dict[str, dict[str, Any]]:
    """Times of each GPU, by model."""
    if path.is_dir():
        files = sorted([*path.glob(NAME), *path.glob(f"*/{NAME}"), *path.glob(f"*/*/{NAME}")])
    elif all(map(_is_number, content := read(path, dict))) and content:
        files = [path]
    else:
        models: dict[str, dict[str, Any]] = read(path, Mapping[str, Annotated[Mapping[str, Gpu], "a mapping of GPUs"]])
        return models
    if not files:
        raise SettingError(
            f"{path} has no {NAME}, nor GPU/{NAME} or MODEL/GPU/{NAME} as the Sailor project has; give another folder"
        )
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        gpu = file.resolve().parent
        found.setdefault(gpu.parent.name, {})[gpu.name] = read(file, Gpu)
    return found


def _sizes_file(path: Path) -> Path:
    for folder in [path, *path.resolve().parents]:
        if (folder / SIZES).is_file():
            return folder / SIZES
    raise SettingError(
        f"{path} has times only, and neither its folder nor one above has a {SIZES} with the bytes of layers; copy"
        " sailor/Planner/llm_info.json there"
    )


def _layers(sizes: Mapping[str, Mapping[str, int]], samples: int, file: Path) -> list[LayerBytes]:
    """Bytes of each layer for ``samples``.

    ``act_mem_bytes`` is what a forward allocates, and so has the output but not the input, which ``kept`` has too.
    """
    layers: list[LayerBytes] = []
    for number, entry in _numbered(sizes).items():
        names = [f"{each}_bytes" for each in ("params", "act_mem", "act_output", "act_input")]
        if missing := [name for name in names if name not in entry]:
            raise SettingError(f"{file} has no '{missing[0]}' of layer {number}; give another file")
        weights, allocated, output, given = (entry[name] for name in names)
        received = layers[-1].output if layers else samples * given
        sent = 0 if len(layers) + 1 == len(sizes) else samples * output  # the head's are the logits and the loss
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


def _numbered(content: Mapping[str, V]) -> dict[str, V]:
    """Return the values of an object whose keys are numbers, in the order of these."""
    return {key: content[key] for key in sorted(content, key=int)}


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


if __name__ == "__main__":
    sys.exit(main())
