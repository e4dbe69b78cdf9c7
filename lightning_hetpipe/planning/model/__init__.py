"""Input of planning: devices, layers, their costs, and the simulation of a pipeline."""
