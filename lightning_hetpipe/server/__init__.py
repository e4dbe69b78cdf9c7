"""Parameter servers: the protocol as pure state machines, and the service and client that run them."""
