"""The leaves that a loss reaches: those that would get no gradient, or one of another version, are refused."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from lightning_hetpipe.capture.compiled_modules import refuse_scripted
from lightning_hetpipe.errors import PipelineRefusal
from lightning_hetpipe.torch_private.autograd import graph_leaves, graph_start


def refuse_leaves(root: nn.Module, allowed: Collection[int], loss: Tensor, made_inside: bool = False) -> None:
    """Refuses a leaf that ``loss`` reaches, in ``root`` or not, whose gradient would be of another version or lost.

    Args:
        root: The LightningModule, which names parameters.
        allowed: Leaves, by ``id``.
        loss: What is differentiated.
        made_inside: Whether modules that run as user code make leaves, whose gradients nobody wants, themselves.

    Raises:
        SettingError: which names the parameter.
    """
    leaves = (leaf for leaf in graph_leaves([graph_start(loss)]) if id(leaf) not in allowed)
    reached = next((leaf for leaf in leaves if isinstance(leaf, nn.Parameter) or not made_inside), None)
    if reached is None:
        return
    name = next((name for name, parameter in root.named_parameters() if parameter is reached), None)
    if name is None:
        raise PipelineRefusal(
            f"the loss depends on a tensor of shape {tuple(reached.shape)} that requires a gradient and is no"
            f" parameter of {type(root).__name__}, and the pipeline would give it none; register a parameter in a"
            " module that training_step calls, and leave requires_grad_() of a batch out"
        )
    for path, module in root.named_modules():
        if any(parameter is reached for parameter in module.parameters(recurse=False)):
            refuse_scripted(path, module)
    raise PipelineRefusal(
        f"training_step gives the parameter '{name}' to a compiled function, or to one written in C++, where the"
        f" pipeline cannot put this minibatch's version in its place; give it {name}.clone(), or move what uses it into"
        " a module that training_step calls"
    )


def refuse_foreign_leaf(layer: str, root: nn.Module, leaf: Tensor) -> None:
    """Refuses ``leaf``, from which ``layer`` has computed its output, and which is none of its inputs and weights.

    Raises:
        SettingError: which names the leaf, if it is a parameter of ``root``.
    """
    found = next((f"the parameter '{name}'" for name, parameter in root.named_parameters() if parameter is leaf), None)
    what = found or (
        f"a tensor of shape {tuple(leaf.shape)} that requires a gradient (as with torch.func.functional_call)"
    )
    raise PipelineRefusal(
        f"layer '{layer}' computes with {what}, which is not its own, so that its stage would neither follow nor train"
        " it; let a module in the layer hold it as a parameter, too, or give it to the call as an argument"
    )
