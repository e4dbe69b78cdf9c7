"""Compilation of segments by torch.compile."""
