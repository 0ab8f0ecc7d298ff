"""What a first call costs: seconds until its result, and how many kernels are compiled for it.

Each configuration runs in a process of its own with an empty Triton cache: one causal call, then
calls of other lengths, with the full mask and with the LSE, which share most of the kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import dma_attention
from ..attention.dispatch import use_native
from ..config import DMAConfig

CONFIGS = ("default", "default,pv=fp8", "hopper")
LENGTHS = (1000, 1024, 1337)
MOST_SECONDS = 60.0
MOST_KERNELS = 12


@dataclass(frozen=True)
class CompileRow:
    """One configuration and head dim: seconds of the first call, kernels that it and all calls of
    the process compiled."""

    head_dim: int
    config: str
    seconds: float
    first_kernels: int
    kernels: int

    @property
    def holds(self) -> bool:
        """True within `MOST_SECONDS` and `MOST_KERNELS`."""
        return self.seconds <= MOST_SECONDS and self.kernels <= MOST_KERNELS


def measure_compile(head_dims: Sequence[int], configs: Sequence[str]) -> Iterator[CompileRow]:
    """One row after the other, each from a new process.

    Raises:
        RuntimeError: a process failed; the message is its last line.
    """
    for head_dim in head_dims:
        for text in configs:
            with tempfile.TemporaryDirectory() as cache:
                done = subprocess.run(
                    [sys.executable, "-m", __name__, str(head_dim), text],
                    env={**os.environ, "TRITON_CACHE_DIR": cache},
                    capture_output=True,
                    text=True,
                    check=False,
                )
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no output"])[-1]
                raise RuntimeError(f"{text}, head dim {head_dim}: {last}")
            yield CompileRow(head_dim, text, **json.loads(done.stdout))


def first_calls(head_dim: int, text: str, device: str = "cuda") -> dict[str, float]:
    """The fields of `CompileRow` that are measured, from this process's calls."""
    config = DMAConfig.parse(text)

    def call(length: int, causal: bool, want_lse: bool) -> None:
        q = torch.randn(1, 8, length, head_dim, device=device, dtype=torch.bfloat16)
        k, v = q[:, :2], q[:, 2:4]
        with use_native():
            dma_attention(q, k, v, is_causal=causal, config=config, return_lse=want_lse)
        if q.is_cuda:
            torch.cuda.synchronize()

    torch.zeros(1, device=device)
    begin = time.perf_counter()
    call(LENGTHS[0], True, False)
    seconds = time.perf_counter() - begin
    first = _compiled()
    for length in LENGTHS:
        for causal in (True, False):
            for want_lse in (False, True):
                call(length, causal, want_lse)
    return {"seconds": seconds, "first_kernels": first, "kernels": _compiled()}


def _compiled() -> int:
    """Kernels in this process's Triton cache."""
    return len(list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")))


if __name__ == "__main__":
    print(json.dumps(first_calls(int(sys.argv[1]), sys.argv[2])))
