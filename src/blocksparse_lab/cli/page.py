"""HTML pages from Jinja2 templates with matplotlib charts: one file each, without network."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from blocksparse.errors import BlockSparseError
from blocksparse.topology.drawings.style import figure_and_axes

TEMPLATES = Path(__file__).parent / "templates"
# Colours that work on white and on black paper.
INK, DENSE, SPARSE = "#7b8797", "#d9742b", "#2f86cf"


def render(template: str, filters: dict[str, Any] | None = None, **values: Any) -> str:
    """Render a page from a template; values are escaped, except `markupsafe.Markup`.

    Raises:
        BlockSparseError: Jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise BlockSparseError(f"pages need Jinja2 ({error}): pip install Jinja2") from error
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES, encoding="utf-8"), autoescape=True, undefined=StrictUndefined
    )
    environment.filters |= filters or {}
    return environment.get_template(template).render(**values)


def axes_for_page(size: tuple[float, float], columns: int = 1, **grid: Any) -> tuple[Any, Any]:
    """Return `figure_and_axes` in the colours of a page."""
    figure, axes = figure_and_axes(size, columns, **grid)
    for one in [axes] if columns == 1 else axes:
        one.patch.set_alpha(0)
        one.spines[:].set_color(INK)
        one.tick_params(colors=INK, labelsize=9)
        for label in (one.xaxis.label, one.yaxis.label, one.title):
            label.set(color=INK, size=9.5)
    figure.patch.set_alpha(0)
    return figure, axes


def image(figure: Any, words: str) -> Any:
    """Convert a figure to an element of a page; `words` describe it to readers who cannot see it."""
    from markupsafe import Markup
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    data = base64.b64encode(out.getvalue().encode()).decode()
    return Markup('<img alt="{}" src="data:image/svg+xml;base64,{}">').format(words, data)
