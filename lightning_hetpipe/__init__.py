"""Train one unchanged LightningModule over devices that do not match: HetPipe for PyTorch Lightning."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_hetpipe.planning.model.cluster import Cluster, Device, Link, Node
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.strategy.strategy import HetPipeStrategy
from lightning_hetpipe.strategy.wsp import WSPCallback

__all__ = ["Cluster", "Device", "HetPipeStrategy", "Link", "Node", "Plan", "WSPCallback"]

if HetPipeStrategy.strategy_name not in StrategyRegistry:
    HetPipeStrategy.register_strategies(StrategyRegistry)
