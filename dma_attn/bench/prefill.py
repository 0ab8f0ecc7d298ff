"""Prefill: this library's attention against its peers, speed and error on the same inputs.

"kernel" is the attention launch alone, from prepared K and V and quantised Q, replayed from a CUDA
graph; peers are replayed alike. "end-to-end" is the whole call from 16-bit inputs, replayed too;
what the host needs to enqueue an eager call is a column of its own.
What is timed has agreed with the fp64 oracle on its last queries first, a peer loosely with exact
attention. TF/s counts 4 * B * H * S * S * D FLOP, half of it for causal attention. `CLAIMS` says
what is aimed at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from .. import dma_attention, prepare_kv
from ..attention.api import check_call
from ..attention.dispatch import hopper_gap, use_native
from ..attention.prepare import folded_queries
from ..config import DMAConfig
from ..quant.rows import Rows
from ..testing import dense_oracle, error_budget, quantised_oracle
from .peers import PEERS, find_peers, result
from .timing import Candidate, Timing, time_candidates

KERNEL, END_TO_END = "kernel", "end-to-end"
ERROR = "error"
BF16 = ("cudnn-bf16", "fa3-bf16")
FA3_FP8 = ("fa3-fp8 (given FP8)",)
SAMPLED_QUERIES = 256
PEER_BOUND = 0.2


@dataclass(frozen=True)
class Workload:
    """Shapes of one self-attention call."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    causal: bool

    @property
    def flop(self) -> float:
        """Floating-point operations of both products."""
        total = 4.0 * self.batch * self.heads * self.length**2 * self.head_dim
        return total / 2 if self.causal else total

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        return (f"B{self.batch} H{self.heads}/{self.kv_heads} S{self.length} D{self.head_dim} "
                f"{kind}")

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Read what `str` gives, for example "B1 H32/8 S8192 D128 causal".

        Raises:
            ValueError: it is nothing of the kind.
        """
        match = re.fullmatch(r"B(\d+) H(\d+)/(\d+) S(\d+) D(\d+) (causal|full)", text)
        if match is None:
            raise ValueError(f"expected a workload like B1 H32/8 S8192 D128 causal, got {text!r}")
        batch, heads, kv_heads, length, head_dim = map(int, match.groups()[:5])
        return cls(batch, heads, kv_heads, length, head_dim, match[6] == "causal")


@dataclass(frozen=True)
class Row:
    """One measured candidate; `error` is rel-L2 against fp64 attention on the sampled queries."""

    workload: Workload
    candidate: str
    kind: str
    timing: Timing
    error: float

    @property
    def tflops(self) -> float:
        """Effective TFLOP/s."""
        return self.workload.flop / self.timing.ms / 1e9


@dataclass(frozen=True)
class Claim:
    """`candidate` is at least `must` times as fast as the fastest of `against` (all needed).

    Of kind `ERROR`: the smallest error of `against` is at least `must` times the candidate's, both
    those of the kernel.
    """

    candidate: str
    kind: str
    against: tuple[str, ...]
    must: float
    target: float
    head_dim: int = 128
    causal: bool | None = None
    shortest: int = 8192

    def applies(self, workload: Workload) -> bool:
        """True when the claim is about this workload."""
        return (
            workload.head_dim == self.head_dim
            and self.causal in (None, workload.causal)
            and workload.length >= self.shortest
        )


@dataclass(frozen=True)
class Verdict:
    """A claim on one workload: the ratio reached, None when something it needs was not measured."""

    workload: Workload
    claim: Claim
    ratio: float | None

    @property
    def holds(self) -> bool:
        """True when the must is reached."""
        return self.ratio is not None and self.ratio >= self.claim.must


FP8 = "default,pv=fp8"
EXACT_HIGH = "default,high=none,pv=fp8"
CLAIMS = (
    Claim("default", KERNEL, BF16, 1.05, 1.25),
    Claim(FP8, KERNEL, BF16, 1.25, 1.45),
    Claim(FP8, KERNEL, FA3_FP8, 0.92, 1.0),
    Claim("hopper", KERNEL, BF16, 1.20, 1.40, causal=True),
    Claim("hopper", KERNEL, FA3_FP8, 0.88, 1.0, causal=True),
    Claim(FP8, KERNEL, ("fa3-bf16",), 1.10, 1.25, head_dim=64, causal=True),
    Claim(FP8, KERNEL, FA3_FP8, 0.92, 1.0, head_dim=64, causal=True),
    Claim(FP8, END_TO_END, BF16, 1.10, 1.30),
    Claim(FP8, KERNEL, ("mxfp8,pv=fp8", "nvfp4,pv=fp8"), 1 / 1.05, 1 / 1.02, causal=True),
    Claim(EXACT_HIGH, KERNEL, ("mxfp8,pv=fp8",), 1 / 1.10, 1 / 1.05, causal=True, shortest=16384),
    Claim("hopper", ERROR, FA3_FP8, 1 / 0.78, 1 / 0.7, causal=True),
)
CONFIGS = ("default", FP8, "hopper", "mxfp8,pv=fp8", "nvfp4,pv=fp8", EXACT_HIGH)


class GateError(RuntimeError):
    """A candidate's result is off; the message says by how much."""


