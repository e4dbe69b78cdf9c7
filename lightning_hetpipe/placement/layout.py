"""Layout of layers on stages and devices, and the report of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import nn

from lightning_hetpipe.accelerator import accelerates, name_of
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.errors import PipelineRefusal, SettingError
from lightning_hetpipe.pipeline.engine import Engine
from lightning_hetpipe.pipeline.graph_layer import GraphLayer
from lightning_hetpipe.pipeline.memory import less
from lightning_hetpipe.pipeline.stage import Layer
from lightning_hetpipe.placement.decision import Decision
from lightning_hetpipe.placement.spread import follow_parameters, leave_before_parameters, move_apart
from lightning_hetpipe.reporting.report import Meter, RunReport, StageReport

T = TypeVar("T")


@dataclass
class Layout:
    """Layers of all pieces, in order, on the stages and devices of a decision."""

    layers: list[Layer]
    decision: Decision

    @classmethod
    def of(cls, pieces: Sequence[Piece], decision: Decision) -> Layout:
        """Lay out the layers of ``pieces`` as ``decision`` says."""
        return cls([layer for piece in pieces for layer in piece.layers], decision)

    @property
    def split_points(self) -> tuple[int, ...]:
        """The first layer of each stage."""
        return self.decision.split_points

    @property
    def devices(self) -> Sequence[torch.device]:
        """The device of each stage."""
        return self.decision.devices

    def is_spread(self) -> bool:
        """Return True if stages lie on different devices."""
        return len(set(self.devices)) > 1

    def stage_layers(self, stage: int) -> list[Layer]:
        return self.layers[slice(self.split_points[stage], [*self.split_points[1:], len(self.layers)][stage])]

    def lacking(self, in_flight: int, recompute: bool) -> str:
        """Describe the memory of stages, for the error that a device ran out of memory during their setup."""
        planned = [
            f"stage {index} is to take {each} on {device}"
            for index, (device, each) in enumerate(zip(self.devices, self.decision.planned, strict=False))
        ]
        return (
            f"the stages were being set up, with {in_flight} versions of their weights each;"
            f" {''.join(f'{each}; ' for each in planned)}{less(in_flight, recompute)}"
        )

    def report(self, engine: Engine, meter: Meter) -> RunReport:
        seconds, decision = max(meter.seconds, 1e-9), self.decision
        memories = [stage.memory for stage in engine.stages]
        return RunReport(
            in_flight=engine.in_flight,
            minibatches=meter.minibatches,
            samples_per_second=meter.samples / seconds,
            stages=[
                StageReport(
                    device=self._device(index),
                    layers=[layer.name for layer in self.stage_layers(index)],
                    layer_types=[layer.kind or type(layer.module).__name__ for layer in self.stage_layers(index)],
                    time_s=decision.times[index],
                    busy=min(1.0, engine.stages[index].stream.busy_seconds() / seconds),
                    parameters=sum(p.numel() for p in engine.stages[index].live.parameters),
                    versions_bytes=memories[index].versions.most,
                    activations_bytes=memories[index].activations.most,
                    gradients_bytes=memories[index].gradients.most,
                    memory_bytes=memories[index].total.most,
                    host_bytes=memories[index].on_host.most,
                    held=memories[index].minibatches.most,
                    device_bytes=device_bytes(device),
                    compile_s=engine.stages[index].compile_seconds,
                )
                for index, device in enumerate(self.devices)
            ],
            emulated=decision.emulated,
        )

    def _device(self, stage: int) -> str:
        group, names = self.decision.groups.get(stage), self.decision.names
        if group is not None:
            return " + ".join(map(device_name, group.devices))
        return device_name(self.devices[stage]) if names is None else names[stage]


def stage_count(stages: int | Literal["auto"], devices: int, layers: int, why_few: str = "") -> int:
    """Return k: the setting ``stages``, or for "auto" one stage for each device while there are layers.

    ``why_few`` explains the few layers, with a way out. It is empty if nothing joins layers or leaves them out.

    Raises:
        SettingError: if ``stages`` is larger than the number of layers.
    """
    if stages == "auto":
        if devices > layers:
            idle = devices - layers
            warnings.warn(
                f"{devices} devices, but only {layers} layer{'' if layers == 1 else 's'}: {idle}"
                f" {'stays' if idle == 1 else 'stay'} idle",
                stacklevel=2,
            )
        if layers == 1:
            warnings.warn("the pipelined module is one layer, so HetPipeStrategy trains it as one stage", stacklevel=2)
        elif devices == 1:
            warnings.warn(
                "there is one device, so HetPipeStrategy trains the model as one stage, without a pipeline; for more,"
                " set stages, as several may share a device",
                stacklevel=2,
            )
        return min(devices, layers)
    if stages > layers:
        plural = "s" if layers != 1 else ""
        message = f"stages={stages} is more than the {layers} layer{plural} of the pipelined module"
        if why_few:
            raise PipelineRefusal(f"{message}, since {why_few}")
        raise SettingError(f"{message}; set stages to at most {layers}, or split a layer into several modules")
    return stages


def place(stages: int, devices: Sequence[T]) -> list[T]:
    """Return the device of each stage: the first k devices in order. If there are fewer devices, neighbours share."""
    if stages <= len(devices):
        return list(devices[:stages])
    return [devices[stage * len(devices) // stages] for stage in range(stages)]


def move_to_devices(layout: Layout, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Move the live weights, their gradients and their optimizer state to their stages' devices.

    Tensors outside of stages go to the last stage's device, where the loss is.
    """
    places: dict[int, torch.device] = {}
    for stage, device in enumerate(layout.devices):
        for layer in layout.stage_layers(stage):
            places.update({id(each): device for each in (*layer.module.parameters(), *layer.module.buffers())})
            if isinstance(layer.module, GraphLayer):
                layer.module.device = device
    root = layout.devices[-1]
    if optimizer is not None:
        leave_before_parameters(optimizer, lambda parameter: parameter.device != places.get(id(parameter), root))
    move_apart(module, places, root)
    if optimizer is not None:
        follow_parameters(optimizer)


def device_bytes(device: torch.device) -> int | None:
    """Return the most bytes that torch has allocated on ``device``, or None for a CPU, where it does not count."""
    return torch.accelerator.max_memory_allocated(device) if accelerates(device) else None


def device_name(device: torch.device) -> str:
    """Name the device for people: "cpu", or the GPU's name with its index."""
    if not accelerates(device):
        return str(device)
    return f"{device} ({name_of(device)})"
