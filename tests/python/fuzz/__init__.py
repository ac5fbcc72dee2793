"""A fuzzer of all operators: calls that hypothesis thinks of, right ones and wrong ones.

    memory.py   arrays between pages that cannot be touched
    draw.py     shapes, strides, aliasing and values
    right.py    a right call of each operator
    wrong.py    a right call with one thing wrong
    judge.py    what `hopwell.reference` says a call returns, and how far off it may be on the CPU
    judge_indexer.py    the same for the indexer's operators
    bounds.py   the comparison, and the bounds of GPUs, by operator, output and backend
    run.py      the checks that a call must pass; rounds of calls until time is up

Right calls also run on the backends of GPUs and on emulated ones, with the emulator's checks on. They run in processes
of their own:

    device.py   a call's memory on a device
    backends.py one call on one backend
    worker.py   a process: rounds of calls
    __main__.py the command `python -m fuzz`: starts workers, counts calls and refusals, reports failures

`test_fuzz.py` runs all of it: about a minute in `make test`, and a minute more on a machine with a GPU; an hour under
AddressSanitizer, an hour on the GPU and a quarter of an hour on the emulator in `make nightly`.
"""
