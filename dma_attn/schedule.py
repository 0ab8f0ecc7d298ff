"""Which keys a block of queries sees, and in which precision: pure integer arithmetic.

Scores are cut into precision tiles of TILE queries x TILE keys at *absolute* positions. Query tile
`a`, key tile `b` is high precision when `|a - b| * TILE < diag` (near the diagonal) or when `b`
holds one of the row's first `sink` keys (the attention sink); every other tile is low.

    keys   lo      sink_end      diag_lo      diag_hi      hi
           | high    |    low      |   high     |   low     |

All functions are flat (`min`, `max`, `>>`, `if`), so that the same bodies run in Python and,
through `triton.jit`, in the kernels. Positions may be negative (more queries than keys): `>>`
floors in both. Method: arXiv 2604.03950, section 3.
"""

from __future__ import annotations

TILE = 128


def tile_count(tokens: int) -> int:
    """Tiles that hold so many tokens."""
    return -(-tokens // TILE)


def key_ranges(
    q_lo: int,
    q_hi: int,
    start: int,
    kv_len: int,
    window: int,
    diag: int,
    sink: int,
    causal: int,
) -> tuple[int, int, int, int, int]:
    """Key ranges of the queries at positions [q_lo, q_hi), all within one query tile.

    Args:
        start: Position of the row's first valid key (0 without left padding).
        kv_len: End of the keys.
        window: Keys that a query sees, itself included; 0 means no window.
        diag, sink: Tokens, multiples of TILE; both 0 for a single-precision call.

    Returns:
        `(lo, sink_end, diag_lo, diag_hi, hi)`, non-decreasing: [lo, sink_end) and
        [diag_lo, diag_hi) are high, [sink_end, diag_lo) and [diag_hi, hi) low. All but `hi` are
        multiples of TILE or equal to `hi`.
    """
    first = (start >> 7) << 7
    lo = first
    if window > 0:
        lo = max(lo, ((q_lo - window + 1) >> 7) << 7)
    hi = kv_len
    if causal:
        hi = min(hi, q_hi)
    hi = max(hi, lo)
    sink_end = lo
    if sink > 0:
        sink_end = min(max(lo, ((start + sink + 127) >> 7) << 7), hi)
    own = (q_lo >> 7) << 7
    diag_lo = min(max(own - diag + 128, sink_end), hi)
    diag_hi = min(max(own + diag, diag_lo), hi)
    return lo, sink_end, diag_lo, diag_hi, hi


def common_keys(q_lo: int, q_hi: int, kv_len: int, window: int, causal: int) -> tuple[int, int]:
    """Keys [lo, hi) that every query at positions [q_lo, q_hi) sees (padding masks aside)."""
    lo = 0
    hi = kv_len
    if causal:
        hi = min(hi, q_lo + 1)
    if window > 0:
        lo = max(lo, q_hi - window)
    return lo, hi


def is_high(q_tile: int, k_tile: int, start: int, diag: int, sink: int) -> bool:
    """True when the tile is high precision: the definition that `key_ranges` lays out as ranges."""
    near = abs(q_tile - k_tile) * 128 < diag
    first = sink > 0 and (start >> 7) <= k_tile <= ((start + sink - 1) >> 7)
    return near or first
