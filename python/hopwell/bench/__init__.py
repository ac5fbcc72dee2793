"""Compares every operator with the same operation of other packages: `python -m hopwell.bench`.

Both sides run in one process on the same random inputs. First their results are compared; during this, memory that a
side does not write holds NaN. Then both sides and the ceiling of the machine are timed in turns. Each starts with cold
caches, because other memory is read before it. On a GPU the timed work is a CUDA graph if the peer can be captured. The
graph goes through several copies of the inputs, which together are larger than a cache. A ratio is the median over
neighbouring turns; above 1, Hopwell is faster. The share is relative to the ceiling: the ceiling is a matrix product
(bf16 of 8192³ on a GPU, fp32 of 2048³ on a CPU). For operators without products it is PyTorch's sum over the same
number of bytes.

    operators   the calls, and the shapes to measure
    compare     compares results and times
    record      describes the machine and the packages in a record
    check       compares a new run with committed records
    plot        draws a record
"""


class BadArgument(ValueError):  # noqa: N818
    """The command line is invalid; the text of the error is the whole message."""
