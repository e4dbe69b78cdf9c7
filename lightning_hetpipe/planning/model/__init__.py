"""What a plan is made from: devices, layers, what they cost, and the simulation of a pipeline."""
