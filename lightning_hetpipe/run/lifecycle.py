"""The life of a minibatch: the events of a run, of which every feature is an extension.

One :class:`~lightning_hetpipe.run.driver.Driver` raises the events. Minibatch p, of which the weights after Lightning's
step p are version p, lives through them in the order of :class:`Extension`. ``rules/versions.py`` says which version p
uses. Gradients reach Lightning in ``Fit._backward``. ``extensions/waves_and_cuts.py`` pushes waves at ``stepped``.

Where the user's step runs in Lightning's own thread (the first minibatch of a fit or of an evaluation, and all of a
spread run), there are ``epoch_begins``, ``doing``, ``evaluating``, ``epoch_ends``, ``discarded`` and ``closed``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Concatenate, ParamSpec

from lightning_hetpipe.pipeline.user.batch_in_flight import BatchInFlight
from lightning_hetpipe.pipeline.user.user_section import NO_SECTION, UserSection, UserSections

P = ParamSpec("P")

Around = AbstractContextManager[Any]
NOTHING: Around = nullcontext()


class Extension:
    """A feature of a run: implements the events that concern it.

    Events are raised in Lightning's thread, but for ``user_step`` and ``section``, which are raised in the runner's. An
    event that gives something lasts as long as that is open.

    Attributes:
        after: Extensions that have to hear of events earlier. What they open is inside of what this one opens.
    """

    after: tuple[type[Extension], ...] = ()

    def doing(self, name: str, minibatch: int) -> Around:
        """Lightning's thread does ``name`` for ``minibatch``, or after the step of that number."""
        return NOTHING

    def epoch_begins(self, first: int) -> None:
        """Lightning's loop begins an epoch, whose first minibatch is ``first``."""

    def transferring(self, minibatch: int) -> Around:
        """The hooks of that batch's transfer run, ahead of Lightning's loop."""
        return NOTHING

    def user_step(self, minibatch: int) -> Around:
        """All of the user's step runs."""
        return NOTHING

    def section(self, minibatch: int) -> UserSection:
        """Sections of the user's step run, between two calls of pipelined modules."""
        return NO_SECTION

    def arrived(self, minibatch: int) -> None:
        """Lightning's loop is at the step of ``minibatch``, whose gradients are there, or which has failed."""

    def finished(self, minibatch: BatchInFlight, args: Sequence[Any]) -> None:
        """The gradients are there, and Lightning's buffers are those that its forward has left."""

    def stepped(self, version: int) -> None:
        """Step ``version`` is over, with all its callbacks, and Lightning asks for the next batch."""

    def settled(self, version: int) -> None:
        """The live weights and layers are those of ``version``, which is published next."""

    def continues(self, version: int) -> None:
        """Minibatches are in flight while ``version`` is published, and stay so."""

    def published(self, version: int) -> None:
        """``version`` is on all stages, and minibatches are in flight."""

    def emptied(self, version: int) -> None:
        """``version`` is on all stages, and the pipeline starts empty at it."""

    def evaluating(self, minibatch: int) -> Around:
        """An evaluation runs after step ``minibatch``; nothing in flight moves."""
        return NOTHING

    def epoch_ends(self) -> None:
        """Lightning's loop is through with the epoch; what is in flight is discarded next."""

    def discarded(self) -> None:
        """Nothing is in flight any more."""

    def closed(self) -> None:
        """The run is over."""


class Extensions:
    """The extensions of one run, which hear of each event in their order.

    An event is named by the method of :class:`Extension` that answers it: ``tell(Extension.published, version)``.
    """

    def __init__(self) -> None:
        self._all: list[Extension] = []
        self._listening: dict[str, list[Callable[..., Any]]] = {}

    def add(self, *extensions: Extension) -> None:
        """Adds ``extensions``, for all events from now on, behind those that are there."""
        for each in extensions:
            late = [type(one).__name__ for one in self._all if isinstance(each, one.after)]
            assert not late, f"{type(each).__name__} comes before {late}"
            self._all.append(each)
        self._listening.clear()

    def tell(self, event: Callable[Concatenate[Extension, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Raises ``event``."""
        for hear in self._who_hear(event):
            hear(*args, **kwargs)

    def around(self, event: Callable[Concatenate[Extension, P], Around], *args: P.args, **kwargs: P.kwargs) -> Around:
        """Raises ``event``, which lasts as long as what is returned is open; the first extension has the innermost."""
        found = [hear(*args, **kwargs) for hear in reversed(self._who_hear(event))]
        if len(found) < 2:
            return found[0] if found else NOTHING
        return opened(found)

    def section(self, minibatch: int) -> UserSections:
        """The sections of all extensions as one."""
        return UserSections([hear(minibatch) for hear in self._who_hear(Extension.section)])

    def close(self) -> None:
        """Tells all that the run is over, the last one first, and each of them, whatever others raise."""
        with ExitStack() as stack:
            for hear in self._who_hear(Extension.closed):
                stack.callback(hear)

    def _who_hear(self, event: Callable[..., Any]) -> list[Callable[..., Any]]:
        """The methods of those extensions that implement ``event``."""
        name = event.__name__
        if name not in self._listening:
            listening = [each for each in self._all if getattr(type(each), name) is not event]
            self._listening[name] = [getattr(each, name) for each in listening]
        return self._listening[name]


@contextmanager
def opened(those: Iterable[Around]) -> Iterator[None]:
    """Open several, the first one outermost."""
    with ExitStack() as stack:
        for around in those:
            stack.enter_context(around)
        yield
