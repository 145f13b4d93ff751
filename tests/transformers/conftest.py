import pytest
import torch


@pytest.fixture
def fresh_dynamo():
    """torch.compile limits recompilations per function, and all models share the functions of transformers."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
