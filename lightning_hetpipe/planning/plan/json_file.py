"""JSON files of ours: read with one error that names file, key and fault; written whole or not at all."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from lightning_hetpipe.errors import SettingError, nearest

T = TypeVar("T")

Positive = Annotated[int, 1]
"""A whole number of at least 1."""


@dataclass(frozen=True)
class Document:
    """A value in a JSON file, and where it stands there.

    Attributes:
        file: For errors.
        value: As ``json`` gives it.
        path: Such as "stages[2].time_s"; empty for the whole.
    """

    file: str
    value: Any
    path: str = ""

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Document:
        """The file's object.

        Raises:
            SettingError: if it cannot be read, or is no JSON object.
        """
        try:
            value = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise SettingError(f"{os.fspath(path)} cannot be read ({error.strerror}); give another file") from error
        except (ValueError, RecursionError) as error:
            raise SettingError(f"{os.fspath(path)} is no JSON ({error}); give another file") from error
        document = cls(os.fspath(path), value)
        document.object()
        return document

    def refuse(self, said: str) -> NoReturn:
        """Raise the SettingError that says so of this value."""
        raise SettingError(f"{self.file}: {self.path or 'the file'} {said}")

    def object(self, *known: str) -> dict[str, Any]:
        """The value, an object; where ``known`` is given, without any other key."""
        if not isinstance(self.value, dict):
            self.refuse(f"is {_shown(self.value)} and must be an object")
        for key in self.value if known else ():
            if key not in known:
                self.refuse(f"has the key '{key}', which is not known{nearest(key, known)}")
        return self.value

    def __contains__(self, key: str) -> bool:
        return key in self.object()

    def __getitem__(self, key: str) -> Document:
        """Value under ``key``, which must be there."""
        if key not in self.object():
            self.refuse(f"has no '{key}'")
        return Document(self.file, self.value[key], f"{self.path}.{key}" if self.path else key)

    def items(self) -> Iterator[tuple[str, Document]]:
        """Keys and values of an object."""
        return ((key, self[key]) for key in self.object())

    def entries(self) -> list[Document]:
        """Entries of a list."""
        if not isinstance(self.value, list):
            self.refuse(f"is {_shown(self.value)} and must be a list")
        return [Document(self.file, each, f"{self.path}[{index}]") for index, each in enumerate(self.value)]

    def text(self) -> str:
        if not isinstance(self.value, str):
            self.refuse(f"is {_shown(self.value)} and must be text")
        return self.value

    def number(self) -> float:
        """Number, at least 0."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
            self.refuse(f"is {_shown(value)} and must be a number, 0 or more")
        return float(value)

    def whole(self, least: int = 0) -> int:
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.refuse(f"is {_shown(value)} and must be a whole number, {least} or more")
        return value

    def truth(self) -> bool:
        if not isinstance(self.value, bool):
            self.refuse(f"is {_shown(self.value)} and must be true or false")
        return self.value

    def made(self, kind: type[T], *besides: str) -> T:
        """Make the dataclass ``kind`` of an object whose keys are its fields; those with a default may be left out.

        A field's annotation says what its value must be: text, a number, a whole number (with ``Annotated``, of a least
        one), true or false, a tuple of these, another such dataclass, or one of these and None.

        Args:
            kind: The class.
            besides: Further keys of the object, which are not read.
        """
        known: Any = kind
        names, hints = [field.name for field in fields(known)], get_type_hints(kind, include_extras=True)
        self.object(*besides, *names)
        needed = {field.name for field in fields(known) if field.default is MISSING}
        return kind(**{name: self[name]._as(hints[name]) for name in names if name in needed or name in self})

    def _as(self, hint: Any) -> Any:
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return self.whole(arguments[1])
        if origin in (Union, UnionType):
            return None if self.value is None else self._as(arguments[0])
        if origin is tuple:
            return tuple(each._as(arguments[0]) for each in self.entries())
        if isinstance(hint, type) and is_dataclass(hint):
            return self.made(hint)
        readers: dict[Any, Callable[[], Any]] = {str: self.text, float: self.number, int: self.whole, bool: self.truth}
        return readers[hint]()

    def version(self, mine: int) -> None:
        """Refuse another schema version than ``mine``."""
        if (found := self["schema_version"].whole()) != mine:
            self.refuse(f"has schema_version {found}, and this release reads {mine}; make it anew")


def write(path: str | os.PathLike[str], value: Any) -> None:
    """Write ``value`` as JSON, in one go: whoever reads the file sees the old one or the new one, whole.

    Raises:
        OSError: if it cannot be written; the old file is still there then.
    """
    target = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, allow_nan=False)
            file.write("\n")
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _umask() -> int:
    """``mkstemp`` makes files that only their owner may read."""
    os.umask(mask := os.umask(0o022))
    return mask


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
