"""The Blackwell kernel without a Blackwell: instructions, resources, scale layout, dispatch."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from dma_attn import DMAConfig, dma_attention, explain, quantize
from dma_attn.attention.dispatch import native_kernel, use_native
from dma_attn.attention.kernels.swizzle import swizzle, unswizzle
from dma_attn.cli import main
from dma_attn.device import (
    KNOWN,
    DeviceInfo,
    device_status,
    dispatch_table,
    override_device,
)
from dma_attn.quant.rows import Rows
from tests.blackwell_checks import (
    BLACKWELL,
    E8M0_CONFIGS,
    SHAPES,
    check_attention_mask,
    check_prepared_and_layouts,
    check_shape,
)
from tests.compiling import SHARED_MEMORY, check_fp8_products, compile_only, device_tensor
from tests.impls import needs_gpu

# Bytes of local memory a thread, the most that spills may take; Triton 3.9 takes up to 120
STACK = 48 if triton.__version__.startswith("3.6") else 160
STACK_FP8 = 224  # the same on 12.x, whose FP8 P V of 128 dims has V's bytes in registers
TMEM_COLUMNS = 512


def compiled(capability: int, config: str, dim: int, causal: bool) -> Any:
    """The attention kernel of a call."""
    q, k = device_tensor(1, 4, 300, dim), device_tensor(1, 2, 300, dim)
    with compile_only(capability) as kernels:
        dma_attention(q, k, k, config=DMAConfig.parse(config), is_causal=causal, impl="triton")
    return next(k for k in kernels if k.metadata.name == "_portable_kernel")


def stack(kernel: Any, folder: Path) -> int:
    """Bytes of local memory a thread."""
    path = folder / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    text = subprocess.run([tool, "-res-usage", str(path)], capture_output=True, text=True,
                          check=True)
    (found,) = re.findall(r"STACK:(\d+)", text.stdout + text.stderr)
    return int(found)


def check_resources(kernel: Any, capability: int, folder: Path, bound: int = STACK) -> None:
    assert kernel.metadata.shared <= SHARED_MEMORY[capability]
    assert (kernel.metadata.tmem_size or 0) <= TMEM_COLUMNS
    assert stack(kernel, folder) <= bound


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("config", "low", "values"),
    [("default", "mxf4nvf4.block_scale.scale_vec::4X", "f16"),
     ("default,low=mxfp4,pv=fp8", "mxf4.block_scale.scale_vec::2X", "f8f6f4")],
)
def test_tcgen05_of_every_range(
    config: str, low: str, values: str, dim: int, causal: bool, tmp_path: Path
) -> None:
    """Sink and diagonal, the rest, and P V by tcgen05; scales of 128 dims, whole swizzled tiles, go
    from shared to tensor memory."""
    kernel = compiled(100, config, dim, causal)
    ptx = kernel.asm["ptx"]
    for kind in ("mxf8f6f4.block_scale.scale_vec::1X", low, values):
        assert re.search(rf"tcgen05\.mma\.cta_group::1\.kind::{re.escape(kind)}\s", ptx), kind
    assert not re.search(r"\bmma\.sync|wgmma", ptx)
    assert "cp.async.bulk.tensor.5d" in ptx and "cp.async.bulk.tensor.2d" in ptx
    assert ("tcgen05.cp" in ptx) == (dim == 128)
    check_resources(kernel, 100, tmp_path)


@pytest.mark.parametrize("dim", [64, 128])
def test_tcgen05_of_16_bit_tiles(dim: int, tmp_path: Path) -> None:
    kernel = compiled(100, "default,high=none", dim, True)
    ptx = kernel.asm["ptx"]
    assert "kind::mxf4nvf4" in ptx and "kind::f16" in ptx and "mxf8f6f4" not in ptx
    check_resources(kernel, 100, tmp_path)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("config", "scales"),
    [("default", "scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"),
     ("default,low=mxfp4,pv=fp8", "scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0"),
     ("default,pv=fp8", "scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3")],
)
def test_mma_sync_with_block_scales(
    config: str, scales: str, dim: int, causal: bool, tmp_path: Path
) -> None:
    kernel = compiled(120, config, dim, causal)
    ptx = kernel.asm["ptx"]
    assert re.search(r"mma\.sync\S*m16n8k32\S*mxf8f6f4\.block_scale\S*e4m3\.e4m3\.f32\.ue8m0", ptx)
    assert re.search(rf"mma\.sync\S*m16n8k64\S*mxf4nvf4\.block_scale\.{re.escape(scales)}", ptx)
    values = r"e4m3\.e4m3\.f32\s" if "fp8" in config else r"bf16\.bf16"
    assert re.search(rf"mma\.sync\S*{values}", ptx)
    assert check_fp8_products(kernel) == (2 if "fp8" in config else 0)
    check_resources(kernel, 120, tmp_path, STACK_FP8 if "fp8" in config and dim == 128 else STACK)


def test_the_newer_parts_of_both_families(tmp_path: Path) -> None:
    newer = [103] if triton.__version__ < "3.8" else [103, 121]
    for capability in newer:
        kernel = compiled(capability, "default", 128, True)
        assert re.search(r"mxf4nvf4\.block_scale", kernel.asm["ptx"])
        check_resources(kernel, capability, tmp_path)


# Scales


def test_swizzle_by_hand() -> None:
    scales = torch.arange(300 * 6).remainder(251).to(torch.uint8).view(300, 6)
    tiles = swizzle(scales)
    assert tiles.shape == (3, 2, 2, 256) and tiles.is_contiguous()
    flat = tiles.reshape(3, 2, 512)
    for row, column in ((0, 0), (31, 3), (32, 0), (127, 5), (128, 1), (299, 4)):
        tile, r = divmod(row, 128)
        at = 16 * (r % 32) + 4 * (r // 32) + column % 4
        assert flat[tile, column // 4, at] == scales[row, column]
    assert flat[2, 1].count_nonzero() <= 2 * 44  # rows and scales that fill up are 0
    assert torch.equal(unswizzle(tiles, 300, 6), scales)
    batch = torch.randint(0, 256, (2, 3, 130, 4), dtype=torch.uint8)
    assert torch.equal(unswizzle(swizzle(batch), 130, 4), batch)
    assert swizzle(batch[:, :, :0]).shape == (2, 3, 0, 1, 2, 256)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_swizzled_bits_are_torchaos(name: str) -> None:
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    x = torch.randn(260, 128, generator=torch.Generator().manual_seed(0))
    scales = quantize(x, name, impl="reference").scales
    assert torch.equal(swizzle(scales).flatten(), utils.to_blocked(scales).flatten())


# Dispatch


def mocked(capability: tuple[int, int], version: str = "3.6.0") -> DeviceInfo:
    return DeviceInfo("Mock GPU", capability, 101376, version)


TABLE = {
    (7, 5): "", (8, 0): "portable", (8, 6): "portable", (8, 9): "portable",
    (9, 0): "hopper, portable", (10, 0): "blackwell, portable", (10, 3): "blackwell, portable",
    (11, 0): "portable", (12, 0): "blackwell, portable", (12, 1): "portable",
    (13, 0): "portable",
}


@pytest.mark.parametrize(("capability", "kernels"), TABLE.items(), ids=str)
def test_every_row_of_the_table(capability: tuple[int, int], kernels: str) -> None:
    q = device_tensor(1, 2, 300, 128)
    rows = Rows(1, 300)
    with use_native(), override_device(mocked(capability)):
        status = device_status("cuda")
        assert status.path == ("triton" if kernels else "refused")
        assert f"{capability[0]}.{capability[1]}" in status.reason
        if kernels:
            assert status.kernel == kernels
            first = kernels.split(",")[0]
            assert native_kernel(q, q, DMAConfig(), rows, False)[0] == first
            text = explain(q, q, q, impl="triton")
            assert f"({first} kernel)" in text and ("swizzled" in text) == (first == "blackwell")
            with use_native(False):
                assert native_kernel(q, q, DMAConfig(), rows, False)[0] == "portable"


def test_sm_121_needs_a_newer_triton() -> None:
    q = device_tensor(1, 2, 300, 128)
    with override_device(mocked((12, 1))):
        text = explain(q, q, q, impl="triton")
        assert "(portable kernel)" in text and "triton 3.8 is needed, found 3.6.0" in text
    with override_device(mocked((12, 1), "3.8.0")):
        assert "(blackwell kernel)" in explain(q, q, q, impl="triton")


@pytest.mark.skipif(not triton.__version__.startswith("3.6"), reason="the table of Triton 3.6")
def test_info_shows_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert {c for c, _ in KNOWN} == set(TABLE) - {(11, 0), (13, 0)}
    rows = {capability: row for capability, *row in dispatch_table()}
    for capability, kernels in TABLE.items():
        if row := rows.get("{}.{}".format(*capability)):
            native = "," in kernels
            assert row[1] == ("refused" if not kernels else "native" if native else "emulated")
            assert row[2] == (kernels or "use impl='reference'")
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    assert "B300" in shown and "blackwell, portable" in shown and "emulated" in shown


@pytest.mark.parametrize(
    ("words", "change"),
    [("packed", {"rows": Rows(2, 100, cu=torch.tensor([0, 5, 9]))}),
     ("int8", {"config": DMAConfig.preset("hopper")}), ("int4", {"config": DMAConfig(low="int4")}),
     ("16-bit tiles only", {"config": DMAConfig.preset("off")}), ("float32", {"dtype": "float32"}),
     ("head dims 80", {"dim": 80}), ("no keys", {"keys": 0})],
)
def test_what_it_leaves_to_the_portable_kernel(words: str, change: dict[str, Any]) -> None:
    dtype = getattr(torch, change.get("dtype", "bfloat16"))
    k = torch.zeros(1, 2, change.get("keys", 300), change.get("dim", 128), dtype=dtype)
    config = change.get("config", DMAConfig())
    rows = change.get("rows", Rows(1, 300))
    with override_device(BLACKWELL):
        kernel, why = native_kernel(k, k, config, rows, False)
    assert kernel == "portable" and words in why


# On a GPU other than a Blackwell its products are emulated, where their scales are E8M0


@needs_gpu
@pytest.mark.parametrize("config", E8M0_CONFIGS)
def test_emulated_configs(config: str) -> None:
    check_shape("causal", config, "cuda")


@needs_gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_emulated_shapes(shape: str) -> None:
    check_shape(shape, "default,low=mxfp4", "cuda")


@needs_gpu
def test_emulated_prepared_and_layouts() -> None:
    check_prepared_and_layouts("cuda")


@needs_gpu
def test_emulated_attention_mask() -> None:
    check_attention_mask("cuda")
