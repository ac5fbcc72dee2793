"""A fuzzer of all operators: calls that hypothesis thinks of, right ones and wrong ones.

    memory.py   arrays between pages that cannot be touched
    draw.py     shapes, strides, aliasing and values
    right.py    a right call of each operator
    wrong.py    a right call with one thing wrong
    judge.py    what `hopwell.reference` says a call returns, and how far off it may be
    run.py      the checks that a call must pass; rounds of calls until time is up

`test_fuzz.py` runs it: about a minute in `make test`, an hour under AddressSanitizer in `make nightly`.
"""
