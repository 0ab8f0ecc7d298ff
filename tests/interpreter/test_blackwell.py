"""The Blackwell kernel under the Triton interpreter: its block-scaled products are emulated there,
those with E8M0 scales from Triton 3.8 on by the interpreter itself."""

from __future__ import annotations

import pytest

from tests.blackwell_checks import (
    E4M3_CONFIGS,
    E8M0_CONFIGS,
    SHAPES,
    check_attention_mask,
    check_prepared_and_layouts,
    check_shape,
)
from tests.impls import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")


@pytest.mark.parametrize("config", E8M0_CONFIGS + E4M3_CONFIGS)
def test_configs(config: str) -> None:
    check_shape("causal", config)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str) -> None:
    check_shape(shape, "default")


def test_prepared_and_layouts() -> None:
    check_prepared_and_layouts()


def test_attention_mask() -> None:
    check_attention_mask()
