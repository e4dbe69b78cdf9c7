"""Stages in processes of their own."""
