"""Small files of the form of the Sailor project's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WEIGHTS = [100, 40, 40, 40, 20]
"""Bytes of an embedding, three layers of the transformer and a head; Sailor measures two of the three: 200 bytes."""

MODELS: Mapping[str, Mapping[str, Sequence[int]]] = {
    "GPT": {"V100-16": (1, 2), "A100-40": (2, 16)},
    "OPT": {"A100-40": (4,)},
}
"""Microbatches that were measured, by model and GPU."""


def times(scale: float) -> dict[str, list[float]]:
    """Seconds of each layer, in another order than that of their numbers, as Sailor's are."""
    return {str(n): [scale * (n + 1), scale * (2 * n + 1), scale * 20] for n in (0, 4, 1, 2, 3)}


def gpu(microbatches: Sequence[int], degrees: Sequence[int] = (2, 1)) -> dict[str, Any]:
    return {str(m): {str(d): times(m / d) for d in degrees} for m in microbatches}


def sizes() -> dict[str, dict[str, int]]:
    return {
        str(n): {
            "params_floats": weights // 4,
            "params_bytes": weights,
            "act_output_bytes": 10 + n,
            "act_input_bytes": 3,
            "act_mem_bytes": 50 + n,
        }
        for n, weights in enumerate(WEIGHTS)
    }


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def checkout(root: Path, models: Mapping[str, Mapping[str, Sequence[int]]] = MODELS) -> Path:
    """The folder ``Planner`` of a clone of Sailor's in ``root``, with these ``models``."""
    planner = root / "sailor" / "Planner"
    found = {model: {name: gpu(counts) for name, counts in gpus.items()} for model, gpus in models.items()}
    for model, gpus in found.items():
        for name, value in gpus.items():
            write(planner / "sailor_planner" / "profiles" / model / name / "profile.json", value)
    write(planner / "simulations" / "profiles_tmp.json", found)
    write(planner / "llm_info.json", {model: {"1": sizes(), "2": {}} for model in models})
    return planner
