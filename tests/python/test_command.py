"""The `hopwell` command: what it says to wrong command lines, what it leaves out, and output that can't be written."""

import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree
from pathlib import Path

import hopwell
import numpy as np
import pytest
import torch

COMMAND = Path(sys.executable).with_name("hopwell")
OPERATORS = ("sparse_mla_forward", "nvfp4_gemv", "lightning_indexer_backward")  # some
CASE = ("check", "nvfp4_gemv", "--case", "basic", "--backend", "cpu")  # the quickest work there is


def run(*arguments: str, output: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments], stdout=output, stderr=subprocess.PIPE, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("", ["a command is needed", "info, check, bench, emulate"]),
        ("chek", ["no command 'chek'", "info, check, bench"]),
        ("--frob", ["no option '--frob'", "--help, --version"]),
        ("info --frob", ["hopwell info: no option '--frob'", "--help"]),
        ("info twice", ["'twice' was not expected"]),
        ("check --frob 3", ["hopwell check: no option '--frob'", "--backend", "--case", "--seeds", "--json"]),
        ("check nothing", ["nothing", *OPERATORS]),
        ("check --seeds 0", ["--seeds", "1 to 1000000"]),
        ("check --seeds -1", ["--seeds", "1 to 1000000"]),
        ("emulate nvfp4_gemv --backend emu:sm80 --case basic --report /dev/null --seed -1", ["--seed", "-1"]),
        ("check --case h_q_46", ["no case 'h_q_46'; nearest of ", "h_q_64"]),
        ("check nvfp4_gemv --case bassic", ["no case 'bassic' of nvfp4_gemv; nearest of ", " cases: basic, "]),
        ("bench", ["hopwell bench: OP is required", *OPERATORS]),
        ("bench nothing", ["nothing", *OPERATORS]),
        ("bench nvfp4_gemv --frob=1", ["hopwell bench: no option '--frob'", "--backend", "--shape", "--json"]),
        ("bench nvfp4_gemv --backend sm1", ["sm1", "cpu"]),
        ("emulate", ["hopwell emulate: OP is required", *OPERATORS]),
        ("emulate nvfp4_gemv", ["hopwell emulate", "--backend is required"]),
    ],
)
def test_a_wrong_command_line_is_told_what_would_be_right(arguments: str, names: list[str]) -> None:
    result = run(*arguments.split())
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    for name in names:
        assert name in result.stderr


# ---- check --list --------------------------------------------------------------------------------------------------


def test_the_cases_are_listed_with_those_that_a_backend_does_not_support(tmp_path: Path) -> None:
    result = run("check", "--list", "kv_compress", "nvfp4_gemv", "--json", str(tmp_path / "cases.json"))
    assert result.returncode == 0, result.stderr
    compress, gemv = json.loads((tmp_path / "cases.json").read_text())["operators"]
    assert (compress["operator"], gemv["operator"]) == ("kv_compress", "nvfp4_gemv")
    assert compress["unsupported"] == [
        {"target": "sm80", "reason": "needs d that is a multiple of 8", "cases": ["odd_width"]}
    ]
    assert "odd_width" in compress["cases"]
    assert {row["target"] for row in gemv["unsupported"]} == {"sm100"}
    assert {"basic", "rows_129_blocked"} <= set(gemv["cases"])
    assert re.search(r"sm80 +1 +needs d that is a multiple of 8\n", result.stdout)


# ---- check --case --------------------------------------------------------------------------------------------------


def cases_named(pattern: str, place: Path) -> set[str]:
    result = run("check", "nvfp4_gemv", "--backend", "cpu", "--case", pattern, "--json", str(place))
    if result.returncode != 0:
        assert result.stderr.startswith(f"hopwell: no case '{pattern}' of nvfp4_gemv runs on cpu; nearest of ")
        assert len(result.stderr) < 300 + len(pattern)  # not all names
        return set()
    return {record["case"] for record in json.loads(place.read_text())["results"]}


def test_names_of_cases_are_matched_whole_with_stars_and_question_marks(tmp_path: Path) -> None:
    def named(pattern: str) -> set[str]:
        return cases_named(pattern, tmp_path / "results.json")

    assert named("basic") == {"basic"}
    assert named("alpha*") == {"alpha", "alpha_zero"}
    assert named("alph?") == {"alpha"}
    assert named("*_1*k*") == {"rows_129_blocked"}
    assert named("*?blocked") == named("*blocked") > {"rows_129_blocked", "nan_scales_blocked"}
    for nothing in ("basi", "asic", "basic?", "rows_.*", "b*c*b", "?"):
        assert named(nothing) == set()


