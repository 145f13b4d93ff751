"""Compiles variant tables to cubins, checks them and packs them. Used by the build and by the JIT hook."""
