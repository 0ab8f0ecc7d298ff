"""Decode: one step over caches of this library against 16-bit and FP8 peers, speed and error.

A step is the whole call on a filled cache (what Q needs, the splits, their combination), replayed
from a CUDA graph; peers are replayed alike. Caches rotate where one would stay in L2. A cache's
result has agreed with the same step on its dequantised keys and values first. `error` is rel-L2
against attention over the 16-bit keys and values, on the first row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..cache import MixedKVCache, dma_attention_with_kvcache
from ..config import DMAConfig
from .peers import module
from .prefill import GateError
from .timing import L2_BYTES, Candidate, Timing, time_candidates

APPENDED = 4096  # tokens at a time
GATE = 1e-2
CACHES = {
    "mxfp8": ("mxfp8,diag=full", ("mxfp8", "mxfp8")),
    "default": ("default,high=none,low=int4", ("none", "int4")),
    "nvfp4": ("default,high=none,low=nvfp4", ("none", "nvfp4")),
}
BF16, FA3_FP8 = ("sdpa-bf16", "fa3-bf16"), ("fa3-fp8 (given FP8)",)
PEERS = (*BF16, *FA3_FP8)
LARGE = 512e6  # bytes of K and V in 16 bits from which the aims count


@dataclass(frozen=True)
class DecodeWorkload:
    """One step of `queries` tokens a row over `length` tokens, those included."""

    batch: int
    length: int
    queries: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def kv_bytes(self) -> int:
        """Of K and V in 16 bits."""
        return 4 * self.batch * self.kv_heads * self.length * self.head_dim

    def __str__(self) -> str:
        return (f"B{self.batch} H{self.heads}/{self.kv_heads} S{self.length} D{self.head_dim} "
                f"q{self.queries}")


@dataclass(frozen=True)
class DecodeRow:
    """A measured candidate; bytes: what it keeps of K and V."""

    workload: DecodeWorkload
    candidate: str
    timing: Timing
    bytes: int
    error: float

    @property
    def gbytes_per_s(self) -> float:
        """Its bytes over its time, GB/s."""
        return self.bytes / self.timing.ms / 1e6


@dataclass(frozen=True)
class DecodeVerdict:
    """An aim on a workload: how many times as fast as `against`, None when one was not measured."""

    workload: DecodeWorkload
    candidate: str
    against: tuple[str, ...]
    ratio: float | None
    must: float
    target: float

    @property
    def holds(self) -> bool:
        """True when the must is reached."""
        return self.ratio is not None and self.ratio >= self.must


CLAIMS = (
    ("mxfp8", BF16, 1.5, 1.8),
    ("default", BF16, 1.7, 2.8),
    ("nvfp4", BF16, 1.2, 2.0),
    ("default", FA3_FP8, 1.3, 2.0),
)
FEW_QUERIES = ("default", 4, 1 / 1.3)  # 4 queries against 1


def judge_decode(rows: Sequence[DecodeRow]) -> list[DecodeVerdict]:
    """Every aim on every workload of at least `LARGE` bytes that was measured."""
    times = {(r.workload, r.candidate): r.timing.ms for r in rows}
    verdicts = []
    for w in dict.fromkeys(r.workload for r in rows if r.workload.kv_bytes >= LARGE):
        if w.queries == 1:
            for name, against, must, target in CLAIMS:
                needed = [times.get((w, x)) for x in (name, *against)]
                ratio = None
                if None not in needed:
                    own, *others = (x for x in needed if x is not None)
                    ratio = min(others) / own
                verdicts.append(DecodeVerdict(w, name, against, ratio, must, target))
        name, few, must = FEW_QUERIES
        if w.queries == few:
            one = DecodeWorkload(w.batch, w.length, 1, w.heads, w.kv_heads, w.head_dim)
            first, own_time = times.get((one, name)), times.get((w, name))
            ratio = None if first is None or own_time is None else first / own_time
            verdicts.append(DecodeVerdict(w, name, (f"{name} with one query",), ratio, must, 1.0))
    return verdicts


def measure_decode(
    workload: DecodeWorkload,
    caches: Sequence[str] = tuple(CACHES),
    peers: Sequence[str] = PEERS,
    rounds: int = 5,
    seconds: float = 0.05,
    notify: Callable[[str], None] = print,
) -> list[DecodeRow]:
    """Time caches and peers on one workload (on the current CUDA device).

    Raises:
        GateError: a cache's step does not agree with attention over what it dequantises to.
    """
    count = max(1, -(-2 * L2_BYTES // (workload.kv_bytes // 4)))  # int4 has a quarter of the bytes
    inputs = [_inputs(workload, i) for i in range(count)]
    exact = _exact(*inputs[0])
    candidates: list[Candidate] = []
    sizes: dict[str, int] = {}
    errors: dict[str, float] = {}
    for name in peers:
        try:
            calls = [_peer(name, x) for x in inputs]
            errors[name] = _error(calls[0](), exact)
        except Exception as error:  # whatever a foreign kernel raises is its reason
            lines = str(error).strip().splitlines() or [""]
            notify(f"{workload}: {name} is missing: {type(error).__name__}: {lines[0]}")
            continue
        candidates.append(Candidate(name, calls))
        sizes[name] = workload.kv_bytes // (2 if name in FA3_FP8 else 1)
    for name in caches:
        filled = [_filled(workload, name, k, v) for _, k, v in inputs]
        steps = [_step(q, cache) for (q, _, _), cache in zip(inputs, filled, strict=True)]
        out = steps[0]()
        ref = dma_attention_with_kvcache(inputs[0][0], filled[0], impl="reference")
        assert isinstance(ref, torch.Tensor)  # no LSE was asked for
        gap = float((out.float() - ref.float()).norm() / ref.float().norm())
        if not gap <= GATE:
            raise GateError(f"{workload}, {name}: rel-L2 {gap:.2e}, bound {GATE}")
        errors[name] = _error(out, exact)
        candidates.append(Candidate(name, steps))
        sizes[name] = filled[0].nbytes()
    timings = time_candidates(candidates, rounds, seconds)
    return [DecodeRow(workload, c.name, timings[c.name], sizes[c.name], errors[c.name])
            for c in candidates]


def _inputs(w: DecodeWorkload, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(heads: int, tokens: int) -> torch.Tensor:
        shape = (w.batch, heads, tokens, w.head_dim)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    return normal(w.heads, w.queries), normal(w.kv_heads, w.length), normal(w.kv_heads, w.length)


def _filled(w: DecodeWorkload, name: str, k: torch.Tensor, v: torch.Tensor) -> MixedKVCache:
    text, (v_high, v_low) = CACHES[name]
    cache = MixedKVCache(w.batch, w.kv_heads, w.head_dim, w.length, config=DMAConfig.parse(text),
                         v_high=v_high, v_low=v_low, device="cuda")
    for begin in range(0, w.length, APPENDED):
        piece = slice(begin, begin + APPENDED)
        cache.append(k[:, :, piece], v[:, :, piece])
    return cache


def _step(q: torch.Tensor, cache: MixedKVCache) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        out = dma_attention_with_kvcache(q, cache)
        assert isinstance(out, torch.Tensor)  # no LSE was asked for
        return out

    return step


def _peer(
    name: str, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> Callable[[], torch.Tensor]:
    q, k, v = inputs
    if name == "sdpa-bf16":
        if q.shape[2] > 1:
            raise NotImplementedError("torch's causal rule is top-left")
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return lambda: sdpa(q, k, v, enable_gqa=True)
    fa3 = module("fa3_fwd_interface", "fa3-fwd")
    q, k, v = (x.transpose(1, 2).contiguous() for x in inputs)
    lengths = torch.full((k.shape[0],), k.shape[1], dtype=torch.int32, device=k.device)
    scales = {}
    if name in FA3_FP8:
        one = torch.ones(k.shape[0], k.shape[2], device=k.device)
        scales = {f"{x}_descale": one for x in "qkv"}  # N(0,1) fits E4M3 as it is
        q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))

    def attend() -> torch.Tensor:
        out = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True, **scales)
        out = out[0] if isinstance(out, tuple) else out
        assert isinstance(out, torch.Tensor)
        return out.transpose(1, 2)

    return attend


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """float32 attention of the first row, (1, H_q, queries, D)."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x[:1].float() for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * q.shape[3] ** -0.5
    n = q.shape[2]
    hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    scores[..., -n:].masked_fill_(hidden, -torch.inf)
    return torch.softmax(scores, -1) @ v


def _error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out[:1].float() - exact).norm() / exact.norm())
