"""The operators inside training frameworks. Each module imports its framework, so import only the one in use."""
