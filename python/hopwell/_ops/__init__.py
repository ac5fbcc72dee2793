"""The operators as Python functions: they allocate what is not given and call the compiled module."""

from typing import Any

from .. import _hopwell
from .._arrays import explaining, printable
from .kv_compress import kv_compress, kv_compress_backward
from .lightning_indexer import indexer_dense_loss, lightning_indexer, lightning_indexer_backward
from .nvfp4 import (
    nvfp4_dequantize,
    nvfp4_gemv,
    nvfp4_linear,
    nvfp4_linear_backward,
    nvfp4_matmul,
    nvfp4_quantize,
)
from .paged_attention import paged_attention
from .sparse_mla import attention_distribution, normalize_l1, sparse_mla_backward, sparse_mla_forward

_OPERATORS = {
    function.__name__: function
    for function in (
        sparse_mla_forward,
        sparse_mla_backward,
        attention_distribution,
        paged_attention,
        nvfp4_gemv,
        nvfp4_linear,
        nvfp4_linear_backward,
        nvfp4_matmul,
        nvfp4_quantize,
        nvfp4_dequantize,
        lightning_indexer,
        lightning_indexer_backward,
        indexer_dense_loss,
        normalize_l1,
        kv_compress,
        kv_compress_backward,
    )
}


def _checked(caller: str, operator: object) -> str:
    if isinstance(operator, str) and operator in _OPERATORS:
        return operator
    raise ValueError(f"{caller}: operator must be one of {', '.join(_OPERATORS)}; got {printable(operator)}")


def backends(operator: str | None = None, /) -> list[str]:
    """Names of the backends that run here, best first; of an operator, those that have a kernel for it."""
    return _hopwell.backends() if operator is None else _hopwell.backends(_checked("backends", operator))


def explain(operator: str, /, **arguments: Any) -> str:
    """Which backend would run a call, and why not the others: one line a backend, such as `cpu: slower than sm90`.

    `operator` is the name of a function here, `arguments` are its own, by name; nothing is run. Bad arguments raise
    what the call itself would raise.
    """
    function = _OPERATORS[_checked("explain", operator)]
    explanation = _hopwell.Explanation()
    before = explaining.set(True)
    try:
        function(**{**arguments, "backend": explanation})
    finally:
        explaining.reset(before)
    return explanation.text
