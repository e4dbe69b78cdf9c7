"""The seam where a piece ran elsewhere: gradients come down to its outputs, and go on from its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetpipe.errors import PipelineRefusal
from lightning_hetpipe.pipeline.streams import StreamEvent, UserStream
from lightning_hetpipe.pipeline.user.piece_call import PieceCall, gradients_below
from lightning_hetpipe.pipeline.values import Value, tensors_of
from lightning_hetpipe.rules.schedule import Call


def run(piece: int, inputs: Any, outputs: Any, outside: UserStream | None = None) -> tuple[PieceCall, Any]:
    """A call of a piece that was given ``inputs``, and whose pipeline gave ``outputs``."""
    call = PieceCall(Call(piece, piece), inputs, outside or UserStream())
    return call, call.connect(tensors_of(inputs), Value.of(outputs))


def grown(*values: float) -> Tensor:
    """An output that a gradient can go through."""
    return torch.tensor(values, requires_grad=True) * 1.0


def collect(call: PieceCall, total: Tensor, above: PieceCall | None, keep_graph: bool) -> list[Tensor | None]:
    """Gradients of the call's outputs, where the user's code uses no parameter."""
    gradients_below(total, above, (), (), nullcontext(), keep_graph=keep_graph, call=call)
    return [*(call.output_gradients or [None] * call.outputs)]


def lists(gradients: list[Tensor | None]) -> list[list[float] | None]:
    return [None if gradient is None else gradient.tolist() for gradient in gradients]


def test_outputs_are_the_pipelines() -> None:
    outputs = {"logits": grown(1.0, 2.0), "note": "kept", "index": torch.tensor([3])}
    _, seen = run(0, torch.zeros(2), outputs)
    assert seen["note"] == "kept"
    assert seen["logits"].tolist() == [1.0, 2.0]
    assert seen["index"].tolist() == [3]
    assert (seen["logits"].requires_grad, seen["index"].requires_grad) == (True, False)


def test_an_output_of_frozen_layers_needs_no_gradient() -> None:
    _, (first, second) = run(0, torch.zeros(2), (grown(1.0), torch.ones(1)))
    assert (first.requires_grad, second.requires_grad) == (True, False)


def test_gradients_come_down_to_the_outputs() -> None:
    call, (first, second, unused) = run(0, torch.zeros(2), (grown(1.0, 2.0), grown(3.0), grown(4.0)))
    assert unused.requires_grad
    loss = (first * torch.tensor([10.0, 20.0])).sum() * second.sum()
    assert lists(collect(call, loss, None, keep_graph=False)) == [[30.0, 60.0], [50.0], None]


def test_a_loss_that_does_not_need_the_piece() -> None:
    call, _ = run(0, torch.zeros(2), (grown(1.0), grown(2.0)))
    other = torch.ones(1, requires_grad=True)
    assert collect(call, (other * 2).sum(), None, keep_graph=False) == [None, None]


def test_leaves_in_user_code_get_no_gradient() -> None:
    """It is the pipeline that delivers gradients."""
    scale = torch.ones(1, requires_grad=True)
    call, output = run(0, scale * 2, grown(1.0))
    collect(call, (output * scale).sum(), None, keep_graph=True)
    assert scale.grad is None


def test_pieces_are_collected_from_the_last_to_the_first() -> None:
    """As ``z = encoder(x); loss = decoder(z * z) + z``: user code is differentiated between the pieces and around."""
    encoder, z = run(0, torch.ones(1), grown(3.0))
    decoder, y = run(1, z * z, grown(5.0))
    loss = (y * 7.0).sum() + z.sum()
    assert lists(collect(decoder, loss, None, keep_graph=True)) == [[7.0]]
    decoder.input_gradients = [torch.tensor([100.0])]  # d y / d (z * z), times 7, as the pipeline has it
    assert lists(collect(encoder, loss, decoder, keep_graph=False)) == [[100.0 * 2 * 3 + 1.0]]


def test_collecting_the_last_piece_does_not_go_beyond_it() -> None:
    visited: list[str] = []
    encoder, z = run(0, torch.ones(1), grown(3.0))
    z.register_hook(lambda _: visited.append("z"))
    between = z * z
    decoder, y = run(1, between, grown(5.0))
    y.register_hook(lambda _: visited.append("y"))
    collect(decoder, (y * 2.0).sum(), None, keep_graph=True)
    assert visited == ["y"]
    assert encoder.output_gradients is None


def test_hooks_of_the_user_run_once() -> None:
    """Those above the last piece ran once for each piece."""
    visited: list[tuple[str, float]] = []

    def hook(name: str, tensor: Any) -> Any:
        tensor.register_hook(lambda gradient: visited.append((name, gradient.item())))
        return tensor

    encoder, z = run(0, torch.ones(1), grown(3.0))
    decoder, y = run(1, hook("between", hook("z", z) * 2), grown(5.0))
    loss = (hook("y", y) * 7.0).sum()
    assert lists(collect(decoder, loss, None, keep_graph=True)) == [[7.0]]
    decoder.input_gradients = [torch.tensor([100.0])]
    assert lists(collect(encoder, loss, decoder, keep_graph=False)) == [[200.0]]
    assert visited == [("y", 7.0), ("between", 100.0), ("z", 200.0)]


def test_an_input_that_is_changed_in_place_after_the_call() -> None:
    encoder, z = run(0, torch.ones(1), grown(3.0))
    between = z * 2
    decoder, y = run(1, between, grown(5.0))
    between.mul_(1000.0)
    loss = y.sum()
    collect(decoder, loss, None, keep_graph=True)
    decoder.input_gradients = [torch.tensor([100.0])]
    assert lists(collect(encoder, loss, decoder, keep_graph=False)) == [[200.0]]


def test_pieces_that_do_not_depend_on_each_other() -> None:
    first, a = run(0, torch.ones(1), grown(3.0))
    second, b = run(1, torch.ones(1), grown(5.0))
    loss = (a * b).sum()
    assert lists(collect(second, loss, None, keep_graph=True)) == [[3.0]]
    second.input_gradients = [None]
    assert lists(collect(first, loss, second, keep_graph=False)) == [[5.0]]


def test_a_piece_whose_output_is_not_used_by_the_next() -> None:
    encoder, _ = run(0, torch.ones(1), grown(3.0))
    decoder, y = run(1, torch.ones(1), grown(5.0))
    loss = y.sum()
    assert lists(collect(decoder, loss, None, keep_graph=True)) == [[1.0]]
    decoder.input_gradients = [None]
    assert collect(encoder, loss, decoder, keep_graph=False) == [None]


def test_a_users_own_gradient_through_a_piece_is_refused() -> None:
    x = torch.ones(2, requires_grad=True)
    _, y = run(0, x, grown(1.0, 2.0))
    with pytest.raises(PipelineRefusal, match=r"asked for inside training_step \(torch.autograd.grad or "):
        torch.autograd.grad(y.sum(), x)


def test_user_code_may_change_outputs_in_place() -> None:
    call, (first, second) = run(0, torch.zeros(2), (grown(1.0, 2.0), grown(3.0)))
    first *= 2.0
    assert lists(collect(call, (first.sum() * second).sum(), None, keep_graph=False)) == [[6.0, 6.0], [6.0]]


def test_a_change_of_an_output_that_the_pipelines_backward_needs_is_noticed_there() -> None:
    """Just as in a plain run."""
    leaf = torch.tensor([2.0], requires_grad=True)
    kept = leaf.exp()  # its backward needs its value
    _, y = run(0, torch.zeros(1), kept)
    y.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(kept.sum(), leaf)


class Current:
    """A stream that user code is in."""

    def __init__(self, name: str) -> None:
        self.name = name

    def query(self) -> bool:
        raise AssertionError("no thread asks")

    def synchronize(self) -> None:
        raise AssertionError("no thread waits")


class InStreams(UserStream):
    """User code whose stream changes: a mark names the one that it was made in."""

    def __init__(self) -> None:
        self.current = "first"
        self.joined: list[tuple[str, str]] = []

    def record(self, devices: Iterable[torch.device] = ()) -> StreamEvent | None:
        assert list(devices)
        return Current(self.current)

    def join(
        self, event: StreamEvent | None, tensors: Iterable[Tensor] = (), devices: Iterable[torch.device] = ()
    ) -> None:
        assert isinstance(event, Current)
        assert len(list(tensors)) == 1
        self.joined.append((self.current, event.name))


def test_gradients_are_found_in_the_stream_in_which_user_code_called_the_piece() -> None:
    """``with torch.cuda.stream(side): z = self.net(x)``: autograd goes back there, too, and comes back to the thread's
    own stream without waiting for what it has handed to the pipeline."""
    streams = InStreams()
    x = torch.ones(1, requires_grad=True)
    lower, z = run(0, x * 2, grown(2.0), streams)
    upper, y = run(1, z * 3, grown(5.0), streams)

    def goes_to(stream: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            streams.current = stream

        return hook

    y.register_hook(goes_to("side"))
    z.register_hook(goes_to("other"))
    total = y.sum() + z.sum()  # so that the lower gradients need the upper part of the graph again
    collect(upper, total, None, keep_graph=True)
    streams.current = "first"
    assert isinstance(upper.collected, Current)
    assert upper.collected.name == "side"
    upper.take_input_gradients([torch.tensor([7.0])])
    assert lists(collect(lower, total, upper, keep_graph=False)) == [[22.0]]
    assert streams.joined == [("side", "first")]
    assert isinstance(lower.collected, Current)
    assert lower.collected.name == "other"
