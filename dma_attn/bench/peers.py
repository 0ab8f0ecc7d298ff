"""What a user would pick instead: attention implementations found at run time.

A peer that is not installed or refuses the workload is reported with the reason, never left out in
silence. FP8 peers are given their inputs already quantised, which is stated in their name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Call = Callable[[], torch.Tensor]


class PeerMissing(RuntimeError):
    """A peer cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Peer:
    """A named implementation; `make(inputs, causal)` gives a call that returns (B, H, S, D).

    given_codes: It is given its inputs quantised, so its call is not end-to-end.
    """

    name: str
    make: Callable[[Inputs, bool], Call]
    given_codes: bool = False


def _module(name: str, package: str) -> object:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken extension module raises anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise PeerMissing(f"{package} does not import ({reason})") from error


def _sdpa(backend: str) -> Callable[[Inputs, bool], Call]:
    def make(inputs: Inputs, causal: bool) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
                )

        try:
            attend(*inputs)
        except RuntimeError:  # no grouped queries in this backend
            inputs = _repeated(inputs)
        return lambda: attend(*inputs)

    return make


def _repeated(inputs: Inputs) -> Inputs:
    """For a peer without grouped queries: K and V repeated beforehand, not timed."""
    q, k, v = inputs
    group = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def _fa3(inputs: Inputs, causal: bool) -> Call:
    module = _module("fa3_fwd_interface", "fa3-fwd")
    q, k, v = (x.transpose(1, 2).contiguous() for x in inputs)
    return lambda: _first(module.flash_attn_func(q, k, v, causal=causal))  # type: ignore[attr-defined]


def _fa3_fp8(inputs: Inputs, causal: bool) -> Call:
    """Per-head scales from the largest value, the most that FA3's interface takes."""
    module = _module("fa3_fwd_interface", "fa3-fwd")
    q, k, v = (x.transpose(1, 2).contiguous() for x in inputs)
    batch, kv_heads = k.shape[0], k.shape[2]
    codes, scales = [], []
    for x in (q, k, v):
        grouped = x.float().unflatten(2, (kv_heads, -1))
        scale = grouped.abs().amax((1, 3, 4)) / 448
        per_head = scale.repeat_interleave(x.shape[2] // kv_heads, 1)[:, None, :, None]
        codes.append((x.float() / per_head).to(torch.float8_e4m3fn))
        scales.append(scale.reshape(batch, kv_heads))
    arguments = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    return lambda: _first(module.flash_attn_func(*codes, causal=causal, **arguments))  # type: ignore[attr-defined]


def _sage(inputs: Inputs, causal: bool) -> Call:
    module = _module("sageattention", "sageattention")
    q, k, v = (x.half() for x in _repeated(inputs))
    return lambda: module.sageattn(q, k, v, is_causal=causal)  # type: ignore[attr-defined]


def _flex(inputs: Inputs, causal: bool) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = inputs
    mask = None
    if causal:
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2], device=str(q.device)
        )
    compiled = torch.compile(flex_attention)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def _first(result: object) -> torch.Tensor:
    out = result[0] if isinstance(result, tuple) else result
    assert isinstance(out, torch.Tensor)
    return out.transpose(1, 2)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("cudnn-bf16", _sdpa("CUDNN_ATTENTION")),
        Peer("flash2-bf16", _sdpa("FLASH_ATTENTION")),
        Peer("fa3-bf16", _fa3),
        Peer("fa3-fp8 (given FP8)", _fa3_fp8, given_codes=True),
        Peer("sageattention-1", _sage),
        Peer("flex-bf16", _flex),
    )
}


def find_peers(
    inputs: Inputs, causal: bool, names: tuple[str, ...] = tuple(PEERS)
) -> tuple[dict[str, Call], dict[str, str]]:
    """Calls of the peers that run on these inputs, and the reason of each that does not."""
    calls: dict[str, Call] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            call = PEERS[name].make(inputs, causal)
            call()
            if inputs[0].is_cuda:
                torch.cuda.synchronize()
            calls[name] = call
        except PeerMissing as error:
            missing[name] = str(error)
        except Exception as error:  # whatever a foreign kernel raises is its reason
            lines = str(error).strip().splitlines() or [""]
            missing[name] = f"{type(error).__name__}: {lines[0]}"
    return calls, missing