def measure(
    workload: Workload,
    configs: Sequence[str] = CONFIGS,
    peers: Sequence[str] = tuple(PEERS),
    rounds: int = 5,
    seconds: float = 0.1,
    notify: Callable[[str], None] = print,
) -> list[Row]:
    """Time every configuration and peer on one workload (on the current CUDA device).

    Raises:
        GateError: a configuration's result does not agree with the oracle.
    """
    inputs = _inputs(workload)
    exact = _exact(inputs, workload.causal)
    calls, missing = find_peers(inputs, workload.causal, tuple(peers))
    for name, reason in missing.items():
        notify(f"{workload}: {name} is missing: {reason}")
    candidates: dict[tuple[str, str], Callable[[], torch.Tensor]] = {}
    errors: dict[tuple[str, str], float] = {}
    for name, call in calls.items():
        error = _error(_last(result(call), workload), exact)
        if not error <= PEER_BOUND:
            raise GateError(f"{workload}, {name}: rel-L2 {error:.2e}, bound {PEER_BOUND}")
        for kind in (KERNEL,) if PEERS[name].given_codes else (KERNEL, END_TO_END):
            candidates[name, kind], errors[name, kind] = call, error
    for text in configs:
        for kind, call in _candidates(inputs, workload, DMAConfig.parse(text)):
            out = _last(call(), workload)
            _gate(out, inputs, workload, text)
            candidates[text, kind], errors[text, kind] = call, _error(out, exact)
    timings = time_candidates(
        [Candidate(f"{name}|{kind}", [call]) for (name, kind), call in candidates.items()],
        rounds,
        seconds,
    )
    return [
        Row(workload, name, kind, timings[f"{name}|{kind}"], errors[name, kind])
        for name, kind in candidates
    ]


def judge(rows: Sequence[Row], claims: Sequence[Claim] = CLAIMS) -> list[Verdict]:
    """Every claim on every workload that was measured and that it is about."""
    verdicts = []
    for workload in dict.fromkeys(row.workload for row in rows):
        here = [row for row in rows if row.workload == workload]
        values = {(r.candidate, r.kind): r.timing.ms for r in here}
        values |= {(r.candidate, ERROR): r.error for r in here if r.kind == KERNEL}
        for claim in claims:
            if claim.applies(workload):
                ours = values.get((claim.candidate, claim.kind))
                others = [values.get((name, claim.kind)) for name in claim.against]
                known = [value for value in others if value is not None]
                complete = ours is not None and len(known) == len(others)
                ratio = min(known) / ours if complete and ours is not None else None
                verdicts.append(Verdict(workload, claim, ratio))
    return verdicts


def _inputs(workload: Workload) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """N(0,1) bf16 q, k, v (B, H, S, D): zeros and patterns would draw less power."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(heads: int) -> torch.Tensor:
        shape = (workload.batch, heads, workload.length, workload.head_dim)
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    return normal(workload.heads), normal(workload.kv_heads), normal(workload.kv_heads)


def _candidates(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], workload: Workload, config: DMAConfig
) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """This library's calls: end-to-end, and on the Hopper kernel the launch alone."""
    q, k, v = inputs
    out = torch.empty_like(q)

    def whole() -> torch.Tensor:
        with use_native():
            dma_attention(q, k, v, is_causal=workload.causal, config=config, out=out)
        return out

    yield END_TO_END, whole
    with use_native():
        if hopper_gap(k, v, config, Rows(k.shape[0], k.shape[2]), masked=False):
            return
        from ..attention.kernels import hopper_call

        prepared = prepare_kv(k, v, config)
        call = check_call(q, prepared.shape, workload.causal, None, None, False)
        queries = folded_queries(q, prepared, call.scale, want_shift=False)
        alone = torch.empty_like(q)

    def launch() -> torch.Tensor:
        hopper_call.run(queries, prepared, call, alone, None)
        return alone

    yield KERNEL, launch


def _last(out: torch.Tensor, workload: Workload) -> torch.Tensor:
    """The sampled part of an output: the last queries of the heads that share the first KV head."""
    group = workload.heads // workload.kv_heads
    return out[:1, :group, -SAMPLED_QUERIES:].double()


def _sample(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = inputs
    group = q.shape[1] // k.shape[1]
    return q[:1, :group, -SAMPLED_QUERIES:], k[:1, :1], v[:1, :1]


def _exact(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], causal: bool
) -> torch.Tensor:
    return dense_oracle(*_sample(inputs), is_causal=causal)[0]


def _error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out - exact).norm() / exact.norm())


def _gate(
    out: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    workload: Workload,
    text: str,
) -> None:
    """No time is taken of a wrong result."""
    config = DMAConfig.parse(text)
    with use_native():
        rows = Rows(workload.batch, workload.length)
        folded = not hopper_gap(inputs[1], inputs[2], config, rows, masked=False)
    ref, _ = quantised_oracle(*_sample(inputs), config, folded=folded, is_causal=workload.causal)
    error, bound = _error(out, ref), error_budget(config, out.numel()).rel_l2
    if not error <= bound:
        raise GateError(f"{workload}, {text}: rel-L2 {error:.2e} against the oracle, bound {bound}")
