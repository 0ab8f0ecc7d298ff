"""Dispatch, dtypes, gradients and bad input: CASES section J (memory: `test_cases_memory.py`)."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dma_attn import (
    DMAConfig,
    dma_attention,
    dma_attention_prepared,
    dma_attention_varlen,
    explain,
    prepare_kv,
    scaled_dot_product_attention,
)
from dma_attn.device import DeviceInfo, device_status, override_device
from dma_attn.testing import random_qkv
from tests.impls import DEVICE, INTERPRETED, check_against_oracle, each_impl, pick

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
ROOT = Path(__file__).resolve().parent.parent


def run_python(code: str, *options: str, **environment: str) -> str:
    """Output of `python -c code` in a fresh process; fails with its stderr."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, *options, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_case_111_explain_says_why_the_gpu_path_is_off() -> None:
    code = """
import torch, dma_attn
q = torch.randn(1, 1, 4, 32)
assert dma_attn.dma_attention(q, q, q).isfinite().all()
print(dma_attn.explain(q, q, q))
"""
    text = run_python(code, CUDA_VISIBLE_DEVICES="")
    assert "reference" in text and "cpu" in text.lower()


def test_case_111_explicit_triton_on_cpu_tensors_never_falls_back() -> None:
    code = """
import torch, dma_attn
q = torch.randn(1, 1, 4, 32)
try:
    dma_attn.dma_attention(q, q, q, impl="triton")
except (RuntimeError, ValueError, NotImplementedError) as error:
    print(error)
else:
    raise SystemExit("fell back silently")
"""
    assert "triton" in run_python(code, CUDA_VISIBLE_DEVICES="").lower()


def mocked(capability: tuple[int, int], triton: str | None = "3.6.0") -> DeviceInfo:
    return DeviceInfo("Mock GPU", capability, 101376, triton)


@pytest.mark.parametrize(
    ("capability", "triton"), [((7, 0), "3.6.0"), ((7, 5), "3.6.0"), ((12, 0), "2.1.0")]
)
def test_case_112_unsupported_gpu_or_triton(capability: tuple[int, int], triton: str) -> None:
    """One RuntimeError before any compilation: device, capability, Triton version, remedy."""
    q = torch.zeros(1, 1, 4, 32, device=DEVICE)
    with override_device(mocked(capability, triton)):
        assert device_status(DEVICE).path == "refused"
        with pytest.raises(RuntimeError) as error:
            dma_attention(q, q, q, impl="triton")
    text = str(error.value)
    for part in ("Mock GPU", f"{capability[0]}.{capability[1]}", triton):
        assert part in text
    assert "impl='reference'" in text or "pip install" in text


def test_case_112_no_triton_on_a_gpu() -> None:
    with override_device(mocked((9, 0), None)):
        status = device_status("cuda")
    assert status.path == "refused" and "pip install" in status.reason


@pytest.mark.parametrize(
    "capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1), (13, 0)]
)
def test_case_113_new_minor_versions_are_not_rejected(capability: tuple[int, int]) -> None:
    with override_device(mocked(capability)):
        status = device_status("cuda")
    assert status.path == "triton" and status.kernel
    assert f"{capability[0]}.{capability[1]}" in status.reason


@each_impl
def test_case_114_head_dim_256_on_a_gpu_with_99_kb(impl: str) -> None:
    lengths = pick((300, 300), (20, 20))
    q, k, v = random_qkv(1, (2, 1), lengths, 256, device=DEVICE)
    if INTERPRETED or impl == "reference":
        check_against_oracle(q, k, v, DMAConfig(), impl, is_causal=True)
        return
    with override_device(mocked((8, 9))):
        check_against_oracle(q, k, v, DMAConfig(), impl, is_causal=True)


MIXED = [(FP32, FP32, BF16), (FP16, BF16, BF16), (BF16, BF16, FP16), (FP64, FP64, FP64)]


@each_impl
@pytest.mark.parametrize("dtypes", MIXED, ids=str)
def test_case_117_mixed_and_double_dtypes_are_named(
    dtypes: tuple[torch.dtype, ...], impl: str
) -> None:
    q, k, v = (torch.zeros(1, 1, 4, 32, dtype=dtype, device=DEVICE) for dtype in dtypes)
    with pytest.raises(TypeError) as error:
        dma_attention(q, k, v, impl=impl)
    for dtype in dtypes:
        assert str(dtype) in str(error.value)
    with pytest.raises(TypeError):
        scaled_dot_product_attention(q, k, v)


@each_impl
def test_case_117_integers_and_non_tensors(impl: str) -> None:
    q = torch.zeros(1, 1, 4, 32, device=DEVICE)
    with pytest.raises(TypeError):
        dma_attention(q.int(), q.int(), q.int(), impl=impl)
    with pytest.raises(TypeError):
        dma_attention(q.tolist(), q, q, impl=impl)


@each_impl
@pytest.mark.parametrize("dtype", pick([FP16, BF16, FP32], [FP16], [BF16]), ids=str)
def test_case_117_output_has_the_dtype_of_q(dtype: torch.dtype, impl: str) -> None:
    q, k, v = random_qkv(1, (2, 1), (4, 4), 64, dtype=dtype, device=DEVICE)
    out, lse = dma_attention(q, k, v, return_lse=True, impl=impl)
    assert out.dtype == dtype and lse.dtype == FP32


