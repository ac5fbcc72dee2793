"""The documents: every Python block runs and prints the output below it, and complete lists are complete."""

import contextlib
import functools
import importlib
import importlib.util
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import hopwell
import pytest
import torch
from hopwell import _ops

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python( gpu)?\n(.*?)^```\n(?:```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
WITH_BLOCKS = [page for page in PAGES if BLOCK.search(page.read_text())]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def first_difference(page: Path) -> str:
    """Runs the page's blocks in order, and returns the first difference from the page's text, or ""."""
    text, names = page.read_text(), {"__name__": "__main__"}
    for found in BLOCK.finditer(text):
        on_gpu, code, expected = found.groups()
        if on_gpu and not torch.cuda.is_available():
            continue
        line = text.count("\n", 0, found.start())
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile("\n" * (line + 1) + code, str(page), "exec"), names)
        if expected is not None and printed.getvalue() != expected:
            return f"{name(page)}:{line + 1} printed\n{printed.getvalue()}"
    return ""


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=name)
def test_python_blocks_run_and_print_what_the_page_says(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert first_difference(page) == ""


def test_blocks_for_a_gpu_are_few_and_known() -> None:
    marked = {name(page): len(re.findall("^```python gpu$", page.read_text(), re.MULTILINE)) for page in PAGES}
    assert {page: count for page, count in marked.items() if count} == {}


def test_no_python_block_escapes() -> None:
    """Finds blocks that the pattern above misses: other words after the language, or an indented fence."""
    for page in PAGES:
        fences = re.findall(
            r"^[ \t]*[`~:]{3,}\s*\{?(?:code-block\} |code\} )?(?:python|py)\b.*$", page.read_text(), re.MULTILINE
        )
        assert set(fences) <= {"```python", "```python gpu"}, name(page)


def test_a_wrong_output_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n```text\n2\n```\n")
    assert first_difference(page) == "page.md:1 printed\n1\n"
    page.write_text("```python\nassert False\n```\n")
    with pytest.raises(AssertionError):
        first_difference(page)


# ---- completeness ----------------------------------------------------------------------------------------------------


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import generated

    return generated


def test_every_operator_has_its_page(generated: ModuleType) -> None:
    operators = sorted(_ops.OPERATORS)
    assert sorted(generated.operators()) == operators
    assert sorted(path.stem for path in (ROOT / "docs" / "operators").glob("*.md") if path.stem != "index") == operators
    for operator in operators:
        page = (ROOT / "docs" / "operators" / f"{operator}.md").read_text()
        for piece in ("python", "backends", "peers", "bench", "cpp"):
            assert f"<!-- generated: {piece} {operator} -->" in page
        assert page.count("```python") >= 2, f"{operator}: an example and an error"
        program = ROOT / "tests" / "install" / "operators" / f"{operator}.cpp"  # tests/install/run.sh runs it
        assert f"hopwell::{operator}({{" in program.read_text()


def test_reference_of_instructions_has_every_function_and_its_certification(generated: ModuleType) -> None:
    import instructions

    certified = set(json.loads(instructions.RECORD.read_text())["functions"])
    page = ["\n".join((ROOT / "docs" / "reference" / "instructions.md").read_text().splitlines())]
    generated.fill(None, "reference/instructions", page)
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (H100|no) \|$", page[0], re.MULTILINE)
    assert {name for name, _, gpu in rows if gpu == "H100"} == certified
    assert {"tmem_load", "tcgen05_commit", "tma_gather4"} <= {name for name, _, gpu in rows if gpu == "no"}
    wait = next(text for name, text, _ in rows if name == "mbarrier_init")
    assert wait.startswith("mbarrier.init: ") and "#parallel-synchronization" in wait


def test_the_list_of_functions_has_every_one(generated: ModuleType) -> None:
    import catalogue
    from hopwell import compat, reference
    from hopwell import torch as hw

    listed = {module: {name for name, _ in names} for module, names in catalogue.modules().items()}
    assert listed["hopwell.torch"] == set(hw.__all__) - {"nn"}
    assert listed["hopwell.reference"] == set(reference.__all__)
    parallel = importlib.import_module("hopwell.torch.parallel")
    for module, names in (("nn", hw.nn.__all__), ("parallel", parallel.__all__)):
        functions = {name for name in names if not name.endswith("Mode")}  # types of literals
        assert listed[f"hopwell.torch.{module}"] == functions
    assert {f"hopwell.compat.{name}" for name in generated.compat_modules()} < set(listed)
    assert "gather_attn" in listed["hopwell.compat.attn_gym"] and compat.__doc__
    assert all(sentence for names in catalogue.modules().values() for _, sentence in names)


def test_every_operator_has_a_family(generated: ModuleType) -> None:
    assert sorted(name for names in generated.by_family().values() for name in names) == sorted(_ops.OPERATORS)


def test_performance_pages_begin_with_times_and_how_to_repeat_them(generated: ModuleType) -> None:
    pages = [
        page for page in PAGES if page.parent.name == "performance" and "<!-- generated: summary" in page.read_text()
    ]
    assert len(pages) == 7
    for page in pages:
        begin = page.read_text().splitlines()[:7]
        assert begin[2].startswith("<!-- generated: summary ")
        for line in begin:
            if not line.startswith("<!-- generated: summary "):
                continue
            source = [line]
            generated.fill(None, name(page), source)
            assert re.search(r"^\| .+ \| \d+\.\d{3} \| [\d.]+ T(FLOP|B)/s \| `sm\d+` \|$", source[0], re.MULTILINE)
            for word in ("| ms |", "NVIDIA H", "commit", "`hopwell bench "):
                assert word in source[0], f"{name(page)}: {word}"


def test_readme_says_of_each_chip_what_is_registered(generated: ModuleType) -> None:
    chips = generated.readme_chips()
    assert sorted(chips) == sorted(generated.operators())
    for operator, cells in chips.items():
        own = generated.registered()[operator]
        for backend, cell in zip(generated.BACKENDS, cells, strict=True):
            there = cell == "yes" or cell.startswith("emulated")
            assert there == (backend in own), f"{operator} on {backend}: {cell}"
            assert there or cell == "by sm80" or not own - {"cpu"}, f"{operator} on {backend}: {cell}"


def test_every_kernel_is_checked_on_the_emulator(generated: ModuleType) -> None:
    """The build finds the registrations in the sources. It runs an operator's cases on these backends."""
    found = {(op, f"emu:{backend}") for op, own in generated.registered().items() for backend in own - {"cpu"}}
    emulated = {(op, name) for op in _ops.OPERATORS for name in hopwell.backends(op) if name.startswith("emu:")}
    assert found == emulated


def test_every_generated_piece_can_be_made(generated: ModuleType) -> None:
    made = 0
    for page in PAGES:
        source = [page.read_text()]
        asked = len(generated.MARKER.findall(source[0]))
        assert asked == source[0].count("<!-- generated:"), name(page)
        generated.fill(None, name(page), source)
        made += asked
    assert made > 5 * len(generated.operators())


def test_raw_pages_say_what_the_site_has_in_a_place(generated: ModuleType) -> None:
    import raw

    assert [name(page) for page in raw.pages() if page.read_text() != raw.written(page)] == []
    for page in PAGES:
        for found in generated.MARKER.finditer(page.read_text()):
            for link in re.findall(r"\]\(([^)#]+)\)", found[0]):
                assert (page.parent / link).exists(), f"{name(page)}: {link}"


def test_a_page_is_printed_with_its_pieces() -> None:
    page = "docs/performance/sparse_mla_forward.md"
    command = [sys.executable, "docs/generated.py", page]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "TFLOP/s" in printed and "raw page" not in printed and "raw page" in (ROOT / page).read_text()


def test_the_command_is_described_as_it_is_declared(generated: ModuleType) -> None:
    declared = (ROOT / "src" / "cli" / "main.cpp").read_text()
    described = generated.command()
    for kind, mark in (("subcommand", "## hopwell "), ("(?:option|flag|flag_callback)", "| `")):
        assert described.count(mark) == len(re.findall(rf"add_{kind}\(", declared)) > 0
    assert "one backend; by default all this machine has" in described


def test_pages_know_the_refusals_that_tests_have_recorded(generated: ModuleType) -> None:
    assert "needs d_qk 576 or 512" in generated.refusals()["sparse_mla_forward", "sm90"]
    assert "needs d_v 512" in generated.other_refusals("sparse_mla_backward")


def test_pictures_are_those_of_the_records() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    command = [sys.executable, str(ROOT / "docs" / "plots.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_readmes_figure_is_that_of_the_record(generated: ModuleType) -> None:
    """The figure of deterministic gradients; all other figures of the README are in pictures."""
    text = " ".join((ROOT / "README.md").read_text().split())
    found = re.search(r"`deterministic`, the backward runs at ([\d.]+) to ([\d.]+) of its speed", text)
    assert found is not None
    rows = json.loads((RESULTS / "h200" / "sparse_mla_backward.json").read_text())["results"]
    seconds = {(row.get("run"), row["shape"]): row["median_seconds"] for row in rows}
    name = " deterministic=1"
    pairs = [(key, (key[0], key[1] + name)) for key in seconds if (key[0], key[1] + name) in seconds]
    ratios = [f"{seconds[default] / seconds[deterministic]:.2f}" for default, deterministic in pairs]
    assert len(ratios) > 1
    assert (min(ratios), max(ratios)) == found.groups()


def test_the_readmes_gain_of_two_gpus_is_that_of_the_record() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    found = re.search(r"On two H100s a sequence of ([\d,]+) tokens trains ([\d.]+) times as fast as on one", text)
    assert found is not None
    one, two = json.loads((RESULTS / "h100" / "context_parallel.json").read_text())["results"]
    assert (one["gpus"], two["gpus"]) == (1, 2)
    assert found[1] == f"{two['settings']['s']:,}"
    assert found[2] == f"{two['tokens_per_second'] / one['tokens_per_second']:.2f}"


# ---- figures ---------------------------------------------------------------------------------------------------------

FIGURES = [ROOT / "docs" / "performance.md", *sorted((ROOT / "docs" / "performance").glob("*.md"))]
FIGURE = re.compile(
    r"\d[\d.,–]*\s?(?:ms|µs|ns|s|[TGM]FLOP/s|[TG]B/s|GHz|tokens/s|%)(?![\w-])"
    r"|\d[\d.,–]*(?: ×| times) (?:as|its)|(?<![\w.,-])\d+\.\d+(?![.\d])"
)


def typed_figures(text: str) -> list[str]:
    """Returns figures that a page's text contains, with their line numbers. Sections that are marked as counts are
    exempt.
    """
    found, counted = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#"):
            counted = "by count" in line.lower()
        if not counted and not line.startswith("<!-- generated:"):
            found += [f"{number}: {figure[0]}" for figure in FIGURE.finditer(line)]
    return found


@pytest.mark.parametrize("page", FIGURES, ids=name)
def test_figures_of_the_performance_pages_are_generated(page: Path) -> None:
    """Tables are made from records when the site is built; a figure without a record belongs to docs/lessons.md."""
    assert typed_figures(page.read_text()) == []


LESSONS = ROOT / "docs" / "lessons.md"
LESSONS_ROWS = 200
CARD = re.compile(r"\b(?:H100|H200|Hopper|CPU|count)\b")


def lessons(text: str) -> list[str]:
    """Returns the rows of all tables of the page, without their heads."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if not re.match(r"\| (?:idea|---) \|", row)]


def lessons_without_a_card(text: str) -> list[str]:
    return [row for row in lessons(text) if typed_figures(row.split(" | ")[1]) and not CARD.search(row)]


def test_every_lesson_is_a_row_with_its_card() -> None:
    """Only this page may contain measured figures in its text: idea, result with the card, reason."""
    text = LESSONS.read_text()
    assert 0 < len(lessons(text)) <= LESSONS_ROWS
    assert [row for row in lessons(text) if row.count(" | ") != 2] == []
    assert lessons_without_a_card(text) == []


def test_a_lesson_without_its_card_is_noticed() -> None:
    row = "| a larger ring | 1.94 → 1.87 ms{} | more bytes in flight |"
    assert lessons_without_a_card(row.format("")) == [row.format("")]
    assert lessons_without_a_card(row.format(" (H200)")) == []


@pytest.mark.parametrize(
    "line",
    [
        "takes 1.94 ms",
        "| h_q 64 | **0.302** |",
        "97 % of it",
        "3,001 tokens/s",
        "a gain of 5–11 %",
        "is 3 times as fast",
    ],
)
def test_a_typed_figure_is_noticed(line: str) -> None:
    assert typed_figures(f"# Page\n\n{line}\n")
    assert not typed_figures(f"## Budget, by count\n{line}\n")
    assert typed_figures(f"## Budget, by count\n## Time\n{line}\n")


def filled(generated: ModuleType, page: Path) -> str:
    source = [page.read_text()]
    generated.fill(None, name(page), source)
    return source[0]


def test_pages_follow_the_records(generated: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A page's table shows every record: if a figure of the record changes, the table changes."""
    import figures

    asked = [found.groups() for page in PAGES for found in generated.MARKER.finditer(page.read_text())]
    asked = [(piece, arguments) for piece, arguments in dict.fromkeys(asked) if piece in figures.GENERATORS]

    def made(piece: str, arguments: str) -> str:
        return figures.GENERATORS[piece](*([arguments] if arguments else []))

    before = [made(*call) for call in asked]
    shutil.copytree(RESULTS, tmp_path / "results")
    monkeypatch.setattr("records.FOLDER", tmp_path / "results" / "h200")
    monkeypatch.setattr("json.loads", functools.cache(json.loads))  # no caller modifies the result
    for record in sorted((tmp_path / "results").rglob("*.json")):
        text = record.read_text()
        if record.name == "certification.json":  # it has comparisons and no times; tests/arch reads it
            continue
        record.write_text(re.sub(r"(?<=[ \[])\d+\.\d+", lambda found: str(float(found[0]) * 1.5), text))
        assert any(made(*call) != text for call, text in zip(asked, before, strict=True)), f"no page has {record.name}"
        record.write_text(text)


def test_a_table_says_what_its_record_says(generated: ModuleType) -> None:
    """Reads the record without the program that makes the tables."""
    rows = {
        row["shape"]: row for row in json.loads((RESULTS / "h200" / "sparse_mla_forward.json").read_text())["results"]
    }
    page = filled(generated, ROOT / "docs" / "performance" / "sparse_mla_forward.md")
    row = rows["h128-64k"]
    cells = next(line for line in page.splitlines() if line.startswith("| 128 heads |")).split(" | ")
    assert cells[3] == f"**{row['share_of_matmul']:.3f}** ({row['flops'] / row['median_seconds'] / 1e12:.0f})"
    shares = {
        f"128 heads, {size} K": (bar, rows[f"h128-{size}k"]["share_of_matmul"]) for size, bar in ((8, 0.90), (32, 0.82))
    }
    missed = [f"{of} by {bar - share:.3f}" for of, (bar, share) in shares.items() if share < bar]
    assert f"missed: {'; '.join(missed)}." in page


def test_a_target_needs_a_record(generated: ModuleType) -> None:
    for call in ("measured nvfp4_gemv 1x1=0.5", "over_read paged_attention ragged=1.03 nothing=1"):
        piece, _, arguments = call.partition(" ")
        with pytest.raises(ValueError, match=r"targets for shapes that have no record: (1x1|nothing)"):
            generated.GENERATORS[piece](arguments)


def test_version_is_one() -> None:
    version = re.search(r"project\(hopwell VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert version is not None
    assert f"\nversion: {version[1]}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {version[1]}" in (ROOT / "CHANGELOG.md").read_text()


def test_readme_has_no_long_paragraph() -> None:
    text = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line for line in paragraph.splitlines() if not line.startswith(("|", "- ", "  ", "    "))]
        assert len(lines) <= 5, paragraph


def test_every_local_link_leads_somewhere() -> None:
    """Checks links in the files that GitHub displays; `make docs` checks links within the site."""
    for page in (p for p in ROOT.glob("*.md")):
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            assert re.match(r"[a-z]+:", link) or (page.parent / link).exists(), f"{name(page)}: {link}"
