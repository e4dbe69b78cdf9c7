"""Stage threads, weight stashes, runners of minibatches and the engine that owns them."""
