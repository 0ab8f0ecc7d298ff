"""Inputs, error budgets and two independent oracles for the tests and benches.

Both oracles are fp64, dense (O(S_q * S_kv) memory) and slow on purpose, and share nothing with the
attention code. `dense_oracle` is softmax attention over the visible keys. `quantised_oracle` is the
same with q and k replaced by the dequantised values of `quantize_pair`, in the class that a
brute-force map gives to every (query, key): high when `|a - b| * 128 < diag`, for the tiles a and b
of their absolute positions, or when b lies in the sink of the batch row. Masks *select* keys:
nothing is ever added to, or multiplied with, a value that is not visible, so that NaN in unread
memory cannot reach a reference value. Method and bounds: docs/method.md, docs/numerics.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dma_attn import DMAConfig, quantize_pair

TILE = 128
"""Edge of a precision tile in tokens; written out here so that the oracle checks the library's."""


@dataclass(frozen=True)
class Masking:
    """Which keys a query sees; the fields are `dma_attention`'s and SDPA's arguments.

    `top_left` selects SDPA's causal rule (query i sits at position i) instead of bottom-right.
    `attn_mask` is bool (True = visible) or additive, broadcastable to (B, H_q, S_q, S_kv).
    """

    is_causal: bool = False
    window_size: int | None = None
    key_padding_mask: Tensor | None = None
    kv_len: int | Tensor | None = None
    attn_mask: Tensor | None = None
    top_left: bool = False

    def ends(self, k: Tensor) -> Tensor:
        """Number of keys that each batch row may read: int64 (B,)."""
        batch, s_kv = k.shape[0], k.shape[2]
        if self.kv_len is None:
            return torch.full((batch,), s_kv, device=k.device)
        if isinstance(self.kv_len, int):
            return torch.full((batch,), self.kv_len, device=k.device)
        return self.kv_len.to(k.device, torch.int64)

    def positions(self, q: Tensor, k: Tensor) -> Tensor:
        """Absolute position of each query: int64 (B, S_q), negative when S_q > kv_len."""
        rows = torch.arange(q.shape[2], device=q.device)
        if self.top_left and self.is_causal:
            return rows.expand(q.shape[0], -1)
        return rows + (self.ends(k) - q.shape[2])[:, None]

    def kept(self) -> Tensor | None:
        """The attention mask as bool, four-dimensional: True where a key is visible."""
        mask = self.attn_mask
        if mask is None:
            return None
        if mask.dtype != torch.bool:
            mask = mask > torch.finfo(mask.dtype).min / 2
        return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)

    def readable(self, k: Tensor) -> Tensor:
        """Keys within kv_len that are not padded: bool (B, S_kv)."""
        keys = torch.arange(k.shape[2], device=k.device)
        seen = keys < self.ends(k)[:, None]
        return seen if self.key_padding_mask is None else seen & self.key_padding_mask

    def valid(self, k: Tensor) -> Tensor:
        """Keys that count for means and for a row's start: bool (B, S_kv)."""
        kept = self.kept()
        seen = self.readable(k)
        return seen if kept is None else seen & kept.any(dim=2).any(dim=1)

    def visible(self, q: Tensor, k: Tensor) -> Tensor:
        """Which key each query sees: bool (B, 1 or H_q, S_q, S_kv)."""
        keys = torch.arange(k.shape[2], device=k.device)
        position = self.positions(q, k)[:, None, :, None]
        seen = self.readable(k)[:, None, None, :].expand(-1, -1, q.shape[2], -1)
        if self.is_causal:
            seen = seen & (keys <= position)
        if self.window_size is not None:
            seen = seen & (keys > position - self.window_size)
        kept = self.kept()
        return seen if kept is None else seen & kept

    def bias(self) -> Tensor | float:
        """The additive part of a float mask in fp64, 0 where it hides a key."""
        kept = self.kept()
        if self.attn_mask is None or kept is None or self.attn_mask.dtype == torch.bool:
            return 0.0
        bias = self.attn_mask.double().reshape(kept.shape)
        return torch.where(kept, bias, 0.0)


