"""Stages on other machines: hosts, and what the process of Lightning's loop has of them."""
