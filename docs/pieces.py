"""Markdown building blocks for the generated pieces of pages."""

from __future__ import annotations


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def rst(text: str) -> str:
    return f"```{{eval-rst}}\n{text}\n```\n"


def folded(title: str, text: str) -> str:
    return f"::::{{dropdown}} {title}\n{text}\n::::\n"
