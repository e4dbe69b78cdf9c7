"""The private names of torch that this package touches, in one place; ``tests/private`` guards each."""