@pytest.mark.parametrize("pattern", ["*a" * 1000 + "b", "(" * 100_000, "(a*)*" * 20, "[", "\\"])
def test_no_pattern_hangs_or_crashes(pattern: str, tmp_path: Path) -> None:
    """As regular expressions the third takes for ever, and long ones end in a segmentation fault."""
    assert cases_named(pattern, tmp_path / "results.json") == set()


# ---- check --model -------------------------------------------------------------------------------------------------


@pytest.mark.skipif("emu:sm100" not in hopwell.backends("nvfp4_gemv"), reason="built without the emulator")
def test_the_model_of_time_is_printed_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    place = tmp_path / "results.json"
    arguments = ("check", "nvfp4_gemv", "--backend", "emu:sm100", "--case", "basic", "--seeds", "2", "--model")
    result = run(*arguments, "--json", str(place))
    assert result.returncode == 0, result.stderr
    header, *rows = result.stdout.split("operator ")[2].splitlines()[:3]
    assert header.split()[:3] == ["case", "kernel", "CTAs"]
    assert [row.split()[:4] for row in rows] == [["nvfp4_gemv", "basic", "block_scaled.hpp", "1"]] * 2
    records = json.loads(place.read_text())["results"]
    assert len(records) == 2
    for record in records:
        (launch,) = record["model"]  # of the two calls of a case, one
        assert (launch["chip"], launch["kernel"], launch["ctas"]) == ("B200", "block_scaled.hpp", 1)
        # Four products of M 128, N 8 and K 64: 136 bytes of operands a row of K read, 16 rows of K at the full rate.
        assert launch["cycles"]["tensor pipe"] == 4 * (128 + 8) * 32 / 128
        assert launch["full_rate_cycles"] == 4 * 2 * 128 * 8 * 16 / 8192
        assert launch["flops"] == 4 * 2 * 128 * 8 * 64
        longest = max((unit for unit in launch["cycles"] if unit != "HBM"), key=launch["cycles"].__getitem__)
        assert launch["binds"] == longest
        assert 0 < launch["cap"] < launch["full_rate_cycles"] / launch["cycles"][longest]  # it multiplies padding
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("backend", [(), ("--backend", "cpu")])
def test_the_model_of_time_needs_a_chip(backend: tuple[str, ...]) -> None:
    result = run("check", "nvfp4_gemv", "--case", "basic", "--model", *backend)
    assert result.returncode == 2
    got = backend[-1] if backend else "none"
    assert result.stderr == f"hopwell: check: --model needs --backend emu:sm90 or emu:sm100; got {got}\n"


# ---- emulate -------------------------------------------------------------------------------------------------------

EMULATED = pytest.mark.skipif("emu:sm100" not in hopwell.backends("nvfp4_gemv"), reason="built without the emulator")


def emulate(operator: str, backend: str, case: str, page: Path) -> subprocess.CompletedProcess[str]:
    return run("emulate", operator, "--backend", backend, "--case", case, "--report", str(page))


def cells(page: xml.etree.ElementTree.Element) -> dict[str, list[str]]:
    """Rows of the page's tables by their first cell."""
    rows = page.iter("{http://www.w3.org/1999/xhtml}tr")
    return {row[0].text or "": [cell.text or "" for cell in row[1:]] for row in rows}


