"""Every operator beside the same operation of other packages: `python -m hopwell.bench`.

Both sides run in one process on the same random inputs. Their results are compared first; memory that either leaves
unwritten holds NaN then. They are timed in turns, with the ceiling of the machine, each from cold caches: other memory
is read before it. On a GPU they are replays of CUDA graphs where a peer can be captured, which go round copies of the
inputs that are larger together than a cache. A ratio is the median over neighbouring turns: above 1, Hopwell is
the faster. The share is of a matrix product (bf16 of 8192³ on a GPU, fp32 of 2048³ on a CPU) or, for operators without
products, of PyTorch's sum over as many bytes.

    operators   the calls, and the shapes that are measured
    compare     whether two agree, and how long they take
    record      what a record says of the machine and the packages
    check       a fresh run against committed records
    plot        a picture of a record
"""


class BadArgument(ValueError):  # noqa: N818
    """The command line asks for something that cannot be; its words are the whole message."""
