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


class Records:
    """The lines of one file, read at once and appended to.

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
        self.path = path
        self.lines: list[dict[str, Any]] = []
        settings = json.loads(json.dumps(settings))
        if path.exists() and path.stat().st_size:
            header, self.lines, size = _read(path)
            changed = [name for name in {**header, **settings}
                       if header.get(name) != settings.get(name)]
            if changed:
                raise SettingError(
                    f"expected a file of the same settings, got {path} with "
                    + ", ".join(f"{n} {header.get(n)!r} instead of {settings.get(n)!r}"
                                for n in sorted(changed)), "out")
            os.truncate(path, size)  # a line that a kill cut off
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append({"header": {"settings": settings, "environment": dict(environment)}})
        self._known = {_key(x) for x in self.lines}

    def has(self, task: str, subject: str, unit: list[Any]) -> bool:
        """Whether a unit has been measured."""
        return _key({"task": task, "subject": subject, "unit": unit}) in self._known

    def add(self, task: str, subject: str, unit: list[Any], **values: Any) -> None:
        """Keep a unit's values, ready for JSON, and write them."""
        line = {"task": task, "subject": subject, "unit": unit, **values}
        self._append(line)
        self.lines.append(line)
        self._known.add(_key(line))

    def of(self, task: str, subject: str) -> list[dict[str, Any]]:
        """The lines of a task and a subject, in the order of their units."""
        found = [x for x in self.lines if (x["task"], x["subject"]) == (task, subject)]
        return sorted(found, key=lambda x: x["unit"])

    def _append(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _key(line: Mapping[str, Any]) -> str:
    return json.dumps([line["task"], line["subject"], line["unit"]])


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """Settings, lines, and the bytes up to the end of the last whole line."""
    whole = path.read_bytes()
    whole = whole[: whole.rfind(b"\n") + 1]
    try:
        header, *lines = [json.loads(x) for x in whole.decode("utf-8").splitlines()]
        return header["header"]["settings"], lines, len(whole)
    except (ValueError, KeyError, TypeError) as error:
        raise SettingError(f"expected results of `dma-attn eval`, got {path}", "out") from error
