"""Operators on many devices: their sharding rules for DTensor, registered when a process first imports it."""
