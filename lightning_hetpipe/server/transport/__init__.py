"""Transports: how calls travel between virtual workers and servers."""
