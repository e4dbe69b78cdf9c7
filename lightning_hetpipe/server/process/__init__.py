"""Processes: the service behind a transport, the client of a virtual worker, and the server process."""
