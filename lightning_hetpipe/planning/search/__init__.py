"""Search for the best plan: device orders, division of the layers, local search, number in flight."""
