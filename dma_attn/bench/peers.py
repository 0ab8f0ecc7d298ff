"""What a user would pick instead: attention implementations found at run time.

A peer that is not installed or refuses the workload is reported with the reason, never left out in
silence. FP8 peers are given their inputs already quantised, which is stated in their name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Call = Callable[[], torch.Tensor]


class PeerMissing(RuntimeError):
    """A peer cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Peer:
    """A named implementation; `make(inputs, causal)` gives a call that returns (B, H, S, D).

    given_codes: It is given its inputs quantised, so its call is not end-to-end.
    A call whose result is FP8 has an attribute `scale` that the result is to be multiplied by.
    """

    name: str
    make: Callable[[Inputs, bool], Call]
    given_codes: bool = False


def module(name: str, package: str) -> Any:
    """An installed peer's module; raises `PeerMissing` where it does not import."""
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
    fa3 = module("fa3_fwd_interface", "fa3-fwd")
    q, k, v = (x.transpose(1, 2).contiguous() for x in inputs)
    return lambda: _first(fa3.flash_attn_func(q, k, v, causal=causal))


def _fa3_fp8(inputs: Inputs, causal: bool) -> Call:
    """Per-head scales from the largest value, the most that FA3's interface takes."""
    fa3 = module("fa3_fwd_interface", "fa3-fwd")
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
    return lambda: _first(fa3.flash_attn_func(*codes, causal=causal, **arguments))


def _cudnn_fp8(inputs: Inputs, causal: bool) -> Call:
    """One scale a tensor, which is what cuDNN's FP8 attention takes; P times 256; on Hopper the
    output is FP8 too, scaled by the largest value of a first call."""
    cudnn = module("cudnn", "nvidia-cudnn-frontend")
    kinds = cudnn.data_type
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(
        handle=handle,
        io_data_type=kinds.FP8_E4M3,
        intermediate_data_type=kinds.FLOAT,
        compute_data_type=kinds.FLOAT,
    )
    out = torch.empty_like(inputs[0], dtype=torch.float8_e4m3fn)
    largest = out.new_empty((1, 1, 1, 1), dtype=torch.float32)
    operands = {}
    for name, x in zip("qkv", inputs, strict=True):
        scale = x.float().abs().amax() / 448
        operands[name] = (x.float() / scale).to(torch.float8_e4m3fn)
        operands[f"descale_{name}"] = scale.reshape(1, 1, 1, 1)
    for name, value in (("scale_s", 256.0), ("descale_s", 1 / 256), ("scale_o", 1.0)):
        operands[name] = torch.full_like(largest, value)
    uids = {name: uid for uid, name in enumerate(operands)}
    given = {
        name: graph.tensor(
            uid=uids[name],
            dim=list(x.shape),
            stride=list(x.stride()),
            data_type=kinds.FLOAT if x.dtype == torch.float32 else kinds.FP8_E4M3,
        )
        for name, x in operands.items()
    }
    o, _, _, amax_o = graph.sdpa_fp8(
        **given,
        generate_stats=False,
        attn_scale=inputs[0].shape[3] ** -0.5,
        use_causal_mask=causal,
    )
    buffers = {uids[name]: x for name, x in operands.items()}
    for tensor, x, kind in ((o, out, kinds.FP8_E4M3), (amax_o, largest, kinds.FLOAT)):
        uid = len(buffers)
        buffers[uid] = x
        tensor.set_output(True).set_uid(uid).set_dim(list(x.shape)).set_stride(list(x.stride()))
        tensor.set_data_type(kind)
    graph.build()
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=out.device)

    def attend() -> torch.Tensor:
        cudnn.set_stream(handle, torch.cuda.current_stream().cuda_stream)
        graph.execute(buffers, workspace, handle=handle)
        return out

    attend()
    operands["scale_o"].copy_(448 / largest)
    attend.scale = largest / 448  # type: ignore[attr-defined]
    return attend


def _sage(inputs: Inputs, causal: bool) -> Call:
    sage = module("sageattention", "sageattention")
    q, k, v = (x.half() for x in _repeated(inputs))
    return lambda: sage.sageattn(q, k, v, is_causal=causal)


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
        Peer("cudnn-fp8 (given FP8)", _cudnn_fp8, given_codes=True),
        Peer("sageattention-1", _sage),
        Peer("flex-bf16", _flex),
    )
}


def result(call: Call) -> torch.Tensor:
    """What a peer's call computes, in 16 bits or more."""
    out = call()
    return out.float() * call.scale if hasattr(call, "scale") else out


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
