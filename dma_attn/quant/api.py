"""The public quantisation calls: `quantize` and `quantize_pair`."""

from __future__ import annotations

import torch

from ..device import use_triton
from ..formats import GRANULARITIES, SCALE_RULES, BlockFormat, check_choice, get_format
from .reference import quantize_reference
from .tensor import BlockScaledTensor
from .transforms import rotate as rotate_reference

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def quantize(
    x: torch.Tensor,
    format: str,
    *,
    scale_rule: str = "auto",
    granularity: str = "token",
    impl: str = "auto",
) -> BlockScaledTensor:
    """Quantise x along its last dim.

    Args:
        x: (..., D) or (..., S, D), float16, bfloat16 or float32; any strides, any leading dims.
        format: A name of `dma_attn.formats.FORMATS`, not "none".
        scale_rule: A rule of the format, "auto" for its default.
        granularity: Span of the fp32 scale: "token"; for nvfp4 and int8 also "tile" (128 tokens of
            dim -2); for nvfp4 also "tensor" (all of x).
        impl: "reference" (PyTorch), "triton" or "auto" (Triton for CUDA tensors).

    Raises:
        TypeError: x is not a float tensor of the dtypes above.
        ValueError: unknown names, a rule or granularity that the format lacks, odd D in 4 bits.
    """
    fmt = get_format(format)
    if not fmt.quantised:
        raise ValueError('format: expected a quantised format, got "none"')
    check_choice("scale_rule", scale_rule, ("auto", *fmt.rules))
    check_choice("granularity", granularity, fmt.granularities)
    _check_input(x, (fmt,))
    rule = fmt.resolve_rule(scale_rule)
    if use_triton(x.device, impl):
        from .kernels import quantize_triton

        copy, _ = quantize_triton(x, (fmt, None), None, False, rule, granularity)
        assert copy is not None
        return copy
    return _reference(x.float(), fmt, rule, granularity)


def quantize_pair(
    x: torch.Tensor,
    high: str,
    low: str,
    *,
    mean: torch.Tensor | None = None,
    rotate: bool = False,
    scale_rule: str = "auto",
    granularity: str = "token",
    impl: str = "auto",
) -> tuple[BlockScaledTensor | None, BlockScaledTensor | None]:
    """Both copies of x in one pass: subtract `mean`, rotate, quantise to `high` and to `low`.

    Args:
        x: (..., S, D) as for `quantize`. It is never modified.
        high, low: Format names; "none" gives None for that copy.
        mean: float32, broadcast against x, for attention (B, H, 1, D); None subtracts nothing.
        rotate: Multiply by the orthonormal Hadamard matrix along the last dim.
        scale_rule, granularity: As for `quantize`; one that a format lacks means its default.

    Raises:
        TypeError, ValueError: As for `quantize`; a mean of another dtype or shape.
    """
    formats = (get_format(high, "high"), get_format(low, "low"))
    check_choice("scale_rule", scale_rule, SCALE_RULES)
    check_choice("granularity", granularity, GRANULARITIES)
    _check_input(x, formats)
    if mean is not None:
        if not isinstance(mean, torch.Tensor) or mean.dtype != torch.float32:
            got = mean.dtype if isinstance(mean, torch.Tensor) else type(mean).__name__
            raise TypeError(f"mean: expected a float32 tensor, got {got}")
        try:
            torch.broadcast_to(mean, x.shape)
        except RuntimeError:
            raise ValueError(
                f"mean: expected a shape that broadcasts to x {tuple(x.shape)}, "
                f"got {tuple(mean.shape)}"
            ) from None
    if use_triton(x.device, impl):
        from .kernels import quantize_triton

        return quantize_triton(x, formats, mean, rotate, scale_rule, granularity)
    y = x.float()
    if mean is not None:
        y = y - mean
    if rotate:
        y = rotate_reference(y)
    high_copy, low_copy = (
        _reference(y, f, f.resolve_rule(scale_rule), f.resolve_granularity(granularity))
        if f.quantised
        else None
        for f in formats
    )
    return high_copy, low_copy


def _reference(
    x: torch.Tensor, fmt: BlockFormat, rule: str, granularity: str
) -> BlockScaledTensor:
    if x.dim() == 1:
        out = quantize_reference(x[None], fmt, rule, granularity)
        parts = [out.data[0], out.scales[0]]
        second = out.global_scale
        if second is not None and second.dim():
            second = second[0]
        return BlockScaledTensor(parts[0], parts[1], second, fmt.name, x.shape)
    return quantize_reference(x, fmt, rule, granularity)


def _check_input(x: torch.Tensor, formats: tuple[BlockFormat, ...]) -> None:
    if not isinstance(x, torch.Tensor) or x.dtype not in FLOAT_DTYPES:
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"x: expected a float16, bfloat16 or float32 tensor, got {got}")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: expected at least one element in the last dim, got {tuple(x.shape)}")
    for fmt in formats:
        if fmt.bits == 4 and x.shape[-1] % 2:
            raise ValueError(
                f"x: {fmt.name} packs two codes a byte and needs an even last dim, "
                f"got {tuple(x.shape)}"
            )
