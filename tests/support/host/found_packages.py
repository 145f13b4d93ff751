"""For processes that run setup.py: it finds torch and Triton, and their import would take most of the time."""

IMPORTED = """
import importlib.metadata, importlib.util, sys, types
for name in ("torch", "triton"):
    spec, version = importlib.util.find_spec(name), importlib.metadata.version(name)
    module = sys.modules[name] = types.ModuleType(name)
    module.__spec__, module.__file__, module.__version__ = spec, spec.origin, version
"""