def class_map(config: DMAConfig, positions: Tensor, start: Tensor, s_kv: int) -> Tensor:
    """High-precision map, True = high: bool (B, S_q, S_kv), from the definition.

    positions: absolute query positions (B, S_q). start: the first valid key of each row (B,).
    """
    query_tile = torch.div(positions, TILE, rounding_mode="floor")[:, :, None]
    key_tile = (torch.arange(s_kv, device=positions.device) // TILE)[None, None, :]
    if config.diag == "full":
        return torch.ones(*positions.shape, s_kv, dtype=torch.bool, device=positions.device)
    near = (query_tile - key_tile).abs() * TILE < int(config.diag)
    if config.sink == 0:
        return near
    first = start[:, None, None]
    begins = key_tile * TILE < first + config.sink
    ends = (key_tile + 1) * TILE > first
    return near | (begins & ends)


def dense_oracle(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, **masking: object
) -> tuple[Tensor, Tensor]:
    """Fp64 softmax attention over the visible keys: out (B, H_q, S_q, D_v), LSE (B, H_q, S_q).

    q (B, H_q, S_q, D), k (B, H_kv, S_kv, D), v (B, H_kv, S_kv, D_v); `masking`: see `Masking`.
    """
    rules = Masking(**masking)  # type: ignore[arg-type]  # checked by the dataclass
    logits = _scale(q, scale) * (q.double() @ _per_query_head(k.double(), q).mT)
    return _softmax_pv(logits + rules.bias(), rules.visible(q, k), v)


def quantised_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: DMAConfig | None = None,
    *,
    scale: float | None = None,
    folded: bool = False,
    **masking: object,
) -> tuple[Tensor, Tensor]:
    """`dense_oracle` on dequantised q and k, by the class of each tile; V and P stay fp64.

    The LSE is that of the unsmoothed logits. Shapes and arguments are those of `dense_oracle`.
    `folded`: block-scaled copies are rounded to E4M3 once more, relative to a power of two per
    query or per 128 keys, as a kernel on FP8 tensor cores reads them.
    """
    config = DMAConfig() if config is None else config
    rules = Masking(**masking)  # type: ignore[arg-type]  # checked by the dataclass
    valid = rules.valid(k)
    positions = rules.positions(q, k)
    start = valid.int().argmax(dim=1) if k.shape[2] else valid.new_zeros(k.shape[0])
    high = class_map(config, positions, start, k.shape[2])
    mean = _key_mean(k, valid) if config.smooth_k else None
    # a key that is not valid takes part in no scale: 0 once the mean is subtracted
    k = torch.where(valid[:, None, :, None], k, 0.0 if mean is None else mean.to(k.dtype))
    logits = q.new_zeros((*q.shape[:3], k.shape[2]), dtype=torch.float64)
    for row, end in enumerate(rules.ends(k).tolist()):
        if end == 0 or q.shape[2] == 0:
            continue
        near, far = _row_logits(
            q[row : row + 1],
            k[row : row + 1, :, :end],
            config,
            None if mean is None else mean[row : row + 1],
            first=int(positions[row, 0]),
            scale=_scale(q, scale),
            folded=folded,
        )
        logits[row, :, :, :end] = torch.where(high[row, :, :end], near[0], far[0])
    return _softmax_pv(logits + rules.bias(), rules.visible(q, k), v)


