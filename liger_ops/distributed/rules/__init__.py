"""Sharding rules, one file for each operator or family. Importing a file registers its rules.

The docstring of a file has a paragraph per layout, which becomes a line of docs/operators.md: `inputs -> results; gradients;
communication`, the last only if there is any. The notation is that of docs/distributed.md. A paragraph is about all operators
of the file, or about those that it begins with, as in "swiglu, geglu: R ...".
"""
