"""Sphinx settings for `make docs`. generated.py, plots.py and emulated.py in this folder make the generated parts."""

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
BUILD = ROOT / "build" / "docs"
sys.path[:0] = [str(HERE), str(BUILD / "declared" / "python")]
subprocess.run([sys.executable, "-B", "scripts/declare", "--write", str(BUILD / "declared")], cwd=ROOT, check=True)

import emulated  # noqa: E402
import generated  # noqa: E402
import notebook  # noqa: E402
import plots  # noqa: E402

project = "Hopwell"
author = "Hopwell's authors"
copyright = "2026, Hopwell's authors. Apache-2.0"
release = re.search(r"project\(hopwell VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
version = release
SUMMARY = re.search(r'^description = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]

extensions = [
    "breathe",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# The Python reference comes from docstrings. PyTorch is imported; the compiled module is mocked, so no build is needed.
autodoc_mock_imports = ["hopwell._hopwell"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
autodoc_preserve_defaults = True
add_module_names = False
napoleon_use_rtype = False
napoleon_use_param = False
default_role = "code"

# The C and C++ reference comes from the comments of the headers.
breathe_projects = {"hopwell": str(BUILD / "doxygen" / "xml")}
breathe_default_project = "hopwell"
breathe_show_include = False
breathe_domain_by_extension = {"h": "cpp", "hpp": "cpp"}
toc_object_entries_show_parents = "hide"
cpp_id_attributes = ["HOPWELL_API"]

html_theme = "furo"
html_title = f"Hopwell {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
copybutton_exclude = ".linenos, .gp, .go"


def make_inputs(app: object) -> None:
    """Runs Doxygen and the tutorial's kernel, draws the pictures and makes the notebook, before Sphinx reads the
    pages.
    """
    (BUILD / "doxygen").mkdir(parents=True, exist_ok=True)
    subprocess.run(["doxygen", "docs/Doxyfile"], cwd=ROOT, check=True)
    plots.draw_all(HERE / "_generated")
    emulated.draw(HERE / "_generated")
    notebook.convert(ROOT / "examples" / "swap_one_import.py", HERE / "_generated" / "swap_one_import.ipynb")


def write_markdown(app: object, docname: str, source: list[str]) -> None:
    """Writes a page's Markdown beside its HTML, with the docstrings of the functions that it describes."""
    page = Path(app.outdir) / f"{docname}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(generated.with_docstrings(source[0]))


def list_pages(app: object, error: Exception | None) -> None:
    """Writes llms.txt: a line for the Markdown of each page."""
    if error is None:
        lines = [f"- [{app.env.titles[page].astext()}]({page}.md)" for page in sorted(app.env.found_docs)]
        text = f"# Hopwell {release}\n\n> {SUMMARY}\n\n## Pages\n\n" + "\n".join(lines) + "\n"
        (Path(app.outdir) / "llms.txt").write_text(text)


def setup(app: object) -> None:
    """Registers the hooks; Sphinx calls this."""
    app.connect("builder-inited", make_inputs)
    app.connect("build-finished", list_pages)
    app.connect("source-read", generated.fill)
    app.connect("source-read", write_markdown, priority=900)
    app.connect("autodoc-skip-member", generated.skip_helpers)
    app.connect("autodoc-process-docstring", generated.formulas_are_literal, priority=100)
