"""Layers of a stage on several devices, each of which computes some of their channels."""
