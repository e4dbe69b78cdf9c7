"""Stages in processes of their own: hosts, and what the process of Lightning's loop has of them."""
