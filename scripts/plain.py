#!/usr/bin/env python3
"""Finds words and phrases that a reader from outside has to decode, in comments, texts of code and documents.

    scripts/plain.py [FILE ...]      all tracked files by default; exit status 1 if it finds one

A word leaves the code base first and then enters this table, so that it does not come back.
"""

import re
import subprocess
import sys
from pathlib import Path

BETTER = {
    r"so many (?!more|that)": "the number, or the variable",
    r"whoever": "the thread, the CTA or the caller",
    r"(gives?|takes?|brings?|tells?|says?) (back|away|over)": "returns, releases, forwards",
    r"for the sake of": "for",
    r"limb": "bf16 split term",
    r"inbox": "peer receive buffer",
    r"octets?": "8-element vector",
    r"abreast": "interleaved",
    r"handover": "split-K fix-up",
    r"shrinks": "rescales",
    r"anew": "again",
    r"whence|thereof|therein|wherein|hereby": "a plain clause",
    r"beforehand": "before",
}
WORDS = re.compile(r"\b(?:" + "|".join(f"(?P<n{i}>{words})" for i, words in enumerate(BETTER)) + r")\b", re.IGNORECASE)
# Being rewritten. A file leaves this list with its words.
LATER = re.compile(r"^(benchmarks/blackwell/|python/hopwell/bench/operators/paged_attention)")
CODE = (".cpp", ".hpp", ".cu", ".h", ".inl")
SUFFIXES = (*CODE, ".py", ".md", ".cmake")


def prose_of(path: str, line: str) -> str:
    """A document's line, or the comment and the strings with spaces of a line of code."""
    if not path.endswith(CODE):
        return line
    comment = re.search(r"//(.*)|^\s*/?\*+\s(.*)", line)
    return " ".join([comment[0] if comment else "", *re.findall(r'"([^"]* [^"]*)"', line)])


def main(files: list[str]) -> int:
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split("\n")
    found = 0
    for path in files or tracked:
        if not path.endswith(SUFFIXES) or LATER.search(path) or path == "scripts/plain.py" or not Path(path).is_file():
            continue
        for number, line in enumerate(Path(path).read_text().splitlines(), 1):
            for match in WORDS.finditer(prose_of(path, line)):
                better = list(BETTER.values())[int((match.lastgroup or "n0")[1:])]
                print(f"{path}:{number}: {match[0].strip()!r}: write {better}")
                found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
