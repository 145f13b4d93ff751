"""Sharding rules, one file for each operator."""
