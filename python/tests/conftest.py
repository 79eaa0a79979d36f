import pytest
from helpers import watch


@pytest.fixture(autouse=True)
def watchdog():
    watch()


def pytest_collection_modifyitems(items):
    """Tests that need torch, or a GPU, are only there where it is."""
    try:
        import torch
    except ImportError:
        torch = None
    for item in items:
        if "cuda" in item.keywords and not (torch and torch.cuda.is_available()):
            item.add_marker(pytest.mark.skip(reason="needs a GPU and torch"))


collect_ignore = []
try:
    import torch  # noqa: F401
except ImportError:
    collect_ignore += ["test_torch.py", "test_cuda.py"]
