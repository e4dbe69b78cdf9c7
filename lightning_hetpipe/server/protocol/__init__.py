"""The protocol as pure state machines: time is an argument, and nothing waits or sends."""
