"""Loads the operator library, and what it needs of Python while it runs."""
