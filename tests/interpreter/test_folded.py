"""The kernels that prepare Hopper's operands, under the interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.folded_checks import CONFIGS, check_e2m1, check_fold
from tests.impls import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")


@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
@pytest.mark.parametrize("text", CONFIGS)
def test_fold(text: str, special: bool) -> None:
    check_fold(text, 64, torch.bfloat16 if special else torch.float16, "cpu", special)


def test_e2m1() -> None:
    check_e2m1("cpu", 9973)
