"""Render formulas as MathML, which browsers draw without script, font or network."""

from docutils import nodes
from docutils.utils.math import latex2mathml


def visit(display):
    def visit_math(self, node):
        kind = "div" if display else "span"
        self.body.append(f'<{kind} class="math">{latex2mathml.tex2mathml(node.astext(), as_block=display)}</{kind}>')
        raise nodes.SkipNode

    return visit_math


def setup(app):
    app.add_html_math_renderer("mathml", (visit(False), None), (visit(True), None))
    app.config.html_math_renderer = "mathml"
    return {"parallel_read_safe": True, "parallel_write_safe": True}
