"""JSON files of this package: read with one error that names file, key and fault, and written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.settings import Style, check, declared, is_record


def _shown(path: str, value: Any) -> str:
    text = json.dumps(value)
    return f"{path or 'the file'}={text if len(text) <= 40 else f'{text[:37]}...'}"


JSON = Style(_shown, {True: "true", False: "false", None: "null"}, whole="the file")
"""Words of a JSON file for errors."""


def read(path: str | os.PathLike[str], hint: Any, version: int | None = None) -> Any:
    """Read a file by its declaration ``hint``. With ``version``, the file must have this ``schema_version``.

    Raises:
        SettingError: one sentence with the file, the key and the fault.
    """
    try:
        value = check("", json.loads(Path(path).read_text(encoding="utf-8")), dict, JSON)
        if version is not None and "schema_version" not in value:
            raise SettingError("schema_version is missing")
        if version is not None and json.dumps(found := value.pop("schema_version")) != str(version):
            said = f"schema_version={json.dumps(found)} must be {version} for this release"
            raise SettingError(said, "make it anew")
        return check("", value, hint, JSON)
    except OSError as error:
        raise SettingError(f"{os.fspath(path)} cannot be read ({error.strerror})", "give another file") from error
    except SettingError as error:
        raise SettingError(f"{os.fspath(path)}: {error.args[0]}", error.way_out) from error
    except (ValueError, RecursionError) as error:
        raise SettingError(f"{os.fspath(path)} is no JSON ({error})", "give another file") from error


def plain(value: Any) -> Any:
    """Convert ``value`` to JSON's types. Leave fields of records out if they equal a default that is no factory's."""
    if is_record(type(value)):
        own = {key: (getattr(value, each.name), each) for key, each in declared(type(value)).parameters.items()}
        return {key: plain(found) for key, (found, each) in own.items() if found != each.default}
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return [*map(plain, value)] if isinstance(value, list | tuple) else value


def write(path: str | os.PathLike[str], value: Any) -> None:
    """Write ``value`` as JSON in one go: a reader sees the whole old file or the whole new file.

    Raises:
        OSError: if it cannot be written. The old file remains.
    """
    target = Path(path)
    beside = target.with_name(f".{target.name}.{uuid4().hex}")
    try:
        with beside.open("x", encoding="utf-8") as file:
            json.dump(value, file, indent=1, allow_nan=False)
            file.write("\n")
        beside.replace(target)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
