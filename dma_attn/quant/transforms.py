"""Transforms that leave attention's exact result unchanged: K smoothing and Hadamard rotation.

softmax is invariant to a constant added to a row of scores, so K may lose its mean over the keys
(`q . (k - mean) = q . k - q . mean`); and `(q R) . (k R) = q . k` for an orthonormal R. Both make
K easier to quantise: smoothing removes channel biases, rotation spreads outliers over a token.
"""

from __future__ import annotations

import math

import torch


def hadamard_size(head_dim: int) -> int:
    """The largest power of two that divides `head_dim`: the rotation's block size."""
    return head_dim & -head_dim


def hadamard_norm(n: int) -> float:
    """float32(1 / sqrt(n)), the factor that makes the Sylvester matrix orthonormal."""
    return torch.tensor(1.0 / math.sqrt(n), dtype=torch.float32).item()


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Multiply float32 x (..., D) by the block-diagonal orthonormal Hadamard matrix H_n.

    n is the largest power of two dividing D. Butterflies h = 1, 2, 4, ... and one multiplication by
    float32(1 / sqrt n) last: the order fixes the bits. H is symmetric, so `rotate` inverts itself.
    """
    size, n = x.shape[-1], hadamard_size(x.shape[-1])
    y = x.reshape(-1, size).T.contiguous()  # channels first: sums of long vectors
    h = 1
    while h < n:
        pairs = y.view(size // (2 * h), 2, h, -1)
        a, b = pairs[:, 0], pairs[:, 1]
        y = torch.stack((a + b, a - b), 1)
        h *= 2
    return (y.view(size, -1) * hadamard_norm(n)).T.contiguous().view(x.shape)


def key_mean(k: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    """Mean of K over its valid keys, the finite values one by one.

    Args:
        k: (B, H, S, D), any float dtype.
        valid: (B, S) bool, True = the key counts; None counts all.

    Returns:
        (B, H, 1, D) float32; 0 where no value counts.
    """
    x = k.float().contiguous()  # one order of summation for every memory layout
    count = torch.isfinite(x)
    if valid is not None:
        count &= valid[:, None, :, None]
    total = torch.where(count, x, 0.0).sum(-2, keepdim=True)
    return total / count.sum(-2, keepdim=True).clamp(min=1)
