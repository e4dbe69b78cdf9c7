"""Search for the best plan: device orders, division of the layers, number in flight."""