def _row_logits(
    q: Tensor,
    k: Tensor,
    config: DMAConfig,
    mean: Tensor | None,
    *,
    first: int,
    scale: float,
    folded: bool,
) -> tuple[Tensor, Tensor]:
    """Unsmoothed fp64 logits of one batch row in the high and in the low class."""
    paper = config.scale_rule == "paper"
    query = q.float() * (scale * math.log2(math.e)) if paper else q
    factor = math.log(2) if paper else scale
    shift: Tensor | float = 0.0
    if mean is not None:
        shift = scale * (q.double() @ _per_query_head(mean.double(), q).mT)
    logits = []
    for name in (config.high, config.low):
        if name == "none":
            logits.append(scale * (q.double() @ _per_query_head(k.double(), q).mT))
            continue
        q_span = "token" if name == "int8" else config.granularity
        q_copy = _copy(query, name, config, q_span, first=first)
        k_copy = _copy(k, name, config, config.granularity, mean=mean)
        if folded and name != "int8":
            q_copy, k_copy = fold(q_copy, 1), fold(k_copy, TILE)
        logits.append(factor * (q_copy @ _per_query_head(k_copy, q).mT) + shift)
    return logits[0], logits[1]


def fold(values: Tensor, rows: int) -> Tensor:
    """values (..., S, D) rounded to E4M3 relative to the power of two of every `rows` rows (fp64).

    The power of two is the smallest with which the largest finite value is at most 448.
    """
    parts = []
    for part in values.double().split(rows, dim=-2):
        finite = torch.where(part.isfinite(), part.abs(), 0.0).amax((-2, -1), keepdim=True)
        mantissa, exponent = torch.frexp(finite / 448.0)
        exponent = exponent - (mantissa == 0.5).int()
        power = torch.ldexp(torch.ones_like(finite), torch.where(finite == 0, 0, exponent))
        parts.append((part / power).float().to(torch.float8_e4m3fn).double() * power)
    return torch.cat(parts, dim=-2) if parts else values.double()


