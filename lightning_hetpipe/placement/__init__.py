"""Placement of layers on devices: discovery of devices, measuring, the decision, and the layout of stages."""
