"""The examples run, and say what they should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_model import save_tiny_model

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = {"attention": "rel-L2", "formats": "nvfp4", "huggingface": "KV cache:",
            "evaluate": "attention error"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, tmp_path: Path) -> None:
    arguments: list[str] = []
    if name in ("huggingface", "evaluate"):
        pytest.importorskip("transformers")
        arguments = [str(save_tiny_model(tmp_path / "model"))]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "examples" / f"{name}.py"), *arguments],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert EXAMPLES[name] in done.stdout


def test_every_example_is_tested() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)
