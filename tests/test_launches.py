"""Launches that repeat are given what a launch of their own would be."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any
from unittest import mock

import pytest
import torch

from dma_attn import DMAConfig, MixedKVCache, dma_attention_with_kvcache
from dma_attn.quant import launches
from dma_attn.quant.launches import Recordings, _Hole, run, scratch

pytest.importorskip("triton")

from triton.compiler.compiler import CompiledKernel

from tests.compiling import compile_only


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


def test_views_of_a_calls_tensor_and_temporaries_are_refused() -> None:
    """They would be the first call's memory for ever."""
    made, kernel, x = Recordings(), Kernel(), torch.zeros(2, 3)
    with pytest.raises(AssertionError, match="another kind"):
        made.call(lambda: run(kernel, (1,), x[:1], (None,), 2), "s", (), (x,), CPU)
    with pytest.raises(AssertionError, match="another kind"):
        made.call(lambda: run(kernel, (1,), x, (torch.ones(1),), 2), "s", (), (x,), CPU)
    own = torch.zeros(4, 2)
    made.call(lambda: run(kernel, (1,), x, (own[1:],), 2), "s", (own,), (x,), CPU)
    assert scratch((2,), torch.float32, CPU).shape == (2,), "nothing is recorded any more"


def test_recordings_are_few_and_not_copied() -> None:
    made, kernel, own = Recordings(), Kernel(), torch.zeros(4)
    for n in range(3 * launches.MOST):
        call(made, kernel, torch.zeros(2, n + 1), None, own)
        assert len(made._made) <= launches.MOST
        kernel.seen.clear()
        call(made, kernel, torch.zeros(2, max(n - launches.MOST + 2, 1)), None, own)
        assert kernel.seen[0][0] == "repeated", "the oldest goes first, alone"
    assert not copy.deepcopy(made)._made and not pickle.loads(pickle.dumps(made))._made
    made.clear()
    assert not made._made


def test_what_does_not_matter() -> None:
    """Strides of a single element, and where beyond 16 bytes memory begins."""
    made, kernel, own, memory = Recordings(), Kernel(), torch.zeros(4), torch.zeros(64)
    for x in (memory[:3], memory[4:7], memory[1:4].clone()):
        for stride in (3, 50):
            call(made, kernel, x.as_strided((1, 3), (stride, 1)), None, own)
    assert [way for way, *_ in kernel.seen] == ["dispatched"] * 2 + ["repeated"] * 10


def token(batch: int, heads: int) -> torch.Tensor:
    return torch.zeros(batch, heads, 1, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "text", ["default,high=none,low=int4", "default,sink=128", "mxfp8,diag=full"])
def test_a_cache_repeats_what_it_would_launch(text: str) -> None:
    """What a second call repeats are the arguments that a recording of its own would have."""
    cache = MixedKVCache(2, 2, 64, 512, config=DMAConfig.parse(text))
    seen: list[tuple[str, Any, tuple[Any, ...]]] = []

    def note(self: CompiledKernel, grid: Any) -> Any:
        return lambda *args: seen.append((self.hash, grid, args))

    with compile_only(90), mock.patch.object(CompiledKernel, "__getitem__", note):
        cache.append(*[token(2, 2).expand(-1, -1, 300, -1)] * 2, impl="triton")

        def step() -> list[torch.Tensor]:
            seen.clear()
            q, k, v, out = token(2, 4), token(2, 2), token(2, 2), token(2, 4)
            dma_attention_with_kvcache(q, cache, k=k, v=v, out=out, impl="triton")
            return [q, k, v, out]

        step()
        assert not seen
        mine = step()
        repeated = list(seen)
        assert len(repeated) >= 5
        cache.recordings.clear()
        fresh = step()
        assert not seen
        own = {id(x) for x in cache.owned()}

        def compare(a: Any, b: Any) -> None:
            if isinstance(b, _Hole):
                assert isinstance(a, torch.Tensor) and id(a) not in own
                same = [x is a for x in mine]
                if any(same):
                    assert fresh_of(b) is fresh[same.index(True)]
            elif isinstance(b, tuple):
                assert type(a) is type(b) and len(a) == len(b)
                for x, y in zip(a, b, strict=True):
                    compare(x, y)
            elif isinstance(b, torch.Tensor):
                assert isinstance(a, torch.Tensor) and a.data_ptr() == b.data_ptr()
                assert a.shape == b.shape and a.stride() == b.stride()
            else:
                assert a == b and type(a) is type(b)

        i = 0
        for recording, inputs in zip(cache.recordings._made.values(),
                                     ((fresh[1], fresh[2], None), (fresh[0], fresh[3], None)),
                                     strict=True):
            def fresh_of(hole: _Hole, inputs: Any = inputs) -> Any:
                return inputs[hole.number]

            for launch in recording.launches:
                name, grid, args = repeated[i]
                assert name == launch.kernel.hash and grid == launch.grid
                compare(args, tuple(launch.arguments))
                i += 1
        assert i == len(repeated)


@pytest.mark.parametrize("batch", [1, 3])
def test_masks_of_a_growing_sequence_repeat(batch: int) -> None:
    """What transformers passes with every token: a slice of a longer mask each time."""
    from dma_attn.integrations.transformers_masks import new_keys

    cache = MixedKVCache(batch, 2, 64, 512)
    counts: list[int] = []

    def note(self: CompiledKernel, grid: Any) -> Any:
        return lambda *args: counts.append(1)

    with compile_only(90), mock.patch.object(CompiledKernel, "__getitem__", note):
        cache.append(*[token(batch, 2).expand(-1, -1, 100, -1)] * 2, impl="triton")
        for keys in range(101, 121):
            counts.clear()
            mask = new_keys(torch.ones(batch, keys, dtype=torch.bool), batch, keys, 1)
            dma_attention_with_kvcache(token(batch, 4), cache, k=token(batch, 2),
                                       v=token(batch, 2), key_padding_mask=mask, impl="triton")
            assert len(counts) == (0 if keys == 101 else 6)


def test_a_cache_repeats_until_its_tensors_are_others() -> None:
    """Growth, a first mask, another batch and a reset make new recordings and drop the old ones."""
    cache = MixedKVCache(2, 2, 64, 256, config=DMAConfig(high="none", low="int4"))
    repeated: list[str] = []

    def step(mask: torch.Tensor | None = None) -> int:
        repeated.clear()
        rows = cache.batch
        dma_attention_with_kvcache(token(rows, 4), cache, k=token(rows, 2), v=token(rows, 2),
                                   key_padding_mask=mask, impl="triton")
        return len(repeated)

    def note(self: CompiledKernel, grid: Any) -> Any:
        return lambda *args: repeated.append(self.metadata.name)

    with compile_only(90), mock.patch.object(CompiledKernel, "__getitem__", note):
        cache.append(*[token(2, 2).expand(-1, -1, 200, -1)] * 2, impl="triton")
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
        cache.append(token(1, 2), token(1, 2), impl="triton")
        assert step() == 3 and step() == 6, "that append repeats"
        cache.rotate_v = not cache.rotate_v
        assert step() == 0 and step() == 6
        held = cache.recordings._made
        assert all(x is None or any(x is y for y in cache.owned())
                   for recording in held.values() for x in recording.owned)
