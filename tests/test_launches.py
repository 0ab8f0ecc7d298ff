"""Launches that repeat are given what a launch of their own would be."""

from __future__ import annotations

import copy
import pickle
from typing import Any
from unittest import mock

import pytest
import torch

from dma_attn import DMAConfig, MixedKVCache, dma_attention_with_kvcache
from dma_attn.quant import launches
from dma_attn.quant.launches import Recordings, run, scratch

pytest.importorskip("triton")

import inspect


class Kernel:
    """Stands for a JIT function and for what it compiles to; notes what it is given."""

    def __init__(self) -> None:
        self.signature = inspect.signature(lambda x, pair, n, absent=None, SIZE=4: None)
        self.seen: list[tuple[str, Any, tuple[Any, ...]]] = []

    def __getitem__(self, grid: Any) -> Any:
        def launched(*args: Any, **kwargs: Any) -> Compiled:
            self.seen.append(("dispatched", grid, args))
            return Compiled(self)

        return launched


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: self.kernel.seen.append(("repeated", grid, args))


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "compiled_kernels_repeat", lambda device: True)


CPU = torch.device("cpu")


def call(made: Recordings, kernel: Kernel, x: torch.Tensor, y: torch.Tensor | None,
         own: torch.Tensor, settings: Any = "s") -> None:
    def launch() -> None:
        part = scratch((3, 2), torch.float32, CPU)
        run(kernel, (5,), x, (y, (own, 7)), n=2, num_warps=4)
        run(kernel, (6, 2), part, (None, (own, 8)), 3, x)

    made.call(launch, settings, (own, None), (x, y), CPU)


def test_arguments_of_a_repeated_launch() -> None:
    made, kernel, own = Recordings(), Kernel(), torch.zeros(4)
    a, b, c, d = (torch.zeros(2, 3) for _ in range(4))
    call(made, kernel, a, b, own)
    call(made, kernel, c, d, own)
    (way_0, _, _), (way_1, _, first), third, fourth = kernel.seen
    assert way_0 == way_1 == "dispatched" and first[0].shape == (3, 2)
    assert third[:2] == ("repeated", (5, 1, 1))
    x, pair, n, absent, size = third[2]
    assert x is c and pair[0] is d and pair[1][0] is own and pair[1][1] == 7
    assert (n, absent, size) == (2, None, 4)
    assert fourth[:2] == ("repeated", (6, 2, 1))
    part, pair, n, last, _ = fourth[2]
    assert part.shape == (3, 2) and part is not first[0] and part.dtype == torch.float32
    assert pair == (None, (own, 8)) and n == 3 and last is c


@pytest.mark.parametrize(
    "change", ["settings", "shape", "stride", "dtype", "absent", "own", "same", "alignment"])
def test_what_makes_a_call_another_one(change: str) -> None:
    made, kernel, own = Recordings(), Kernel(), torch.zeros(4)
    memory = torch.zeros(64)
    x, y = memory[:6].view(2, 3), torch.zeros(2, 3)
    call(made, kernel, x, y, own)
    other: dict[str, Any] = {"x": torch.zeros(2, 3), "y": torch.zeros(2, 3), "own": own}
    match change:
        case "settings":
            other["settings"] = "t"
        case "shape":
            other["x"] = torch.zeros(3, 3)
        case "stride":
            other["x"] = torch.zeros(3, 2).T
        case "dtype":
            other["x"] = torch.zeros(2, 3, dtype=torch.float16)
        case "absent":
            other["y"] = None
        case "own":
            other["own"] = torch.zeros(4)
        case "same":
            other["y"] = other["x"]
        case "alignment":
            other["x"] = memory[1:7].view(2, 3)
    call(made, kernel, **other)
    assert [way for way, *_ in kernel.seen] == ["dispatched"] * 4
    call(made, kernel, **other)
    assert [way for way, *_ in kernel.seen[4:]] == ["repeated"] * 2


def test_a_view_of_a_calls_tensor_is_refused() -> None:
    """It would be the first call's memory for ever."""
    made, kernel, x = Recordings(), Kernel(), torch.zeros(2, 3)
    with pytest.raises(AssertionError, match="view"):
        made.call(lambda: run(kernel, (1,), x[:1], (None,), 2), "s", (), (x,), CPU)
    assert scratch((2,), torch.float32, CPU).shape == (2,), "nothing is recorded any more"


def test_recordings_are_few_and_not_copied() -> None:
    made, kernel, own = Recordings(), Kernel(), torch.zeros(4)
    for n in range(3 * launches.MOST):
        call(made, kernel, torch.zeros(2, n + 1), None, own)
        assert len(made._made) <= launches.MOST
    assert not copy.deepcopy(made)._made and not pickle.loads(pickle.dumps(made))._made
    made.clear()
    assert not made._made


def test_a_cache_repeats_until_its_tensors_are_others() -> None:
    """Growth, a first mask, another batch and a reset make new recordings and drop the old ones."""
    from tests.compiling import compile_only

    cache = MixedKVCache(2, 2, 64, 256, config=DMAConfig(high="none", low="int4"))
    token, q = torch.zeros(2, 2, 1, 64, dtype=torch.bfloat16), torch.zeros(
        2, 4, 1, 64, dtype=torch.bfloat16)
    repeated: list[str] = []

    def step(mask: torch.Tensor | None = None) -> int:
        repeated.clear()
        rows = cache.batch
        dma_attention_with_kvcache(q[:rows].clone(), cache, k=token[:rows].clone(),
                                   v=token[:rows].clone(), key_padding_mask=mask, impl="triton")
        return len(repeated)

    from triton.compiler.compiler import CompiledKernel

    def note(self: CompiledKernel, grid: Any) -> Any:
        return lambda *args: repeated.append(self.metadata.name)

    with compile_only(90), mock.patch.object(CompiledKernel, "__getitem__", note):
        cache.append(token.expand(-1, -1, 200, -1), token.expand(-1, -1, 200, -1), impl="triton")
        assert step() == 0
        assert step() == 6 and repeated[0] == "advance_kernel" and "combine" in repeated[-1]
        cache.length = 256  # what is allocated
        assert step() == 0 and cache.capacity > 256, "growth"
        assert step() == 6
        mask = torch.ones(2, 1, dtype=torch.bool)
        assert step(mask) == 0 and step(mask.clone()) == 6
        cache.reorder([1])
        mask = mask[:1]
        assert step(mask) == 0 and step(mask) == 6
        cache.reset()
        cache.append(token[:1], token[:1], impl="triton")
        assert step() == 3 and step() == 6, "that append repeats"
        held = cache.recordings._made
        assert all(x is None or any(x is y for y in cache.owned())
                   for recording in held.values() for x in recording.owned)
