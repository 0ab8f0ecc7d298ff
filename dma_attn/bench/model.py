"""A cost model of the attention kernels: cycles of an SM for one tile of 128 queries x 128 keys.

    cycles = Q K^T + P V + exp2 + rest          one after the other: FP8 P V on Hopper
    cycles = max(Q K^T + P V, exp2 + rest)      products under the softmax: 16-bit P V there
    cycles = max(Q K^T + P V, exp2)             all overlapped: no kernel can do better

Products are FLOP over the rate of their formats, exp2 is 16 a cycle, `rest` (maxima, sums, masks,
synchronisation) is fitted to a GPU's measured times. On Hopper bf16 P V keeps the first tile's
maxima: its products wait for no rescaling, and pass under the other warpgroup's exponentials.
`bytes` are what a tile reads through the L2. Rates are the vendors' dense ones (NVIDIA H100,
Blackwell architecture and RTX Blackwell whitepapers), divided by SMs and boost clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from ..config import DMAConfig
from ..formats import get_format
from ..schedule import TILE
from .prefill import Workload


@dataclass(frozen=True)
class Gpu:
    """What the model needs to know of a GPU.

    Attributes:
        sms, mhz: Streaming multiprocessors, boost clock.
        rates: FLOP per cycle and SM of products with operands of 16, 8 and 4 bits.
        exp2: exp2 per cycle and SM.
    """

    name: str
    sms: int
    mhz: float
    rates: dict[int, float]
    exp2: float = 16.0


H200 = Gpu("H200", 132, 1755, {16: 4096, 8: 8192})
B200 = Gpu("B200", 148, 1850, {16: 8192, 8: 16384, 4: 32768})
RTX5090 = Gpu("RTX 5090", 170, 2407, {16: 512, 8: 1024, 4: 4096})
FITTED = (8192, 16384)  # tokens, D 128, causal


@dataclass(frozen=True)
class Tile:
    """A tile: cycles of its parts, and bytes of K and V that it reads."""

    scores: float
    values: float
    exp2: float
    bytes: int

    def cycles(self, rest: float | None, under: bool = False) -> float:
        """One part after the other and `rest`, or products under the others; None: overlapped."""
        products = self.scores + self.values
        if rest is None or under:
            return max(products, self.exp2 + (rest or 0.0))
        return products + self.exp2 + rest


def tile(gpu: Gpu, config: DMAConfig, high: bool, head_dim: int) -> Tile:
    """A high or a low tile. Operands of fewer bits than the GPU multiplies take those it does."""
    fmt = get_format(config.high if high else config.low)
    bits = min(b for b in gpu.rates if b >= (fmt.bits if fmt.quantised else 16))
    values = 8 if config.pv == "fp8" else 16
    flop = 2 * TILE * TILE * head_dim
    stored = fmt.row_bytes(head_dim) + fmt.n_blocks(head_dim) if fmt.block else (
        head_dim * (1 if fmt.quantised else 2))
    return Tile(flop / gpu.rates[bits], flop / gpu.rates[values], TILE * TILE / gpu.exp2,
                TILE * (stored + head_dim * values // 8))


def tiles(batch: int, heads: int, tokens: int, causal: bool) -> float:
    """Tiles of a call, all heads."""
    n = tokens / TILE
    return batch * heads * (n * (n + 1) / 2 if causal else n * n)


def milliseconds(
    gpu: Gpu, config: DMAConfig, head_dim: int, number: float, share: float, rest: float | None
) -> float:
    """Time of `number` tiles, `share` (0 to 1) of them high."""
    low, high = (tile(gpu, config, h, head_dim).cycles(rest) for h in (False, True))
    return number * (share * high + (1 - share) * low) / gpu.sms / gpu.mhz / 1e3


@dataclass(frozen=True)
class Prediction:
    """A measured row beside the model's: cycles of a tile, at the row's clock; `fitted` if the row
    was used for `rest`."""

    workload: str
    config: str
    ms: float
    measured: float
    modelled: float
    fitted: bool

    @property
    def error(self) -> float:
        """Of the model, in percent."""
        return 100 * (self.modelled / self.measured - 1)


def calibrate(
    rows: Iterable[tuple[Workload, str, float, float]], config: str, gpu: Gpu = H200
) -> tuple[float, list[Prediction]]:
    """Fit `rest` to a configuration's kernel times at 8k and 16k (D 128, causal), predict all.

    Args:
        rows: Workload, configuration, ms and MHz of its kernel in `dma-attn bench prefill`.

    Raises:
        ValueError: the rows to be fitted are missing.
    """
    parsed = DMAConfig.parse(config)
    under = parsed.pv != "fp8"
    found = []
    for work, name, ms, mhz in rows:
        if name != config:
            continue
        number = tiles(work.batch, work.heads, work.length, work.causal)
        cycles = ms * mhz * 1e3 * gpu.sms / number
        used = work.length in FITTED and work.head_dim == 128 and work.causal
        found.append((str(work), ms, cycles, tile(gpu, parsed, False, work.head_dim), used))
    if sum(used for *_, used in found) < len(FITTED):
        raise ValueError(f"expected kernel times of {config} at {FITTED} tokens, got none")
    rest = fmean(cycles - part.exp2 - (0.0 if under else part.scores + part.values)
                 for _, _, cycles, part, used in found if used)
    return rest, [Prediction(workload, config, ms, cycles, part.cycles(rest, under), used)
                  for workload, ms, cycles, part, used in found]


def over_shares(
    gpu: Gpu, configs: Sequence[str], rest: float, tokens: int = 8192, heads: int = 32
) -> list[list[str]]:
    """Lines (GPU, configuration, kind, ms at 0, 25, ... 100 % of high tiles) of a causal call."""
    number = tiles(1, heads, tokens, True)
    lines = []
    for text in configs:
        config = DMAConfig.parse(text)
        for kind, extra in (("in turn", rest), ("overlapped", None)):
            times = (milliseconds(gpu, config, 128, number, share / 100, extra)
                     for share in (0, 25, 50, 75, 100))
            lines.append([gpu.name, text, kind, *(f"{ms:.3f}" for ms in times)])
    return lines