@each_impl
@pytest.mark.parametrize("which", [0, 1, 2])
def test_case_118_gradients_are_never_dropped(which: int, impl: str) -> None:
    tensors = list(random_qkv(1, (2, 1), (4, 4), 64, device=DEVICE))
    tensors[which].requires_grad_()
    with pytest.raises(NotImplementedError, match="grad"):
        dma_attention(*tensors, impl=impl)
    with pytest.raises(NotImplementedError, match="grad"):
        scaled_dot_product_attention(*tensors)
    if which:
        with pytest.raises(NotImplementedError, match="grad"):
            prepare_kv(*tensors[1:], impl=impl)
    with torch.no_grad():
        assert not dma_attention(*tensors, return_lse=True, impl=impl)[0].requires_grad
    with torch.inference_mode():
        assert dma_attention(*tensors, return_lse=True, impl=impl)[0].isfinite().all()


@each_impl
def test_bad_arguments_are_named(impl: str) -> None:
    q, k, v = random_qkv(2, (2, 1), (4, 6), 32, device=DEVICE)
    wrong_out = torch.empty(2, 2, 4, 16, dtype=BF16, device=DEVICE)
    calls = [
        ("tensor_layout", {"tensor_layout": "BSHD"}),
        ("kv_len", {"kv_len": 7}),
        ("kv_len", {"kv_len": -1}),
        ("kv_len", {"kv_len": torch.ones(3, dtype=torch.int32, device=DEVICE)}),
        ("out", {"out": wrong_out}),
        ("key_padding_mask", {"key_padding_mask": torch.ones(2, 4, dtype=bool, device=DEVICE)}),
        ("window_size", {"window_size": 3}),
        ("window_size", {"window_size": 0, "is_causal": True}),
    ]
    for name, kwargs in calls:
        with pytest.raises(ValueError, match=name):
            dma_attention(q, k, v, impl=impl, **kwargs)
    with pytest.raises(ValueError, match="impl"):
        dma_attention(q, k, v, impl="cuda")
    with pytest.raises((TypeError, ValueError), match="out"):
        dma_attention(q, k, v, out=torch.empty_like(q, dtype=FP32), impl=impl)
    with pytest.raises((TypeError, ValueError), match="kv_len"):
        dma_attention(q, k, v, kv_len=torch.ones(2, device=DEVICE), impl=impl)
    with pytest.raises(TypeError, match="scale"):
        dma_attention(q, k, v, scale="0.1", impl=impl)
    with pytest.raises(TypeError, match="config"):
        dma_attention(q, k, v, config="default", impl=impl)


@each_impl
def test_bad_shapes_are_named(impl: str) -> None:
    q, k, v = random_qkv(2, (2, 1), (4, 6), 32, device=DEVICE)
    calls = [
        (q[0], k, v),
        (q[..., :16], k, v),
        (q, k[:1], v[:1]),
        (q, k, v[:, :, :5]),
        (q, k, v.repeat(1, 2, 1, 1)),
    ]
    for tensors in calls:
        with pytest.raises(ValueError, match=r"\d"):
            dma_attention(*tensors, impl=impl)


@each_impl
def test_select_is_refused_clearly(impl: str) -> None:
    q, k, v = random_qkv(1, (1, 1), (4, 4), 32, device=DEVICE)
    with pytest.raises(NotImplementedError, match="select"):
        dma_attention(q, k, v, config=DMAConfig(select=3), impl=impl)


@each_impl
@pytest.mark.parametrize("shape", [(0, 2, 4, 6), (1, 2, 0, 6), (1, 2, 4, 0), (1, 2, 0, 0)], ids=str)
def test_empty_sizes(shape: tuple[int, int, int, int], impl: str) -> None:
    batch, heads, s_q, s_kv = shape
    q, k, v = random_qkv(batch, (2 * heads, heads), (s_q, s_kv), 64, device=DEVICE)
    for is_causal in (False, True):
        out, lse = dma_attention(q, k, v, is_causal=is_causal, return_lse=True, impl=impl)
        assert out.shape == (batch, 2 * heads, s_q, 64) and not out.any()
        assert lse.shape == (batch, 2 * heads, s_q) and (lse == -math.inf).all()
    prepared = prepare_kv(k, v, impl=impl)
    assert dma_attention_prepared(q, prepared, is_causal=True, impl=impl).shape == out.shape


@each_impl
def test_varlen_without_any_token(impl: str) -> None:
    q = torch.zeros(0, 2, 32, dtype=BF16, device=DEVICE)
    cu = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    out, lse = dma_attention_varlen(
        q, q, q, cu, cu, 0, 0, is_causal=True, return_lse=True, impl=impl
    )
    assert out.shape == (0, 2, 32) and lse.shape == (2, 0)


def test_explain_names_path_and_reason() -> None:
    q, k, v = random_qkv(1, (2, 1), (40, 60), 64, device=DEVICE)
    text = explain(q, k, v, is_causal=True)
    assert isinstance(text, str)
    assert ("triton" if DEVICE == "cuda" else "reference") in text
