"""Settings of the site. Its source folder is the repository, so that links work on the site and on GitHub."""

import os
import re
import sys
from pathlib import Path

from docutils import nodes

import blocksparse

# Kernels of tutorials would warn that they communicate over open ports of this machine.
os.environ["IPYTHONDIR"] = str(Path(__file__).parents[1] / "build" / "ipython")
profile = Path(os.environ["IPYTHONDIR"], "profile_default")
profile.mkdir(parents=True, exist_ok=True)
(profile / "ipython_kernel_config.py").write_text("get_config().IPKernelApp.log_level = 'ERROR'\n")
sys.path.insert(0, str(Path(__file__).parent))

project = "blocksparse"
copyright = "the authors of blocksparse"
version = release = blocksparse.__version__

extensions = [
    "charts",
    "mathml",
    "public",
    "results_table",
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "benchmarks/results/*.md",
    "src/blocksparse/ops/linear/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
]
exclude_patterns = [".*", "build", "dist", "tests", "csrc"]

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True

# In docstrings a backtick is code, and `Args:` and `Raises:` are sections.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints = "none"
autodoc_class_signature = "mixed"
napoleon_custom_sections = ["Shapes", "Source"]
napoleon_use_ivar = True
napoleon_use_rtype = False
add_module_names = False
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = "blocksparse"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["root"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#0b6e8a", "color-brand-content": "#0b6e8a"},
    "dark_css_variables": {"color-brand-primary": "#57c4e0", "color-brand-content": "#57c4e0"},
}
highlight_language = "text"  # for blocks that name no language: tables, trees, output
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def add_title(app, docname, source):
    """Add a heading, made from the file's name, to tables of benchmarks without one."""
    if docname.startswith("benchmarks/results/") and not source[0].startswith("# "):
        work, machine = Path(docname).name.split("-", 1)
        source[0] = f"# {work}: {machine}\n\n{source[0]}"


def clean_outputs(app, doctree):
    """Remove the kernel's file name, which differs in each build, from warnings; give images alternative texts."""
    for block in doctree.findall(nodes.literal_block):
        if "stderr" in block["classes"]:
            text = re.sub(r"/\S*ipykernel_\d+/\d+\.py:\d+: ", "", block.astext())
            block.rawsource, block[:] = text, [nodes.Text(text)]
    for image in doctree.findall(nodes.image):
        section = image
        while not isinstance(section, nodes.section | nodes.document):
            section = section.parent
        image.setdefault("alt", section.next_node(nodes.title).astext())


def setup(app):
    app.connect("source-read", add_title)
    app.connect("doctree-read", clean_outputs)
