"""The mask function for transformers, and how the attention function reads its masks.

transformers calls `dma_mask` once a forward pass (again for windowed layers) and hands its result
to every layer. It states which keys may be seen in the smallest form that says it:

| mask | meaning |
|---|---|
| None | every key slot holds data, nothing is padded |
| (B, S_kv) bool | True where a key is written and not padded; causality and window come on top |
| (B, 1, S) int32 | packed sequences: the number of the sequence that a token belongs to |
| (B, 1 or H, S_q, S_kv) bool or float | the whole visibility: custom masks, chunks, image blocks |

A prompt's mask without any padding, which `generate` always makes, is marked (`is_full`): the
attention function then needs no mask, and all kernels serve the call. That is read on the host,
once a forward pass, as transformers' own masks do. Nothing else is, so that CUDA graphs, which pass
such a mask on as it is, single queries and static caches never wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

T = TypeVar("T")
MaskFunction = Callable[..., Any]


def dma_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Which keys may be seen, in one of the forms listed above (transformers' mask interface).

    attention_mask is bool (B, tokens so far), False for padding, or None. Key slot j holds the
    token kv_offset + j and the first query is token q_offset; a static cache has unwritten slots
    from q_offset + q_length - kv_offset on. Visibility other than plain causal, windowed, packed or
    bidirectional becomes a dense bool mask, made by transformers itself.

    Raises:
        ValueError: attention_mask is not 2-d (4-d masks go past this function).
    """
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask: expected 2 or 4 dimensions, got {tuple(attention_mask.shape)}"
        )
    rules = _Rules.read(mask_function)
    may_skip = kwargs.get("allow_is_causal_skip" if rules.causal else "allow_is_bidirectional_skip")
    must_be_dense = may_skip is False and q_length > 1 and rules.segments is None
    if not rules.plain or must_be_dense:
        return masking_utils.sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=kwargs.get("use_vmap", False),
            device=device,
        )
    if rules.segments is not None:
        return rules.segments.to(torch.int32)[:, None].expand(batch_size, 1, -1)

    visible, full = None, False
    if attention_mask is not None:
        # generate() hands in masks that this function made before, already cut to the slots: cut
        # from the right then, which gives the same for a mask that starts at token 0
        first = max(attention_mask.shape[-1] - kv_length, 0) if kv_offset else 0
        slots = attention_mask[:, first : first + kv_length].to(torch.bool)
        missing = kv_length - slots.shape[-1]
        visible = nn.functional.pad(slots, (0, missing)).expand(batch_size, -1)
        prompt = q_length > 1 and not isinstance(q_offset, Tensor) and not missing
        full = prompt and not is_traced(slots) and bool(slots.all())
    if not rules.causal or kv_length == q_length:
        return _mark_full(visible) if full and visible is not None else visible
    end = q_offset + q_length - kv_offset
    if visible is None and not isinstance(end, Tensor) and end >= kv_length:
        return None
    index = torch.arange(kv_length, device=device)
    written = (index < end).expand(batch_size, -1)
    if visible is None:
        return written
    # the newest key marks where the queries end; were it padding, only its own query could see it
    marked = (visible & written) | (index == end - 1)
    if not is_traced(marked):
        marked._dma_unmarked = visible  # type: ignore[attr-defined]  # our own, for `new_keys`
    return _mark_full(marked) if full and end >= kv_length else marked


def _mark_full(mask: Tensor) -> Tensor:
    mask._dma_full = True  # type: ignore[attr-defined]  # our own, for `is_full`
    return mask


def is_full(mask: Tensor | None) -> bool:
    """True of a mask of `dma_mask` that hides nothing: attention is the same without it. It still
    says that the user gave a mask, so that nobody looks for packed sequences."""
    return getattr(mask, "_dma_full", False) is True


def key_mask(mask: Tensor, batch: int, keys: int) -> Tensor:
    """A 2-d mask as bool (batch, keys), True = visible; ValueError or TypeError if it is none."""
    if mask.ndim != 2 or mask.shape[1] != keys or mask.shape[0] not in (1, batch):
        raise ValueError(
            f"attention_mask: expected ({batch}, {keys}), or 4 dimensions, got {tuple(mask.shape)}"
        )
    if mask.is_floating_point():
        raise TypeError(f"attention_mask: expected bool or integers in 2-d, got {mask.dtype}")
    return mask.to(torch.bool).expand(batch, keys)


