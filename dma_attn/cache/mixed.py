"""`MixedKVCache`: a KV cache whose first and newest tokens keep more bits than the others.

    tokens   0      sink            high_from        length
             | first |                  |  newest       |
    high     |#######|                  |###############|     16 bits, by default
    low      |##########################################|     4 bits, by default

Both copies of a token are made from its 16-bit values when it is appended; one that leaves the
newest tiles merely loses its high copy. The newest tokens sit in a ring, at position modulo its
size; the first tokens of a row, which may begin anywhere (left padding), in a store of their own.
`quant.store` says how a copy lies in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..config import DMAConfig
from ..device import device_guard, use_triton
from ..formats import get_format
from ..quant.launches import Recordings
from ..quant.store import Copies, Store, select_rows
from ..quant.transforms import key_mean, rotate
from ..schedule import TILE, tile_count
from .append import advance, check_new, launch, write
from .state import load, save

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class MixedKVCache:
    """A KV cache of one attention layer with high- and low-precision tokens.

    A key tile of 128 tokens is high for a query when it lies within `config.diag` of the query's
    own tile, or holds one of the row's first `config.sink` tokens, as in a call without a cache.
    K's formats are `config.high` and `config.low`, V's `v_high` and `v_low`.

    Args:
        batch, kv_heads, head_dim: Sizes of K; V has `head_dim_v` dims, by default as many.
        max_len: Tokens to allocate at first; more are allocated when they come.
        config: Formats and transforms of K, widths of the high regions. Its granularity must be
            "token", its pv is not used.
        rotate_v: Rotate V along its head dim before it is quantised.
        dtype: Of K and V, and of what "none" stores.

    Raises:
        TypeError, ValueError: sizes, dtype, formats or granularity that a cache cannot have.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        head_dim: int,
        max_len: int | None = None,
        *,
        head_dim_v: int | None = None,
        config: DMAConfig | None = None,
        v_high: str = "none",
        v_low: str = "int4",
        rotate_v: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        for name, value in (("batch", batch), ("kv_heads", kv_heads), ("head_dim", head_dim),
                            ("head_dim_v", head_dim_v)):
            _check_size(name, value, 1)
        if max_len is not None:
            _check_size("max_len", max_len, 0)
        config = DMAConfig(high="none", low="int4") if config is None else config
        if config.granularity != "token":
            raise ValueError('config: a cache needs granularity="token", '
                             f"got {config.granularity!r}")
        if dtype not in DTYPES:
            raise TypeError(f"dtype: expected one of {DTYPES}, got {dtype}")
        if not isinstance(rotate_v, bool):
            raise TypeError(f"rotate_v: expected a bool, got {rotate_v!r}")
        self.config = config
        self.v_formats = get_format(v_high, "v_high").name, get_format(v_low, "v_low").name
        self.rotate_v = rotate_v
        self.dtype = dtype
        self.device = torch.empty(0, device=device).device
        self.batch, self.kv_heads = batch, kv_heads
        self.head_dims = head_dim, head_dim_v
        self.diag = 0 if config.diag == "full" else int(config.diag)
        self.full = config.diag == "full"
        self.capacity = TILE * tile_count(max_len or 0)
        self.k = self._copies(config.high, config.low, head_dim)
        self.v = self._copies(*self.v_formats, head_dim_v)
        # Tokens, and the first of those that have high copies in the ring: what the device's
        # `lengths` and `near` hold, which kernels and graphs go by
        self.length = 0
        self.high_from = 0
        self.near = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self.starts = torch.full_like(self.lengths, -1)  # first token that counts; -1: none yet
        self.recordings = Recordings()
        self.mean: torch.Tensor | None = None
        self.valid: torch.Tensor | None = None

    # ---- what is there

    @property
    def ring(self) -> int:
        """Tokens of the ring: the tiles of `diag`, and one more, since queries may span two."""
        return self.diag + TILE if self.diag else 0

    @property
    def sink(self) -> int:
        """Tokens of the store of the first: the tiles of `sink`, which may begin within one."""
        return self.config.sink + TILE if self.config.sink and not self.full else 0

    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(x.numel() * x.element_size() for x in self.owned() if x is not None)

    def owned(self) -> tuple[torch.Tensor | None, ...]:
        """All tensors of the cache."""
        parts = (x for s in (*self.k.stores, *self.v.stores) for x in s.parts)
        return (self.lengths, self.near, self.starts, self.mean, self.valid, *parts)

    def sync_length(self) -> int:
        """Read the length back from the device, as after a CUDA graph's replay; waits for it.

        Raises:
            RuntimeError: replays brought more tokens than are allocated; those are lost.
        """
        length, high_from = torch.cat((self.lengths[:1], self.near)).tolist()
        if length > self.capacity:
            raise RuntimeError(f"max_len: expected at most the {self.capacity} tokens that are "
                               f"allocated, replays came to {length}")
        self.length, self.high_from = length, high_from
        return length

    # ---- changes

    def append(
        self, k: torch.Tensor, v: torch.Tensor, *, key_padding_mask: torch.Tensor | None = None,
        impl: str = "auto",
    ) -> None:
        """Add tokens at the end of all rows.

        Args:
            k, v: (B, H, S, D) and (B, H, S, D_v) in the cache's dtype, any strides.
            key_padding_mask: bool (B, S), True = a token that counts; None: all do. The first call
                with tokens fixes K's mean, over those of its tokens that count.
            impl: "reference" (PyTorch), "triton" or "auto" (Triton on a GPU, PyTorch on a CPU);
                they write the same bits.

        Raises:
            TypeError, ValueError: other shapes, dtypes or devices.
            RuntimeError: while a CUDA graph is captured, room must be allocated, or K's mean or a
                first mask kept, which each replay would do again.
        """
        check_new(self, k, v, key_padding_mask)
        triton = use_triton(self.device, impl)
        n = k.shape[2]
        if n == 0:
            return
        first = (self.config.smooth_k and self.mean is None) or (
            key_padding_mask is not None and self.valid is None)
        if first and self._capturing():
            raise RuntimeError("k, v: the first tokens, and the first mask, cannot be appended "
                               "while a CUDA graph is captured")
        with torch.no_grad(), device_guard(self.device):
            self._allocate(self.length + n)
            if key_padding_mask is not None and self.valid is None:
                self.valid = torch.zeros(self.batch, self.capacity, dtype=torch.bool,
                                         device=self.device)
                self.valid[:, : self.length] = True
            if self.config.smooth_k and self.mean is None:
                self.mean = key_mean(k, key_padding_mask)
            if triton:
                self.recordings.call(
                    lambda: launch(self, k, v, key_padding_mask),
                    ("append", self.config, self.rotate_v), self.owned(),
                    (k, v, key_padding_mask), self.device,
                )
            else:
                advance(self, n, key_padding_mask)
                write(self, self.k, k, self.config.rotate, self.mean)
                write(self, self.v, v, self.rotate_v, None)
            self.length += n
            self.high_from = max(self.high_from, ((self.length - 1) >> 7 << 7) - self.diag)

    def crop(self, n: int) -> None:
        """Keep the first n tokens. Those that have only a low copy keep it, also where their tile
        is high again.

        Raises:
            ValueError: n is negative or beyond the length.
        """
        _check_size("n", n, 0)
        if n > self.length:
            raise ValueError(f"n: expected at most the length {self.length}, got {n}")
        self.length = n
        self.lengths.fill_(n)
        self.high_from = min(self.high_from, n)
        self.near.fill_(self.high_from)
        self.starts.masked_fill_(self.starts >= n, -1)

    def reorder(self, index: torch.Tensor | Sequence[int]) -> None:
        """Row i becomes what row index[i] was; the batch may shrink or grow.

        Raises:
            ValueError: an index that is not 1-D or names no row.
        """
        index = torch.as_tensor(index, dtype=torch.int64)
        if index.dim() != 1 or index.numel() == 0:
            raise ValueError(f"index: expected rows (n,), got shape {tuple(index.shape)}")
        if index.device.type == "cpu" and (index.min() < 0 or index.max() >= self.batch):
            raise ValueError(f"index: expected rows of 0..{self.batch - 1}, got {index.tolist()}")
        index = index.to(self.device)
        for store in (*self.k.stores, *self.v.stores):
            store.reorder(index)
        for name in ("lengths", "starts", "mean", "valid"):
            x = getattr(self, name)
            if x is not None:
                setattr(self, name, select_rows(x, index))
        self.batch = index.numel()
        self.recordings.clear()

    def reset(self) -> None:
        """Forget all tokens and K's mean; what is allocated stays."""
        self.length = self.high_from = 0
        self.lengths.zero_()
        self.near.zero_()
        self.starts.fill_(-1)
        self.mean = self.valid = None
        self.recordings.clear()

    # ---- copies

    def clone(self) -> MixedKVCache:
        """An independent copy."""
        return self.from_state_dict(
            {name: x.clone() for name, x in self.state_dict().items()}, self.capacity
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors only (safetensors-ready), of the tokens there are; options as JSON's bytes."""
        return save(self)

    @classmethod
    def from_state_dict(
        cls, state: Mapping[str, torch.Tensor], max_len: int | None = None
    ) -> MixedKVCache:
        """The way back from `state_dict()`, on the device of its tensors.

        Raises:
            ValueError: a key is missing.
        """
        return load(cls, state, max_len)

    def dequantize(
        self, *, query_position: int | None = None, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens of K and V as a query at a position (default: the newest token's) sees them.

        Returns:
            k (B, H, length, D), v (B, H, length, D_v), neither smoothed nor rotated, in `dtype`
            (default: the cache's), rounded once; 0 where a token does not count.
        """
        position = self.length - 1 if query_position is None else query_position
        return self._dequantised(position, dtype)

    def best(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`dequantize()` with each token in the best copy there is."""
        return self._dequantised(None, None)

    # ---- within

    def _dequantised(
        self, position: int | None, dtype: torch.dtype | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k = self._values(self.k, position, self.config.rotate, self.mean)
        v = self._values(self.v, position, self.rotate_v, None)
        if self.valid is not None:
            counts = self.valid[:, None, : self.length, None]
            k, v = torch.where(counts, k, 0.0), torch.where(counts, v, 0.0)
        dtype = self.dtype if dtype is None else dtype
        return k.to(dtype), v.to(dtype)

    def _copies(self, high: str, low: str, head_dim: int) -> Copies:
        one = self.full or high == low or not (self.ring or self.sink)
        every = high if self.full else low
        for name in {high, low}:
            if get_format(name).bits == 4 and head_dim % 2:
                raise ValueError(f"{name} packs two codes a byte and needs an even head dim, "
                                 f"got {head_dim}")

        def store(name: str, tokens: int) -> Store:
            return Store(get_format(name), self.batch, self.kv_heads, tokens, head_dim, self.dtype,
                         self.device)

        return Copies(
            store(every, self.capacity),
            None if one or not self.ring else store(high, self.ring),
            # One token more, where what does not belong there goes
            None if one or not self.sink else store(high, self.sink + 1),
        )

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _allocate(self, tokens: int) -> None:
        if tokens <= self.capacity:
            return
        if self._capturing():
            raise RuntimeError(f"max_len: {tokens} tokens need more than the {self.capacity} that "
                               "are allocated, which a CUDA graph's capture forbids")
        self.capacity = TILE * tile_count(max(tokens, 2 * self.capacity))
        self.k.low.grow(self.capacity)
        self.v.low.grow(self.capacity)
        self.recordings.clear()
        if self.valid is not None:
            self.valid = torch.nn.functional.pad(
                self.valid, (0, self.capacity - self.valid.shape[1])
            )

    def among_first(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Index in the store of the first tokens, (B, n), and whether a position belongs there."""
        starts = self.starts[:, None].long()
        begin = (starts >> 7) << 7
        end = ((starts + self.config.sink + TILE - 1) >> 7) << 7
        inside = (starts >= 0) & (positions >= begin) & (positions < end)
        return positions - begin, inside

    def _values(
        self, copies: Copies, position: int | None, rotated: bool, mean: torch.Tensor | None
    ) -> torch.Tensor:
        """float32 values of all tokens, each in its class for a query at `position`; None: in the
        best copy there is."""

        def original(store: Store, at: slice | torch.Tensor) -> torch.Tensor:
            x = store.values(at)
            if not store.format.quantised:
                return x
            x = rotate(x) if rotated else x
            return x if mean is None else x + mean

        out = original(copies.low, slice(0, self.length))
        positions = torch.arange(self.length, device=self.device)
        if copies.newest is not None:
            near = positions[self.high_from :]
            if position is not None:
                own = position >> 7 << 7
                lo = max(own - self.diag + TILE, self.high_from)
                near = positions[lo : max(own + self.diag, 0)]
            out[:, :, near] = original(copies.newest, near % self.ring)
        if copies.first is not None and self.length:
            index, inside = self.among_first(positions)
            first = original(copies.first, slice(0, self.sink))
            at = index.clamp(0, self.sink - 1)[:, None, :, None].expand(out.shape)
            out = torch.where(inside[:, None, :, None], first.gather(2, at), out)
        return out


def _check_size(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: expected an int >= {least}, got {value!r}")
