"""The reference data that stands beside a checkout, where it does: measured by others, and no part of the package."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(os.environ.get("HETPIPE_REFERENCE_DATA") or Path(__file__).parents[3] / "shared" / "data")
OPT_350M = FOLDER / "profiles" / "opt350.json"
MISSING = f"needs {OPT_350M.name} of the project's reference data; set HETPIPE_REFERENCE_DATA to its folder"
