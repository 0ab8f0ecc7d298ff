"""Launches that a decode step makes again and again, without Triton's dispatch.

    first call     kernel[grid](...) by way of `run`; what was compiled is noted, and its arguments
    later calls    the compiled kernels again, with tensors of this call for those of the first

Triton's dispatch and what makes its arguments take a host most of a millisecond a step; an eager
model waits for that once a layer. Calls repeat when everything that chooses a kernel is the same:
settings, the cache's own tensors, and of a call's tensors all but their memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..device import compiled_kernels_repeat

MOST = 8  # recordings that a cache keeps


class _Hole(NamedTuple):
    """Where an argument of a repeated launch was a tensor of the call: its number."""

    number: int


class _Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    arguments: list[Any]
    holes: list[int]  # which arguments hold a hole


@dataclass
class _Recording:
    """What a call launched. The call's tensors are numbered: inputs, then scratch."""

    owned: tuple[torch.Tensor | None, ...]  # held, so that no other object gets their ids
    n_inputs: int
    numbers: dict[int, int] = field(default_factory=dict)  # of the call's tensors, by id
    tensors: list[torch.Tensor] = field(default_factory=list)  # while it is made
    scratch: list[tuple[tuple[int, ...], torch.dtype]] = field(default_factory=list)
    launches: list[_Launch] = field(default_factory=list)

    def add(self, kernel: Any, grid: tuple[int, ...], function: Any, args: Any, kw: Any) -> None:
        parameters = {k: v for k, v in kw.items() if k in function.signature.parameters}
        bound = function.signature.bind(*args, **parameters)
        bound.apply_defaults()
        arguments = [self._with_holes(x) for x in bound.arguments.values()]
        holes = [i for i, x in enumerate(arguments) if _has_hole(x)]
        self.launches.append(_Launch(kernel, (*grid, 1, 1)[:3], arguments, holes))

    def _with_holes(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if id(x) in self.numbers:
                return _Hole(self.numbers[id(x)])
            memory = [y.untyped_storage().data_ptr() for y in self.owned if y is not None]
            if x.untyped_storage().data_ptr() not in memory:
                raise AssertionError("a launch that repeats was given a tensor of another kind "
                                     "than the cache's own, the call's and its scratch")
            return x
        if isinstance(x, tuple):
            return _like(x, [self._with_holes(y) for y in x])
        return x

    def repeat(self, inputs: Sequence[torch.Tensor | None], device: torch.device) -> None:
        tensors = [*inputs, *(torch.empty(s, dtype=d, device=device) for s, d in self.scratch)]
        for kernel, grid, arguments, holes in self.launches:
            filled = arguments.copy()
            for i in holes:
                filled[i] = _filled(filled[i], tensors)
            kernel[grid](*filled)


class Recordings:
    """The calls of one cache that repeat."""

    def __init__(self) -> None:
        self._made: dict[Any, _Recording] = {}

    def __deepcopy__(self, memo: Any) -> Recordings:
        return Recordings()

    def __reduce__(self) -> Any:
        return Recordings, ()

    def clear(self) -> None:
        """Let go of tensors of the cache that have been replaced."""
        self._made.clear()

    def call(
        self,
        launch: Callable[[], None],
        settings: Any,
        owned: Sequence[torch.Tensor | None],
        inputs: Sequence[torch.Tensor | None],
        device: torch.device,
    ) -> None:
        """`launch()`, or what it launched when it was called like this before.

        Args:
            launch: Launches kernels by `run`, whose tensors are `owned`, `inputs` and `scratch`.
            settings: Hashable; all else that it depends on.
            owned: The cache's tensors, or None: as long as they are the same objects, they repeat.
            inputs: The call's tensors, or None.
        """
        if not compiled_kernels_repeat(device):
            launch()
            return
        ids = [id(x) for x in inputs]
        key = (settings, tuple(map(id, owned)),
               tuple(None if x is None else _kind(x, ids.index(id(x))) for x in inputs))
        found = self._made.get(key)
        if found is not None:
            found.repeat(inputs, device)
            return
        recording = _Recording(tuple(owned), len(inputs))
        for number, x in enumerate(inputs):
            if x is not None:
                recording.numbers.setdefault(id(x), number)
                recording.tensors.append(x)
        _current.recording = recording
        try:
            launch()
        finally:
            _current.recording = None
        recording.tensors.clear()
        recording.numbers.clear()
        if len(self._made) >= MOST:
            del self._made[next(iter(self._made))]
        self._made[key] = recording


_current = threading.local()


def run(function: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    """function[grid](*args, **kwargs), to be repeated where a call is recorded."""
    kernel = function[grid](*args, **kwargs)
    recording = getattr(_current, "recording", None)
    if recording is not None:
        recording.add(kernel, grid, function, args, kwargs)


def scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised memory for one call."""
    x = torch.empty(shape, dtype=dtype, device=device)
    recording = getattr(_current, "recording", None)
    if recording is not None:
        recording.numbers[id(x)] = recording.n_inputs + len(recording.scratch)
        recording.scratch.append((tuple(shape), dtype))
        recording.tensors.append(x)
    return x


def _kind(x: torch.Tensor, same: int) -> tuple[Any, ...]:
    """What a compiled kernel depends on, and the number of the first input that is this one. The
    stride of a single element is never used."""
    strides = tuple(s for s, n in zip(x.stride(), x.shape, strict=True) if n != 1)
    return x.dtype, x.shape, strides, x.data_ptr() % 16 == 0, same


def _has_hole(x: Any) -> bool:
    return isinstance(x, _Hole) or (isinstance(x, tuple) and any(map(_has_hole, x)))


def _filled(x: Any, tensors: Sequence[torch.Tensor | None]) -> Any:
    if isinstance(x, _Hole):
        return tensors[x.number]
    if isinstance(x, tuple):
        return _like(x, [_filled(y, tensors) for y in x])
    return x


def _like(x: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """The items as a tuple of x's type, which may be a named one."""
    return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
