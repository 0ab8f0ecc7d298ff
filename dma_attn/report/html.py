"""One self-contained HTML page: figures inline, no scripts, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render_html(results: Mapping[str, Any], figures: Mapping[str, bytes], **shown: Any) -> str:
    """Render the demo's `template.html`.

    Args:
        results: What `results_dict` returns.
        figures: Name to PNG bytes.
        shown: Further values that the template names.
    """
    images = {name: data_uri(png) for name, png in figures.items()}
    return render("template.html", results=results, images=images, **shown)


def render(template: str, **shown: Any) -> str:
    """Render a template of this folder with the values that it names."""
    environment = Environment(
        loader=PackageLoader("dma_attn", "report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )
    return environment.get_template(template).render(**shown)


def data_uri(image: bytes) -> str:
    """A PNG or an SVG as a `data:` URI."""
    kind = "image/png" if image.startswith(b"\x89PNG") else "image/svg+xml"
    return f"data:{kind};base64," + base64.b64encode(image).decode()
