"""Tests the built site in a headless browser: front page, search, a plot, a code block. `make test-docs` runs it.

The tests save screenshots of these pages to build/docs/screenshots.
"""

import functools
import http.server
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "docs" / "html"
SCREENSHOTS = ROOT / "build" / "docs" / "screenshots"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000"]
OPTIONS += ["--window-size=1500,1600"]
# A page in a frame of some width. When it is loaded, the frame's class is the width that its content takes.
FRAME = """<iframe width={width} height=900 src="/{page}" onload="
  this.className = 'takes-' + this.contentDocument.documentElement.scrollWidth"></iframe>\n"""
FRAMES = 12  # pages that are loaded at once


class Server:
    """Serves the site on a free port and records the requested paths and their status."""

    def __init__(self) -> None:
        self.answers: dict[str, int] = {}
        answers = self.answers

        class Handler(http.server.SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                if not self.path.startswith("/frame?"):
                    super().do_GET()
                    return
                width, *pages = self.path.removeprefix("/frame?").split("&")
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write("".join(FRAME.format(page=page, width=width) for page in pages).encode())

            def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
                answers[self.path.split("?")[0]] = int(code)

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(SITE)))
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def open(self, page: str, screenshot: str) -> str:
        """Returns the page's document after its scripts have run, and saves a screenshot."""
        assert BROWSER is not None
        url = f"http://127.0.0.1:{self.http.server_port}/{page}"
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        picture = SCREENSHOTS / f"{screenshot}.png"
        command = [BROWSER, *OPTIONS]
        subprocess.run([*command, f"--screenshot={picture}", url], capture_output=True, timeout=120, check=True)
        colors = Image.open(picture).convert("RGB").getcolors(1 << 24)
        assert colors is not None and len(colors) > 50, f"{picture} is blank"
        return self.document(page)

    def document(self, page: str) -> str:
        """Returns the page's document after its scripts have run."""
        assert BROWSER is not None
        url = f"http://127.0.0.1:{self.http.server_port}/{page}"
        command = [BROWSER, *OPTIONS, "--dump-dom", url]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    if BROWSER is None:
        pytest.skip("no Chromium")
    assert (SITE / "index.html").exists(), "run make docs first"
    running = Server()
    yield running
    running.http.shutdown()
    missing = [path for path, code in running.answers.items() if code >= 400 and path != "/favicon.ico"]
    assert not missing, f"the site asks for files that are not there: {missing}"


def test_front_page(server: Server) -> None:
    document = server.open("index.html", "front_page")
    assert "From a wheel, without a compiler" in document and "Choose an operator" in document
    assert any(path.endswith("peers.svg") and code == 200 for path, code in server.answers.items())


@pytest.mark.parametrize("width", [360, 768, 1440])
def test_every_page_fits_the_width_of_a_window(server: Server, width: int) -> None:
    pages = [str(path.relative_to(SITE)) for path in sorted(SITE.rglob("*.html"))]
    pages = [page for page in pages if not page.startswith("_")]  # sources, and the emulator's page about a launch
    assert len(pages) > 50
    taken: dict[str, int] = {}
    for i in range(0, len(pages), FRAMES):
        document = server.document(f"frame?{'&'.join([str(width), *pages[i : i + FRAMES]])}")
        found = re.findall(r'src="/(\S+)"[^>]*class="takes-(\d+)"', document)
        assert [page for page, _ in found] == pages[i : i + FRAMES]
        taken |= {page: int(pixels) for page, pixels in found}
    assert {page: pixels for page, pixels in taken.items() if pixels > width} == {}


def test_every_page_is_there_as_markdown() -> None:
    pages = re.findall(r"^- \[.+\]\((.+)\)$", (SITE / "llms.txt").read_text(), re.MULTILINE)
    assert len(pages) > 50 and "install.md" in pages
    for page in pages:
        assert (SITE / page).read_text().lstrip().startswith("# ")
    assert "sm_scale" in (SITE / "operators/sparse_mla_forward.md").read_text()


def test_search_finds_an_operator(server: Server) -> None:
    document = server.open("search.html?q=sparse_mla_forward", "search")
    results = re.search(r'<div id="search-results".*', document, re.DOTALL)
    assert results is not None
    assert 'href="operators/sparse_mla_forward.html' in results[0]


def test_an_operator_page_has_its_plot_its_formula_and_its_code(server: Server) -> None:
    document = server.open("operators/sparse_mla_backward.html", "operator")
    assert any(path.endswith("sparse_mla_backward.svg") and code == 200 for path, code in server.answers.items())
    assert "cuDNN front end" in document
    assert document.count('class="copybtn') >= 2  # a script adds one to every code block
    assert '<span class="n">hopwell</span>' in document  # the code is highlighted
    assert "deterministic" in document and "hopwell_sparse_mla_backward_args" in document


def test_a_tutorial_has_its_code_and_its_reports(server: Server) -> None:
    document = server.open("tutorials/blackwell_kernel.html", "tutorial")
    assert "tcgen05_mma_f16" in document
    assert "[deadlock] pipeline.cu" in document
    document = server.open("tutorials/hopper_kernel.html", "hopper_tutorial")
    assert "wgmma_ss" in document
    assert "[deadlock] tensor_copies.cu" in document


def test_every_link_within_the_site_leads_somewhere() -> None:
    """Sphinx checks the links that it makes. This test checks all links, also in raw HTML."""
    pages = {path: path.read_text() for path in SITE.rglob("*.html")}
    ids = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    broken = []
    for path, text in pages.items():
        for link in re.findall(r'<a [^>]*href="([^"]+)"', text):
            if re.match(r"[a-z]+:", link):
                continue
            file, _, anchor = link.partition("#")
            target = (path.parent / file.split("?")[0]).resolve() if file else path
            if not target.exists() or (anchor and target in ids and anchor not in ids[target]):
                broken.append(f"{path.relative_to(SITE)}: {link}")
    assert not broken, "\n".join(sorted(set(broken))[:20])
