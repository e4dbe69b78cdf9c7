"""Train one unchanged LightningModule over devices that do not match: HetPipe for PyTorch Lightning."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_hetpipe.strategy.strategy import HetPipeStrategy
from lightning_hetpipe.strategy.wsp import WSPCallback

__all__ = ["HetPipeStrategy", "WSPCallback"]

if HetPipeStrategy.strategy_name not in StrategyRegistry:
    HetPipeStrategy.register_strategies(StrategyRegistry)
