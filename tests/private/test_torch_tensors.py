"""Private names of torch for tensors, and for the graphs that autograd makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import clip_grad

from lightning_hetpipe.torch_private.modes import OwnMode, in_order
from lightning_hetpipe.torch_private.tensors import (
    behind_functorch,
    foreach_copy_,
    give_memory,
    graph_leaves,
    graph_start,
    pytree,
    run_backward,
    strided_parts,
    unseen_change,
    version_counter,
    viewed,
    without_memory,
)
from tests.private.guarding import guards


@guards("_foreach_copy_")
def test_foreach_copy() -> None:
    targets, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.full((3,), 2.0)]
    foreach_copy_(targets, sources)
    same = [torch.equal(target, source) for target, source in zip(targets, sources, strict=True)]
    assert same == [True, True], "weights would not reach their version's slot: copy them one by one in torch_private"
    foreach_copy_([], [])


@guards("_group_tensors_by_device_and_dtype")
def test_order_of_norms() -> None:
    own: Any = clip_grad
    tensors = [torch.ones(1), torch.ones(2, device="meta"), torch.ones(3)]
    assert [len(key) for key, ([group], _) in in_order([tensors]).items() if group] == [2, 2, 2], (
        "norms of gradients on several devices would be added in another order than on one"
    )
    found = in_order([tensors[::2]])
    assert found == own._group_tensors_by_device_and_dtype([tensors[::2]])


@guards("_check_param_device")
def test_vectors_of_parameters() -> None:
    check: Any = torch.nn.utils.convert_parameters
    one = nn.Parameter(torch.ones(1))
    with pytest.raises(TypeError, match="different devices"):
        check._check_param_device(one, 1)
    with OwnMode():
        assert check._check_param_device(one, 1) == 1, "global pruning over several devices would be refused"


@guards("_construct_storage_from_data_pointer")
@pytest.mark.parametrize("like", [torch.ones(3, 4).t(), torch.ones(5, 6)[2:, 3:], torch.ones(1).expand(2, 3)])
def test_tensors_without_memory(like: Tensor) -> None:
    found = without_memory(like, torch.device("cpu"))
    assert (found.shape, found.stride(), found.dtype) == (like.shape, like.stride(), like.dtype)
    with pytest.raises(RuntimeError, match="data pointer"):  # else a capture needs room for weights of other devices
        found.untyped_storage().data_ptr()


class Seen(OwnMode):
    devices = torch.device("cpu"), torch.device("meta")  # which have no random states that a checkpoint keeps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@guards("_infer_device_type")
def test_random_states_of_checkpoints() -> None:
    asked: Any = torch.utils.checkpoint
    before = asked.get_device_states
    with Seen():
        assert asked.get_device_states is not before, (
            "a checkpoint over several devices would draw other random numbers in its second run"
        )
        assert asked.get_device_states(torch.ones(1)) == ([], [])
    assert asked.get_device_states is before


@guards("_version")
def test_version_counter() -> None:
    tensor = torch.zeros(2)
    before = version_counter(tensor)
    tensor.add_(1)
    after = version_counter(tensor)
    assert after == before + 1, "in-place changes of inputs, and of what lies outside the pieces, would go unnoticed"
    tensor.detach().add_(1)
    assert version_counter(tensor) == after + 1, "in-place changes through a detached view would go unnoticed"


@guards("_base")
def test_viewed() -> None:
    tensor = torch.zeros(2, requires_grad=True) * 1.0
    assert viewed(tensor[:1]) is tensor, "changes in place of what a tensor is a view of would go unnoticed"
    assert viewed(tensor) is tensor


@guards("_unsafe_preserve_version_counter")
def test_unseen_change() -> None:
    tensor = torch.zeros(2)
    before = version_counter(tensor)
    with unseen_change(tensor):
        tensor.add_(1)
    assert version_counter(tensor) == before, "views of a tensor changed in place could not be differentiated"


@guards("_pytree")
def test_pytree() -> None:
    tree = {"b": [torch.ones(1), None], "a": (1, "text")}
    leaves, spec = pytree.tree_flatten(tree)
    broken = "values could not be taken apart at a cut, and put together behind it"
    assert pytree.tree_unflatten(leaves, spec) == tree, broken
    assert len(pytree.tree_leaves(tree)) == len(leaves), broken
    doubled = pytree.tree_map_only(Tensor, lambda t: t * 2, tree)
    assert (doubled["b"][0].item(), doubled["a"]) == (2.0, (1, "text")), broken


@guards("_indices", "_values")
def test_parts_of_sparse_tensors() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    assert table.weight.grad is not None
    indices, values = strided_parts(table.weight.grad)
    broken = "memory of sparse gradients on a GPU would be given away while the optimizer reads it"
    assert (indices.tolist(), values.shape) == ([[1, 1]], (2, 2)), broken
    assert strided_parts(values) == (values,), broken
    for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        blocks = (1, 1) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
        parts = strided_parts(torch.eye(2).to_sparse(layout=layout, blocksize=blocks))
        assert [part.layout for part in parts] == [torch.strided] * 3, "a GPU refuses such an input of a module"


@guards("_execution_engine")
def test_run_backward() -> None:
    x, w, other = (
        torch.arange(3.0).requires_grad_(),
        torch.ones(3, requires_grad=True),
        torch.ones(1, requires_grad=True),
    )
    given = torch.tensor([1.0, -1.0, 2.0])
    plain = torch.autograd.grad([x.sin() * w], [x, w, other], grad_outputs=[given], allow_unused=True)
    y = x.sin() * w
    for keep_graph in (True, False):
        found = run_backward([y], [given], [get_gradient_edge(x), w, other], keep_graph)
        broken = "stages would compute other gradients: call torch.autograd.grad in torch_private instead"
        assert found[2] is None, broken
        assert all(torch.equal(a, b) for a, b in zip(found[:2], plain[:2], strict=True) if a is not None), broken
    assert x.grad is None, "gradients would be added to live parameters, by several threads at once"
    with pytest.raises(RuntimeError, match="second time"):
        run_backward([y], [given], [x])


@guards("_C", "_functorch")
def test_tensors_that_torch_func_wraps() -> None:
    weight, seen = nn.Parameter(torch.ones(2, 2)), []

    def look(row: Tensor) -> Tensor:
        seen.append(behind_functorch(row))
        return row.sum()

    torch.vmap(look)(weight)
    torch.func.grad(look)(weight)
    assert all(found is weight for found in seen), "training_step would read live weights through torch.func"
    assert len(seen) == 2
    assert behind_functorch(weight) is None


@guards("variable")
def test_leaves_of_a_graph() -> None:
    used, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    frozen = torch.ones(2)
    broken = "parameters that the loss reaches outside the pieces would be dropped silently"
    graph = graph_start((used * 2 * frozen + used).sum() + (unused * 0).detach().sum())
    found = graph_leaves([graph])
    assert [id(leaf) for leaf in found] == [id(used)], broken
    assert list(graph_leaves([graph_start(torch.ones(1))])) == []
    assert next(graph_leaves([graph_start(used)])) is used, broken


@guards()
def test_leaves_of_a_graph_up_to_its_seams() -> None:
    inside, outside = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    hidden = outside * 3 * inside
    for graph, found in ((hidden.sum(), []), (hidden.sum() + inside.sum(), [inside])):
        leaves = graph_leaves([graph.grad_fn], [hidden.grad_fn])
        assert list(map(id, leaves)) == list(map(id, found))


@guards("_swap_tensor_impl")
def test_memory_for_a_tensor_on_meta() -> None:
    """Also where others refer to it weakly, as ``nn.LSTM`` to its own, and where it has been part of a graph."""
    module = nn.LSTM(2, 2, device="meta")
    module.bias_ih_l0.requires_grad_(False)
    vars(module.bias_ih_l0)["mark"] = 1
    module(torch.ones(1, 2, device="meta"))
    before = list(module.parameters())
    for parameter in before:
        give_memory(parameter)
    assert all(one is other for one, other in zip(before, module.parameters(), strict=True)), (
        "an optimizer that was made before would train what no module has"
    )
    assert not module.bias_ih_l0.requires_grad
    assert vars(module.bias_ih_l0)["mark"] == 1
    module.reset_parameters()
    module(torch.ones(1, 2))[0].sum().backward()
    assert module.weight_ih_l0.grad is not None
    lazy = nn.LazyLinear(2, device="meta")
    for parameter in lazy.parameters():
        give_memory(parameter)
    assert lazy(torch.ones(1, 2)).isfinite().all()
