"""The package that is served."""

PACKAGE = "liger_kernel"
# The release whose public names are served, reported as the version.
SERVED_VERSION = "0.8.5"
