"""From variant tables to cubins: compile, check, pack. Runs at build time and behind the JIT hook."""
