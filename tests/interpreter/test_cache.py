"""The decode kernel and chunks over a cache, under the interpreter."""

from __future__ import annotations

import pytest

from tests import test_chunk, test_decode


@pytest.mark.parametrize("n, window", [(1, None), (16, 200)])
def test_decode_law(n: int, window: int | None) -> None:
    test_decode.test_the_law(391, n, window, "triton")


@pytest.mark.parametrize("text, v", [
    ("default", ("mxfp8", "nvfp4")),
    ("default,high=int8,low=fp4,diag=0,sink=256", ("none", "int4")),
])
def test_formats(text: str, v: tuple[str, str]) -> None:
    test_decode.test_formats(text, v, "triton")


def test_padding() -> None:
    test_decode.test_padding("triton")


@pytest.mark.parametrize("text", ["default,high=none,low=int4", "default"])
def test_chunked(text: str) -> None:
    test_chunk.test_chunked_equals_one_shot(text, [70, 100], "triton")
