"""Marker `gpu`: the test needs a CUDA device and is skipped without one.

With `DMA_ATTN_TEST_HOPPER=0` every test runs with the Hopper kernel off; with
`DMA_ATTN_TEST_CAPABILITY=80` (or 86, 89) on a newer GPU, kernels are those of that compute
capability: `tests.compiling.as_older_gpu`.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from dma_attn.attention.dispatch import use_native

CAPABILITY = os.environ.get("DMA_ATTN_TEST_CAPABILITY")


@pytest.fixture(autouse=os.environ.get("DMA_ATTN_TEST_HOPPER") == "0")
def portable_kernel() -> Iterator[None]:
    """The portable kernel takes every call."""
    with use_native(False):
        yield


@pytest.fixture(scope="session", autouse=CAPABILITY is not None)
def older_gpu() -> Iterator[None]:
    """Every GPU is an older one."""
    from tests.compiling import as_older_gpu

    with as_older_gpu(int(CAPABILITY or 0)):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
