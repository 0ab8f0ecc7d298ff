"""One self-contained HTML page: figures inline, no scripts, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined


def render_html(results: Mapping[str, Any], figures: Mapping[str, bytes], **shown: Any) -> str:
    """Render `template.html`.

    Args:
        results: What `results_dict` returns.
        figures: Name to PNG bytes.
        shown: Further values that the template names.
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = (resources.files(__package__) / "template.html").read_text(encoding="utf-8")
    images = {name: data_uri(png) for name, png in figures.items()}
    return environment.from_string(template).render(results=results, images=images, **shown)


def data_uri(png: bytes) -> str:
    """A PNG as a `data:` URI."""
    return "data:image/png;base64," + base64.b64encode(png).decode()
