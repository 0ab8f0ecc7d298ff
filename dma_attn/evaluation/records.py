"""Results as JSON lines that a killed run continues: a header, then one line a measured unit.

    {"header": {"settings": {...}, "environment": {...}}}
    {"task": "perplexity", "subject": "default", "unit": [3], "nll": 2.31}

A unit is what is measured in one go; it counts when its line is whole. The header says what the
numbers depend on, and a file with another one is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import SettingError


class Measured:
    """The lines of one file.

    Attributes:
        lines: In the order in which they were measured.
        settings: What the numbers depend on.
        environment: Where the first of them were measured.

    Raises:
        SettingError: the file is none of these.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings: dict[str, Any]
        self.environment: dict[str, str]
        self.lines: list[dict[str, Any]]
        whole = path.read_bytes()
        self._size = whole.rfind(b"\n") + 1  # a kill may have cut off the last line
        try:
            header, *self.lines = [json.loads(x) for x in whole[: self._size].splitlines()]
            self.settings = header["header"]["settings"]
            self.environment = header["header"]["environment"]
            if not all({"task", "subject", "unit"} <= set(x) for x in self.lines):
                raise ValueError("a line without task, subject and unit")
        except (ValueError, KeyError, TypeError) as error:
            raise SettingError(f"expected results of `dma-attn eval`, got {path}", "out") from error

    def of(self, task: str, subject: str) -> list[dict[str, Any]]:
        """The lines of a task and a subject, in the order of their units."""
        found = [x for x in self.lines if (x["task"], x["subject"]) == (task, subject)]
        return sorted(found, key=lambda x: x["unit"])


class Records(Measured):
    """Lines that are read at once and appended to.

    Args:
        path: The file; it and its folder are made when they do not exist.
        settings: What the numbers depend on, ready for JSON.
        environment: Where they are measured; that of the first run stays.

    Raises:
        SettingError: the file is of other settings, or none of these files.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        if not path.exists() or (b"\n" not in (old := path.read_bytes())
                                 and b'{"header": '.startswith(old[:11])):  # cut off in its header
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
            _append(path, {"header": {"settings": settings, "environment": dict(environment)}})
        super().__init__(path)
        wanted = json.loads(json.dumps(settings))
        changed = [name for name in sorted({**self.settings, **wanted})
                   if self.settings.get(name) != wanted.get(name)]
        if changed:
            raise SettingError(
                f"expected a file of the same settings, got {path} with "
                + ", ".join(f"{n} {self.settings.get(n)!r} instead of {wanted.get(n)!r}"
                            for n in changed), "out")
        os.truncate(path, self._size)
        self._known = {_key(x) for x in self.lines}

    def has(self, task: str, subject: str, unit: list[Any]) -> bool:
        """Whether a unit has been measured."""
        return _key({"task": task, "subject": subject, "unit": unit}) in self._known

    def add(self, task: str, subject: str, unit: list[Any], **values: Any) -> None:
        """Keep a unit's values, ready for JSON, and write them."""
        line = {"task": task, "subject": subject, "unit": unit, **values}
        _append(self.path, line)
        self.lines.append(line)
        self._known.add(_key(line))


def _append(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _key(line: Mapping[str, Any]) -> str:
    return json.dumps([line["task"], line["subject"], line["unit"]])