def new_keys(mask: Tensor, batch: int, keys: int, new: int) -> Tensor:
    """Which of the newest `new` keys of a 2-d mask count, bool (batch, new).

    A cache keeps that for later queries, so the mark that `dma_mask` sets at the end is left out.
    In memory of its own, so that steps differ in nothing that chooses a kernel.
    """
    seen = key_mask(getattr(mask, "_dma_unmarked", mask), batch, keys)
    return seen[:, keys - new :].clone(memory_format=torch.contiguous_format)


def last_key(mask: Tensor) -> Tensor:
    """Last visible key of the batch + 1: (B, S_kv) bool -> int32 (B,), computed on the device.

    One value for all rows: a cache is filled to the same slot in every row, and a row that ends
    with padding must not pull its queries to the left.
    """
    counts = torch.arange(1, mask.shape[1] + 1, device=mask.device, dtype=torch.int32)
    return (mask * counts).amax().expand(mask.shape[0]).contiguous()


def once_a_pass(
    tensor: Tensor, module: nn.Module, what: Hashable, compute: Callable[[], T]
) -> T:
    """`compute()`, a function of `tensor` and `what`, shared by the layers of one forward pass.

    The result is kept on the tensor until a module asks for the second time: then it is another
    pass, and the tensor may have changed in place.
    """
    if is_traced(tensor):
        return compute()
    kept: dict[Hashable, tuple[set[int], T]] = getattr(tensor, "_dma_kept", {})
    tensor._dma_kept = kept  # type: ignore[attr-defined]  # our own mark on this tensor
    found = kept.get(what)
    if found is None or id(module) in found[0]:
        found = kept[what] = (set(), compute())
    found[0].add(id(module))
    return found[1]


def is_traced(tensor: Tensor) -> bool:
    """True under torch.compile and CUDA graph capture and of tensors that hold no data: nothing may
    be read on the host."""
    if torch.compiler.is_compiling() or tensor.is_meta:
        return True
    return bool(is_tracing(tensor))


class _Rules(NamedTuple):
    """What a mask function asks for; `plain` is False where that cannot be told."""

    plain: bool
    causal: bool
    segments: Tensor | None

    @classmethod
    def read(cls, mask_function: MaskFunction) -> _Rules:
        codes = {}
        for part in _parts(mask_function):
            codes[getattr(part, "__code__", None)] = part
        causal = _CAUSAL in codes
        plain = set(codes) <= ({_CAUSAL, _WINDOW, _PACKED} if causal else {_BIDIRECTIONAL})
        packed = plain and _PACKED in codes
        return cls(plain, causal, _captured(codes[_PACKED], Tensor) if packed else None)


def _parts(mask_function: MaskFunction) -> Iterator[MaskFunction]:
    """The conditions that a mask function joins by "and"."""
    code = getattr(mask_function, "__code__", None)
    if code is _AND:
        for part in _captured(mask_function, tuple):
            yield from _parts(part)
    elif code is not None and code is _REMAPPED:  # counts positions from each sequence's start
        yield from _parts(_captured(mask_function, FunctionType))
    else:
        yield mask_function


def _captured(function: MaskFunction, kind: type[T]) -> T:
    """The one value of type `kind` that a closure holds."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    (value,) = (content for content in cells if isinstance(content, kind))
    return value


def _code(function: MaskFunction) -> CodeType:
    """The code that all closures of one maker share: it tells who made a mask function."""
    return function.__code__


_CAUSAL = _code(masking_utils.causal_mask_function)
_BIDIRECTIONAL = _code(masking_utils.bidirectional_mask_function)
_WINDOW = _code(masking_utils.sliding_window_overlay(1))
_PACKED = _code(masking_utils.packed_sequence_mask_function(torch.zeros(0)))
_AND = _code(masking_utils.and_masks(masking_utils.causal_mask_function))
_remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)  # not in 5.17
_REMAPPED = _code(_remap(masking_utils.causal_mask_function, torch.zeros(0))) if _remap else None
