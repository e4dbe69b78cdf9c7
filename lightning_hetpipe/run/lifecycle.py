"""The life of a minibatch: the events of a run, of which every feature is an extension.

One :class:`~lightning_hetpipe.run.driver.Driver` raises the events, for minibatch p in the order of :class:`Extension`.
The weights after Lightning's step p are version p. ``rules/versions.py`` defines which version p uses.

The user's step runs in Lightning's own thread in a first minibatch of a fit or evaluation and in a spread run. Then the
only events are ``epoch_begins``, ``doing``, ``evaluating``, ``epoch_ends``, ``discarded`` and ``closed``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Concatenate, ParamSpec

from lightning_hetpipe.pipeline.user.minibatch import Minibatch
from lightning_hetpipe.pipeline.user.user_section import UserSection, UserSections

P = ParamSpec("P")

Around = AbstractContextManager[Any]
NOTHING: Around = nullcontext()


class Extension:
    """A feature of a run: its methods answer the events that concern it.

    Events are raised in Lightning's thread, except for ``user_step`` and ``section``, which are raised in the runner's.
    An event that returns a context lasts as long as the context is open. ``after`` lists extensions that must answer
    plain events before this one. Contexts are opened in the reverse order, so their contexts are inside this one's.
    """

    after: tuple[type[Extension], ...] = ()

    def doing(self, name: str, minibatch: int) -> Around:
        """Lightning's thread does ``name`` for ``minibatch``, or after the step of that number."""
        return NOTHING

    def epoch_begins(self, first: int) -> None:
        """Lightning's loop begins an epoch, whose first minibatch is ``first``."""

    def transferring(self, minibatch: int) -> Around:
        """The hooks of the batch's transfer run, ahead of Lightning's loop."""
        return NOTHING

    def user_step(self, minibatch: int) -> Around:
        """The whole user's step runs."""
        return NOTHING

    def section(self, minibatch: int) -> UserSection:
        """A section of the user's step runs, between two calls of pipelined modules."""
        return UserSection()

    def arrived(self, minibatch: int) -> None:
        """Lightning's loop is at the step of ``minibatch``, which is done or has failed. A fit has its gradients."""

    def finished(self, minibatch: Minibatch, args: Sequence[Any]) -> None:
        """The minibatch has succeeded, and Lightning's buffers have the values that its forward left."""

    def stepped(self, version: int) -> None:
        """Step ``version`` is over, with all its callbacks, and Lightning asks for the next batch."""

    def settled(self, version: int) -> None:
        """The live weights and layers are ``version``, which is published next."""

    def continues(self, version: int) -> None:
        """Minibatches are in flight while ``version`` is published, and stay so."""

    def published(self, version: int) -> None:
        """``version`` is on all stages, and minibatches are in flight."""

    def emptied(self, version: int) -> None:
        """``version`` is on all stages, and the pipeline starts empty at it."""

    def evaluating(self, minibatch: int) -> Around:
        """An evaluation runs after step ``minibatch``. Nothing in flight moves."""
        return NOTHING

    def epoch_ends(self) -> None:
        """Lightning's loop has finished the epoch. Minibatches in flight are discarded next."""

    def discarded(self) -> None:
        """Nothing is in flight any more."""

    def closed(self) -> None:
        """The run is over."""


class Extensions:
    """The extensions of one run, to which each event is raised in their order. An event is named by the method of
    :class:`Extension` that answers it: ``tell(Extension.published, version)``."""

    def __init__(self) -> None:
        self._all: list[Extension] = []
        self._listening: dict[str, list[Callable[..., Any]]] = {}

    def add(self, *extensions: Extension) -> None:
        """Add ``extensions`` behind the present ones, for all events from now on."""
        for each in extensions:
            late = [type(one).__name__ for one in self._all if isinstance(each, one.after)]
            assert not late, f"{type(each).__name__} comes before {late}"
            self._all.append(each)
        self._listening.clear()

    def tell(self, event: Callable[Concatenate[Extension, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Raise ``event``."""
        for hear in self._who_hear(event):
            hear(*args, **kwargs)

    def around(self, event: Callable[Concatenate[Extension, P], Around], *args: P.args, **kwargs: P.kwargs) -> Around:
        """Raise ``event`` for as long as the returned context is open. The first extension's context is innermost."""
        found = [hear(*args, **kwargs) for hear in reversed(self._who_hear(event))]
        if len(found) < 2:
            return found[0] if found else NOTHING
        return opened(found)

    def section(self, minibatch: int) -> UserSections:
        """Return the sections of all extensions as one."""
        return UserSections([hear(minibatch) for hear in self._who_hear(Extension.section)])

    def close(self) -> None:
        """Raise ``closed`` in reverse order, to every extension even if one fails."""
        with ExitStack() as stack:
            for hear in self._who_hear(Extension.closed):
                stack.callback(hear)

    def _who_hear(self, event: Callable[..., Any]) -> list[Callable[..., Any]]:
        """Return the methods of the extensions that implement ``event``."""
        name = event.__name__
        if name not in self._listening:
            listening = [each for each in self._all if getattr(type(each), name) is not event]
            self._listening[name] = [getattr(each, name) for each in listening]
        return self._listening[name]


@contextmanager
def opened(those: Iterable[Around]) -> Iterator[None]:
    """Context manager in which ``those`` are open, the first one outermost."""
    with ExitStack() as stack:
        for around in those:
            stack.enter_context(around)
        yield
