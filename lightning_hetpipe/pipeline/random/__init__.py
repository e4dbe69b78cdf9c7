"""Random generators of a minibatch, and the operators that draw from them."""
