"""Pure rules: the schedule as data, and which version a minibatch uses. They import no Lightning and use no threads."""