@EMULATED
def test_a_case_on_the_emulator_becomes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = emulate("nvfp4_gemv", "emu:sm100", "basic", page)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"nvfp4_gemv basic on emu:sm100: {page}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    root = xml.etree.ElementTree.parse(page).getroot()
    text = "".join(root.itertext())
    assert "1. block_scaled.hpp" in text  # of the one call
    assert "2. " not in text
    assert "4 products" in text  # as the model of time has it, above
    table = cells(root)
    assert table["tcgen05.mma"][0] == "4"
    assert table["tensor pipe"] == [str(4 * (128 + 8) * 32 // 128)]
    assert table["shared memory: read by products"][0] == f"{4 * (128 + 8) * 32:,}"
    assert any("phase 0: " in (title.text or "") for title in root.iter("{http://www.w3.org/2000/svg}title"))


@EMULATED
def test_a_page_shows_every_launch_of_a_case(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert emulate("sparse_mla_backward", "emu:sm90", "h_q_128", page).returncode == 0
    headings = xml.etree.ElementTree.parse(page).getroot().iter("{http://www.w3.org/1999/xhtml}h2")
    names = [heading.text or "" for heading in headings]
    assert [name.split(".")[0] for name in names] == [str(i + 1) for i in range(len(names))]
    assert len(names) > 1


@EMULATED
@pytest.mark.parametrize(
    ("operator", "backend", "case", "code", "words"),
    [
        (
            "nvfp4_gemv",
            "emu:sm100",
            "nothing",
            2,
            "emulate: no case 'nothing' of nvfp4_gemv runs on emu:sm100; nearest of ",
        ),
        (
            "paged_attention",
            "emu:sm100",
            "basic",
            2,
            "emulate: paged_attention has no kernel for emu:sm100; backends: cpu",
        ),
        ("sparse_mla_forward", "emu:sm100", "no_queries", 2, "emulate: case 'no_queries' launches no kernel"),
        ("nvfp4_gemv", "cpu", "basic", 2, "hopwell emulate: --backend: cpu not in {emu:sm80,emu:sm90,emu:sm100}"),
        ("nothing", "emu:sm100", "basic", 2, "hopwell emulate: OP: nothing not in {attention_distribution"),
    ],
)
def test_what_cannot_be_emulated_is_said_and_nothing_written(
    operator: str, backend: str, case: str, code: int, words: str, tmp_path: Path
) -> None:
    result = emulate(operator, backend, case, tmp_path / "page.html")
    assert result.returncode == code
    assert words in result.stderr
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


@EMULATED
def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    result = emulate("nvfp4_gemv", "emu:sm100", "basic", tmp_path / "missing" / "page.html")
    assert (result.returncode, result.stdout) == (2, "")
    assert f"--report: cannot write {tmp_path / 'missing' / 'page.html'}: No such file or directory" in result.stderr
    place = tmp_path / "full"
    place.symlink_to("/dev/full")  # written to, not replaced by a file
    result = emulate("nvfp4_gemv", "emu:sm100", "basic", place)
    assert (result.returncode, result.stdout) == (1, "")
    assert f"cannot write {place}: No space left on device" in result.stderr
    assert place.is_symlink()


@EMULATED
@pytest.mark.parametrize(
    ("variable", "expected", "values"),
    [
        ("SMS", "a number from 1 to 2147483647", ("abc", "0", "-3", "4x", "")),
        ("DEVICE", "a100, h100, h200, b200, rtx-4090 or h100-mig", ("h300", "H100", "")),
        ("SEED", "a number from 0 to 2^64 - 1", ("seven", "-1", "7.5", "")),
        ("CHECKER", "on or off", ("Off", "0")),
    ],
)
def test_what_the_emulator_reads_from_the_environment_is_checked(
    variable: str, expected: str, values: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a call: the command sets seed and checker itself."""
    row = np.ones((1, 64), np.float32)
    for value in values:
        monkeypatch.setenv(f"HOPWELL_EMULATOR_{variable}", value)
        with pytest.raises(
            RuntimeError, match=re.escape(f"HOPWELL_EMULATOR_{variable} must be {expected}; got {value}")
        ):
            hopwell.normalize_l1(row, backend="emu:sm80")


@EMULATED
@pytest.mark.parametrize("value", ["page.html", "b300:page.html", "b200:"])
def test_a_report_in_the_environment_names_chip_and_file(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOPWELL_EMULATOR_REPORT", value)
    result = run("check", "nvfp4_gemv", "--backend", "emu:sm100", "--case", "basic")
    assert result.returncode == 1
    assert (
        f"nvfp4_gemv: emulated launch: HOPWELL_EMULATOR_REPORT must be b200:FILE or h200:FILE; got {value}\n"
        in result.stdout
    )
    assert list(tmp_path.iterdir()) == []


# ---- bench ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif("emu:sm90" not in hopwell.backends("lightning_indexer"), reason="built without the emulator")
def test_a_shape_that_a_backend_refuses_is_left_out_by_name(tmp_path: Path) -> None:
    small = "s_q=1,s_kv=64,topk=16,h_index=4"
    arguments = ("bench", "lightning_indexer", "--backend", "emu:sm90", "--shape")
    both = run(*arguments, f"prefill_fp32,prefill,{small}", "--json", str(tmp_path / "bench.json"))
    assert both.returncode == 0, both.stderr
    assert "left out: prefill_fp32" in both.stdout
    assert "needs bfloat16 or float8_e4m3fn q_index and k_index" in both.stdout
    record = json.loads((tmp_path / "bench.json").read_text())
    shapes = f"--shape prefill_fp32,prefill,{small}"
    assert record["command"] == f"hopwell bench lightning_indexer --backend emu:sm90 {shapes}"
    assert [result["shape"].split()[0] for result in record["results"]] == ["prefill"]
    assert [(left["shape"].split()[0], left["backend"]) for left in record["left_out"]] == [
        ("prefill_fp32", "emu:sm90")
    ]

    neither = run(*arguments, f"prefill_fp32,{small}")
    assert neither.returncode == 1
    assert "left out: prefill_fp32" in neither.stdout
    assert neither.stderr == "hopwell: nothing of lightning_indexer could be timed\n"


def test_settings_change_the_shape_before_them(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    shapes = ["--shape", "training_step,rows=1,columns=8", "--shape", "training_step,rows=2,columns=16"]
    result = run("bench", "normalize_l1", "--backend", "cpu", *shapes, "--json", str(file))
    assert result.returncode == 0, result.stderr
    timed = [row["settings"] for row in json.loads(file.read_text())["results"]]
    assert [(row["rows"], row["columns"]) for row in timed] == [("1", "8"), ("2", "16")]


def test_each_shape_option_is_a_shape_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    shapes = ["--shape", "rows=3,columns=8", "--shape", "columns=16,rows=4"]
    result = run("bench", "normalize_l1", "--backend", "cpu", *shapes, "--json", str(file))
    assert result.returncode == 0, result.stderr
    record = json.loads(file.read_text())
    assert [(row["settings"]["rows"], row["settings"]["columns"]) for row in record["results"]] == [
        ("3", "8"),
        ("4", "16"),
    ]
    assert record["command"].endswith("--shape rows=3,columns=8 --shape columns=16,rows=4")

    empty = run("bench", "normalize_l1", "--backend", "cpu", "--shape", "")
    assert empty.returncode == 2 and "normalize_l1 has no shape ''; shapes: training_step" in empty.stderr


def test_both_benchmarks_name_settings_alike() -> None:
    """`hopwell bench` may have more of them: layouts, dtypes and what its cases vary."""
    from hopwell.bench.operators import OPERATORS

    for name, operator in OPERATORS.items():
        refused = run("bench", name, "--backend", "cpu", "--shape", "no=1").stderr
        known = set(refused.split("settings: ")[1].replace(",", " ").split())
        assert set(operator.settings({})) - {"fp8", "row", "idle"} <= known, (name, refused)


SIZES = {
    "sparse_mla_forward": "s_q h_q s_kv topk d_qk d_v",
    "sparse_mla_backward": "s_q h_q s_kv topk d_qk d_v",
    "attention_distribution": "s_q h_q s_kv topk d_qk",
    "paged_attention": "b q_len h_q h_kv d block context longest",
    "nvfp4_gemv": "M K L",
    "nvfp4_linear": "n N K",
    "nvfp4_linear_backward": "n N K",
    "nvfp4_matmul": "M N K",
    "nvfp4_quantize": "rows K",
    "nvfp4_dequantize": "rows K",
    "lightning_indexer": "s_q h_index s_kv topk d_index",
    "lightning_indexer_backward": "s_q h_index s_kv topk d_index",
    "indexer_dense_loss": "s h_q h_index d_qk d_index",
    "normalize_l1": "rows columns",
}


@pytest.mark.parametrize(("operator", "sizes"), SIZES.items())
def test_settings_that_no_memory_holds_are_an_error(operator: str, sizes: str) -> None:
    """Their products wrap; what was smaller than it said was written past its end."""
    for name in sizes.split():
        result = run("bench", operator, "--backend", "cpu", "--shape", f"{name}={2**62}")
        assert result.returncode == 1, (name, result.returncode, result.stderr)
        assert result.stderr.startswith("hopwell: ")
        assert result.stderr.count("\n") == 1


# ---- output that cannot be written ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "reason"),
    [("missing/results.json", "No such file or directory"), (".", "Is a directory"), ("", "without a name")],
)
@pytest.mark.parametrize("work", [("check",), ("bench", "sparse_mla_forward")])
def test_results_that_cannot_be_written_are_said_before_the_work(
    work: tuple[str, ...], place: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    result = run(*work, "--json", place)
    assert time.monotonic() - began < 10  # the work takes minutes
    assert result.returncode == 2
    assert "cannot write" in result.stderr
    assert reason in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_results_that_could_not_be_written_are_an_error(tmp_path: Path) -> None:
    place = tmp_path / "full"
    place.symlink_to("/dev/full")  # written to, not replaced by a file
    result = run(*CASE, "--json", str(place))
    assert result.returncode == 1
    assert f"cannot write {place}: No space left on device" in result.stderr
    assert place.is_char_device()


def test_only_the_file_that_is_named_is_touched(tmp_path: Path) -> None:
    """Neither what lies beside it, under a name like a temporary one, nor a link that leads to it."""
    beside, target, link = tmp_path / "link.json.part", tmp_path / "results.json", tmp_path / "link.json"
    beside.write_text("precious")
    link.symlink_to("results.json")
    for _ in range(2):  # where the link leads to nothing yet, and to a file
        assert run(*CASE, "--json", str(link)).returncode == 0
        assert link.is_symlink()
        assert json.loads(target.read_text())["results"][0]["result"] == "passed"
        target.write_text("old")
    assert beside.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "link.json.part", "results.json"]


def test_results_replace_a_file_whole(tmp_path: Path) -> None:
    place = tmp_path / "results.json"
    place.write_text("old")
    assert run(*CASE, "--json", str(place)).returncode == 0
    assert json.loads(place.read_text())["results"][0]["result"] == "passed"
    assert list(tmp_path.iterdir()) == [place]


@pytest.mark.parametrize("arguments", [("info",), ("--help",), ("--version",), ("check", "--help"), CASE])
def test_standard_output_that_is_full_is_an_error(arguments: tuple[str, ...]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        result = run(*arguments, output=full)
    finally:
        os.close(full)
    assert result.returncode == 1
    assert result.stderr == "hopwell: cannot write to standard output: No space left on device\n"


# ---- check --quick -------------------------------------------------------------------------------------------------


def test_a_quick_check_takes_the_first_cases(tmp_path: Path) -> None:
    def cases(*options: str) -> list[str]:
        place = tmp_path / "results.json"
        assert run("check", "nvfp4_gemv", "--backend", "cpu", *options, "--json", str(place)).returncode == 0
        return [record["case"] for record in json.loads(place.read_text())["results"]]

    few, all_cases = cases("--quick"), cases()
    assert few == all_cases[: len(few)]
    assert 2 <= len(few) < len(all_cases)


# ---- info ----------------------------------------------------------------------------------------------------------


def test_info_has_the_versions_for_people_and_for_programs() -> None:
    facts = json.loads(run("info", "--json").stdout)
    assert facts["hopwell"] == hopwell.__version__
    assert facts["torch"] == torch.__version__.partition("+")[0] or facts["torch"] == torch.__version__
    assert [b["name"] for b in facts["backends"] if not b["missing"]] == hopwell.backends()
    assert {"commit", "architectures", "driver", "CUDA", "threads", "python", "devices"} <= facts.keys()
    text = run("info").stdout
    for name in ("python", "torch", "commit", "architectures"):
        assert str(facts[name]) in text


# ---- info: what keeps a machine from its GPUs ----------------------------------------------------------------------

ENTRIES = (
    "cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceGetAttribute cuDeviceTotalMem_v2 cuDevicePrimaryCtxRetain "
    "cuCtxGetDevice cuCtxPushCurrent_v2 cuCtxPopCurrent_v2 cuStreamGetCtx"
)
DRIVER = """
int cuInit(unsigned flags) {{ return {init}; }}
int cuDriverGetVersion(int* version) {{ *version = {version}; return 0; }}
int cuGetErrorString(int error, const char** text) {{ *text = "no CUDA-capable device is detected"; return 0; }}
"""


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("int cuInit(unsigned flags) { return 0; }", "the NVIDIA driver is too old for any CUDA build of Hopwell"),
        (
            DRIVER.format(init=100, version=13000),
            "the NVIDIA driver does not start: no CUDA-capable device is detected",
        ),
        (DRIVER.format(init=0, version=99999), "driver of CUDA 99.99, which reports no device"),
    ],
)
def test_info_says_what_is_wrong_with_the_driver(source: str, sentence: str, tmp_path: Path) -> None:
    if "cuDriverGetVersion" in source:
        source += "".join(f"int {name}() {{ return 999; }}\n" for name in ENTRIES.split())
    (tmp_path / "driver.c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "driver.c"], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    info = subprocess.run(
        [COMMAND, "info"], env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert f"CUDA     {sentence}\n" in info
    cpu = subprocess.run([COMMAND, *CASE], env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert cpu.returncode == 0
