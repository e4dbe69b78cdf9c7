"""Stage threads, version rings, minibatch runners and the engine that owns them."""
