"""Train one unchanged LightningModule over devices that do not match: HetPipe for PyTorch Lightning."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_hetpipe.strategy.strategy import HetPipeStrategy

__all__ = ["HetPipeStrategy"]

if HetPipeStrategy.strategy_name not in StrategyRegistry:
    HetPipeStrategy.register_strategies(StrategyRegistry)
