"""The output of `hopwell completion` and `hopwell man`, tried in the shells and in man."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).with_name("hopwell")
SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
}
START = {"bash": "", "zsh": "autoload -Uz compinit; compinit -u -D; "}


def output(*arguments: str) -> str:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, check=True, timeout=60).stdout


class Terminal:
    """A shell on its own terminal, where `hopwell` prints its arguments."""

    def __init__(self, shell: str, script: Path, folder: Path) -> None:
        environment = {"PATH": os.environ["PATH"], "TERM": "dumb", "HOME": str(folder), "PS1": "", "HISTFILE": ""}
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe(SHELLS[shell][0], SHELLS[shell], environment)
        self.seen = ""
        self.type(
            f"{START[shell]}source {script}; hopwell() {{ printf '<%s>' \"$@\"; echo '<'end'>'; }}; echo rea''dy\n"
        )
        self.wait("ready")

    def type(self, keys: str) -> None:
        os.write(self.terminal, keys.encode())

    def wait(self, text: str) -> str:
        """Returns the terminal's output up to this text."""
        limit = time.monotonic() + 60
        while text not in self.seen:
            assert time.monotonic() < limit, f"{text!r} did not come: {self.seen!r}"
            if select.select([self.terminal], [], [], 1)[0]:
                self.seen += os.read(self.terminal, 65536).decode()
        found, _, self.seen = self.seen.partition(text)
        return found

    def complete(self, line: str) -> list[str]:
        """Types the line, presses Tab at its end, then Return; returns the resulting arguments."""
        self.type(line + "\t")
        time.sleep(0.3)  # a shell may insert its completion after later keys
        self.type("\n")
        return re.findall(r"<([^<>\r\n]*)>", self.wait("<end>"))

    def close(self) -> None:
        os.close(self.terminal)
        os.waitpid(self.pid, 0)


@pytest.fixture(params=SHELLS)
def terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    if shutil.which(request.param) is None:
        pytest.skip(f"no {request.param} on this machine")
    script = tmp_path / "completion"
    script.write_text(output("completion", request.param))
    (tmp_path / "records of today.json").touch()
    found = Terminal(request.param, script, tmp_path)
    yield found
    found.close()


def test_a_shell_completes_what_has_one_end(terminal: Terminal) -> None:
    for line, arguments in {
        "hopwell che": ["check"],
        "hopwell --ver": ["--version"],
        "hopwell check --qui": ["check", "--quick"],
        "hopwell check --backend emu:sm9": ["check", "--backend", "emu:sm90"],
        "hopwell check --backend=emu:sm9": ["check", "--backend=emu:sm90"],
        "hopwell check nvfp4_gemv paged": ["check", "nvfp4_gemv", "paged_attention"],
        "hopwell bench --backend c": ["bench", "--backend", "cpu"],
        "hopwell bench normal": ["bench", "normalize_l1"],
        "hopwell bench normalize_l1 --json rec": ["bench", "normalize_l1", "--json", "records of today.json"],
        "hopwell completion f": ["completion", "fish"],
        "hopwell check --seeds 1": ["check", "--seeds", "1"],
        "hopwell info qui": ["info", "qui"],
    }.items():
        assert terminal.complete(line) == arguments, line


def test_fish_completes(tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("no fish on this machine")
    script = tmp_path / "hopwell.fish"
    script.write_text(output("completion", "fish"))

    def complete(line: str) -> list[str]:
        program = f"source {script}; complete -C '{line}'"
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        result = subprocess.run(
            ["fish", "--no-config", "-c", program], capture_output=True, text=True, check=True, env=environment
        )
        assert result.stderr == ""
        return [row.split("\t")[0] for row in result.stdout.splitlines()]

    assert complete("hopwell che") == ["check"]
    assert complete("hopwell check --backend emu:sm9") == ["emu:sm90"]
    assert complete("hopwell bench --qui") == []
    assert complete("hopwell check paged") == ["paged_attention"]
    assert set(complete("hopwell completion ")) == {"bash", "zsh", "fish"}


def test_an_unknown_shell_is_told_the_known_ones() -> None:
    result = subprocess.run([COMMAND, "completion", "tcsh"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    for name in ("SHELL", "tcsh", "bash", "zsh", "fish"):
        assert name in result.stderr


# ---- the manual page -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [["mandoc", "-T", "lint", "-W", "warning"], ["groff", "-z", "-ww", "-man"], ["man", "--warnings", "-l"]],
    ids=lambda program: program[0],
)
def test_the_manual_page_is_without_warnings(program: list[str], tmp_path: Path) -> None:
    if shutil.which(program[0]) is None:
        pytest.skip(f"no {program[0]} on this machine")
    page = tmp_path / "hopwell.1"
    page.write_text(output("man"))
    environment = os.environ | {"MANWIDTH": "100", "MANROFFOPT": "-ww", "LC_ALL": "C.UTF-8"}
    result = subprocess.run([*program, page], capture_output=True, text=True, check=False, env=environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert program[0] == "man" or result.stdout == ""


def test_the_manual_page_and_the_completions_have_every_option() -> None:
    """Compares with the help of each command."""
    page = output("man").replace("\\-", "-")
    scripts = [output("completion", shell) for shell in ("bash", "zsh", "fish")]
    commands = re.findall(r"^\.SS (\w+)$", page, re.MULTILINE)
    assert {"info", "check", "bench", "completion", "man"} <= set(commands)
    for command in commands:
        section = page.partition(f".SS {command}\n")[2].partition("\n.S")[0]
        options = re.findall(r"^  (?:-\w,)?(--[\w-]+)", output(command, "--help"), re.MULTILINE)
        assert "--help" in options
        for option in options:
            assert f"\\fB{option}\\fR" in section or option == "--help"
            for script in scripts:
                assert f"-l {option[2:]} " in script or option in script


def test_the_installed_pages_are_what_the_command_writes() -> None:
    """Reads them under share/ of the environment, which man and the shells search."""
    share = COMMAND.parents[1] / "share"
    for name, arguments in {
        "bash-completion/completions/hopwell": ("completion", "bash"),
        "zsh/site-functions/_hopwell": ("completion", "zsh"),
        "fish/vendor_completions.d/hopwell.fish": ("completion", "fish"),
    }.items():
        assert (share / name).read_text() == output(*arguments)
    of_the_day = re.compile(r"^\.TH HOPWELL 1 \S+", re.MULTILINE)
    installed = (share / "man" / "man1" / "hopwell.1").read_text()
    assert of_the_day.sub("", installed) == of_the_day.sub("", output("man"))
