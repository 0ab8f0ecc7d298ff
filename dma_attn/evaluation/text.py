"""Real text without a download: the help topics of Python's standard library, or a text file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .errors import SettingError


def python_topics() -> str:
    """The texts of `pydoc_data.topics`, sorted by name and joined by newlines.

    About 113 to 125 thousand SmolLM2 tokens. The text differs between Python versions: compare
    ratios across them.
    """
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def read_text(path: str | Path | None = None) -> str:
    """The text of a UTF-8 file, or `python_topics()` for None.

    Raises:
        SettingError: the file cannot be read, is not UTF-8 or is empty; the message has its name.
    """
    if path is None:
        return python_topics()
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SettingError(f"cannot read {path}: {reason}", "text") from error
    except UnicodeDecodeError as error:
        raise SettingError(
            f"expected a UTF-8 text file, got {path}, whose byte {error.start} is not UTF-8", "text"
        ) from error
    if not text.strip():
        raise SettingError(f"expected a file with text in it, got an empty file: {path}", "text")
    return text


def token_ids(tokenizer: Any, text: str) -> torch.Tensor:
    """All tokens of a text without special tokens, int64 (n,)."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return torch.tensor(ids, dtype=torch.int64)


def windows(ids: torch.Tensor, length: int, count: int) -> torch.Tensor:
    """The first `count` consecutive windows of `length` tokens: int64 (count, length), a view.

    Every configuration is measured on these same windows.

    Raises:
        ValueError: `ids` is not one-dimensional, or a size is too small.
        SettingError: `ids` is too short.
    """
    if ids.ndim != 1:
        raise ValueError(f"ids: expected one dimension, got shape {tuple(ids.shape)}")
    if length < 2 or count < 1:
        raise ValueError(
            f"windows: expected length >= 2 and count >= 1, got length={length}, count={count}"
        )
    if length * count > ids.numel():
        raise SettingError(
            f"expected a text of at least {count} windows x {length} tokens = {count * length} "
            f"tokens, got one of {ids.numel()}",
            "tokens",
            "windows",
            "text",
        )
    return ids[: length * count].view(count, length)
