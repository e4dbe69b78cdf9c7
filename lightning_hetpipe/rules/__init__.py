"""Pure rules: the schedule as data, and which version of the weights a minibatch uses. Imports no Lightning, no threads."""
