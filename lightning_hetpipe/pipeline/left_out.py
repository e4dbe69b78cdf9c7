"""Placeholder for an object in a pipelined module's output that the pipeline does not hand on."""

from __future__ import annotations

from typing import Any, NoReturn

from lightning_hetpipe.errors import PipelineRefusal, SettingError
from lightning_hetpipe.torch_private.tensors import pytree


class LeftOut:
    """Stands where the module ``module`` has given an object of class ``kind``, such as a key-value cache.

    Whoever uses it is told so. It may be kept, compared with None, detached and moved, as Lightning does with outputs:
    for pytree it is a node without children.
    """

    __slots__ = ("_kind", "_module")

    def __init__(self, kind: str, module: str) -> None:
        self._kind = kind
        self._module = module

    def __repr__(self) -> str:
        return f"<{self._kind} of '{self._module}', left out>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that are looked for, such as that of copying
            raise AttributeError(name)
        raise self._error(f"its '{name}'")

    def __getitem__(self, index: Any) -> NoReturn:
        raise self._error("an item of it")

    def __iter__(self) -> NoReturn:
        raise self._error("its items")

    def __len__(self) -> NoReturn:
        raise self._error("its length")

    def __bool__(self) -> NoReturn:
        raise self._error("its truth value")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._error("a call of it")

    def _error(self, used: str) -> SettingError:
        return PipelineRefusal(
            f"the pipelined module '{self._module}' gives a {self._kind}, of which {used} is used; the pipeline hands"
            " on tensors in tuples, lists, dicts and plain dataclasses, and has left that object out; let the module"
            " return the tensors that are needed of it, or name the modules in it to pipeline (module=[...])"
        )


pytree.register_pytree_node(
    LeftOut,
    lambda each: ([], [each._kind, each._module]),
    lambda _, context: LeftOut(*context),
    serialized_type_name="lightning_hetpipe.LeftOut",
    to_dumpable_context=lambda context: context,
    from_dumpable_context=lambda context: context,
)
