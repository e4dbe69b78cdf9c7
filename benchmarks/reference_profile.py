"""Profiles in the form of the project's reference data, which was measured by others."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path

from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times


def load(path: str | PathLike[str]) -> Profile:
    """Read the profile at ``path``."""
    given = json.loads(Path(path).read_text())
    layers = [
        LayerBytes(each["name"], each["parameter_bytes"], each["activation_bytes"], each["output_bytes"])
        for each in given["layers"]
    ]
    times = {
        name: [Times(each["forward_s"], each["backward_s"], each["update_s"]) for each in gpu["layers"]]
        for name, gpu in given["gpus"].items()
    }
    memory = {name: gpu["memory_bytes"] for name, gpu in given["gpus"].items()}
    return Profile(given["model"], given["microbatch"], layers, times, memory)
