"""The directive `public`: names of a module with their docstrings; without names, its whole `__all__`.

```{public} blocksparse.nn
Linear Conv2d
```
"""

import importlib
import inspect
import re
from types import ModuleType

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList


class Public(Directive):
    required_arguments = 1
    has_content = True

    def run(self):
        try:
            module = importlib.import_module(self.arguments[0])
        except ImportError as error:
            if not self.arguments[0].startswith("blocksparse.jax"):
                raise
            return [nodes.paragraph(text=f"This build of the site has no JAX: {error}.")]
        lines = ["```{eval-rst}", f".. currentmodule:: {module.__name__}", ""]
        for name in " ".join(self.content).split() or module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value):
                lines += [f".. autoclass:: {name}", "   :members:", "   :exclude-members: extra_repr, dense_style", ""]
            elif callable(value):
                lines += [f".. autofunction:: {name}", ""]
            elif not isinstance(value, ModuleType):
                lines += [f".. autodata:: {name}", ""]
        found = nodes.Element()
        self.state.nested_parse(StringList([*lines, "```"]), self.content_offset, found)
        return found.children


def escape(app, what, name, obj, options, lines):
    """Escape | and *: in our docstrings |w| is a norm and * a product, not markup."""
    for i, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            parts = re.split(r"(`+[^`]*`+)", line)
            lines[i] = "".join(part if part.startswith("`") else re.sub(r"([|*])", r"\\\1", part) for part in parts)


def setup(app):
    app.setup_extension("sphinx.ext.autodoc")
    app.add_directive("public", Public)
    app.connect("autodoc-process-docstring", escape, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
