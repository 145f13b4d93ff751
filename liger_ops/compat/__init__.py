"""Runs code written for `liger_kernel`: after `install()`, liger_ops serves the public names of that package.

    import liger_ops.compat
    liger_ops.compat.install()
    from liger_kernel.transformers import AutoLigerKernelForCausalLM

Trainer's `use_liger_kernel=True` then finds liger_ops too. A name without a counterpart raises an ImportError that
states the name, the reason and what to use instead. An installed liger_kernel is shadowed only by `install(replace=True)`.
"""

from .finder import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
