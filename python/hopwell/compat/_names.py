"""Errors of operators in the words of the functions that call them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def named(function: str, **names: str) -> Iterator[None]:
    """Gives a ValueError of an operator the name of `function` and the caller's names of arguments.

    `names` has the caller's name for each argument of the operator that the caller calls otherwise.
    """
    try:
        yield
    except ValueError as error:
        operator, colon, text = str(error).partition(": ")
        if not colon or " " in operator:
            raise
        argument = re.match(r"\w+", text)
        if argument and argument[0] in names:
            text = names[argument[0]] + text[argument.end() :]
        plain = [name for name in names if "_" in name]  # the others are words of English, too
        if plain:
            text = re.sub(rf"\b({'|'.join(plain)})\b", lambda found: names[found[0]], text)
        raise ValueError(f"{function}: {text}") from None
