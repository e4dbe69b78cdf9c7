"""Pure rules: the schedule as data, and which version a minibatch uses. Imports no Lightning, no threads."""