def _copy(
    x: Tensor,
    name: str,
    config: DMAConfig,
    span: str,
    *,
    mean: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """The dequantised copy (fp64) of x (1, H, S, D) whose first token has position `first`.

    Scales over 128 tokens follow absolute tiles, scales over the tensor are per head.
    """
    head = -first % TILE
    if span == "tile" and 0 < head < x.shape[2]:
        parts = [_copy(part, name, config, span, mean=mean) for part in x.tensor_split([head], 2)]
        return torch.cat(parts, dim=2)
    if span == "tensor" and x.shape[1] > 1:
        means = [None] * x.shape[1] if mean is None else mean.split(1, dim=1)
        parts = [
            _copy(part, name, config, span, mean=part_mean)
            for part, part_mean in zip(x.split(1, dim=1), means, strict=True)
        ]
        return torch.cat(parts, dim=1)
    copy, _ = quantize_pair(
        x,
        name,
        "none",
        mean=mean,
        rotate=config.rotate,
        scale_rule=config.scale_rule,
        granularity=span,
        impl="reference",
    )
    if copy is None:
        raise ValueError(f"quantize_pair: expected a copy in {name!r}, got None")
    return copy.dequantize(torch.float32).double()


def _key_mean(k: Tensor, valid: Tensor) -> Tensor:
    """Mean over the finite values of valid keys, 0 where there is none: fp32 (B, H_kv, 1, D)."""
    used = valid[:, None, :, None] & k.isfinite()
    total = torch.where(used, k.double(), 0.0).sum(dim=2, keepdim=True)
    return (total / used.sum(dim=2, keepdim=True).clamp(min=1)).float()


def _softmax_pv(logits: Tensor, visible: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    visible = visible.expand(logits.shape)
    logits = logits.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.where(visible, torch.exp(logits - lse[..., None]), 0.0)
    values = _per_query_head(v.double(), logits)
    finite = values.isfinite()
    out = weights @ torch.where(finite, values, 0.0)
    if not bool(finite.all()):
        touched = visible.double() @ (~finite).double() > 0
        out = out.masked_fill(touched, math.nan)
    return out, lse


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _scale(q: Tensor, scale: float | None) -> float:
    return float(q.shape[-1]) ** -0.5 if scale is None else scale


@dataclass(frozen=True)
class ErrorBudget:
    """Bounds of docs/numerics.md against the quantised oracle.

    rel_l2: of the output. ones: of the ones probe. lse + lse_relative * max|logit|: of the LSE.
    """

    rel_l2: float
    ones: float
    lse: float = 2e-2
    lse_relative: float = 2.0**-12


def error_budget(config: DMAConfig, out_values: int) -> ErrorBudget:
    """The bounds for a call that returns `out_values` output values."""
    if config.pv == "fp8":
        return ErrorBudget(rel_l2=5e-2 if out_values >= 4096 else 7e-2, ones=6.5e-2)
    return ErrorBudget(rel_l2=1e-2, ones=4e-3)


def assert_rel_l2(out: Tensor, ref: Tensor, bound: float) -> None:
    """Raise AssertionError unless both are finite, alike in shape and within rel-L2 `bound`."""
    if out.shape != ref.shape:
        raise AssertionError(f"shape {tuple(out.shape)}, expected {tuple(ref.shape)}")
    for name, tensor in (("result", out), ("reference", ref)):
        bad = int((~tensor.isfinite()).sum())
        if bad:
            raise AssertionError(f"{bad} of {tensor.numel()} values of the {name} are not finite")
    norm = float(ref.double().norm())
    gap = float((out.double() - ref.double()).norm())
    if gap > bound * norm:
        raise AssertionError(f"rel-L2 {gap / norm if norm else math.inf:.3e} exceeds {bound:.1e}")


def assert_lse(lse: Tensor, ref: Tensor, budget: ErrorBudget, max_logit: float) -> None:
    """Raise AssertionError unless -inf agrees everywhere and the rest is within the budget."""
    if lse.shape != ref.shape or lse.dtype != torch.float32:
        got = f"{lse.dtype} {tuple(lse.shape)}"
        raise AssertionError(f"LSE is {got}, expected float32 {tuple(ref.shape)}")
    empty = ref == -math.inf
    if not torch.equal(lse == -math.inf, empty):
        raise AssertionError("LSE is not -inf in exactly the rows without a visible key")
    gap = (lse.double() - ref).abs().masked_fill(empty, 0.0)
    bound = budget.lse + budget.lse_relative * max_logit
    if not bool((gap <= bound).all()):
        raise AssertionError(f"LSE is off by {float(gap.max()):.3e}, bound {bound:.1e}")


def random_qkv(
    batch: int,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    dims: tuple[int, int] | int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """N(0,1) q, k, v in (B, H, S, D); heads = (H_q, H_kv), lengths = (S_q, S_kv), dims = (D, D_v).

    Drawn on the CPU, so that the values do not depend on the device.
    """
    d, d_v = (dims, dims) if isinstance(dims, int) else dims
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (batch, heads[0], lengths[0], d),
        (batch, heads[1], lengths[1], d),
        (batch, heads[1], lengths[1], d_v),
    )
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return q, k, v


def index_values(batch: int, heads: int, s_kv: int, d_v: int, **kind: object) -> Tensor:
    """v[j] = j in every channel (the mean probe); exact in fp16 up to 2048, in bf16 up to 256."""
    index = torch.arange(s_kv, **kind)  # type: ignore[call-overload]  # dtype and device
    return index[None, None, :, None].expand(batch, heads, s_kv, d_v).contiguous()


def probe_key(d: int, **kind: object) -> Tensor:
    """The key [4, 1.25 x 31, 0, ...] of the precision probe: (d,), d >= 32."""
    key = torch.zeros(d, **kind)  # type: ignore[call-overload]  # dtype and device
    key[:32] = 1.25
    key[0] = 4.0
    return key


def probe_query(d: int, **kind: object) -> Tensor:
    """The query [0, 1 x 31, 0, ...]: its dot with `probe_key` is 38.75 in MXFP8, 31.0 in MXFP4."""
    query = torch.zeros(d, **kind)  # type: ignore[call-overload]  # dtype and device
    query[1:32] = 1.0
    return query


def poison_free_memory(*sizes: int, device: torch.device | str = "cpu") -> None:
    """Fill blocks of the given byte sizes with 0xFF (NaN in every format) and free them again."""
    blocks = [torch.full((size,), 0xFF, dtype=torch.uint8, device=device) for size in sizes]
    del blocks
