"""Marker `gpu`: the test needs a CUDA device and is skipped without one.

With `DMA_ATTN_TEST_HOPPER=1` every test runs with the Hopper kernel on, where the device has it.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from dma_attn.attention.dispatch import use_hopper


@pytest.fixture(autouse=os.environ.get("DMA_ATTN_TEST_HOPPER") == "1")
def hopper_kernel() -> Iterator[None]:
    """The Hopper kernel takes the calls that it covers."""
    with use_hopper():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
