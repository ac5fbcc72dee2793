"""The operators as Python functions: they allocate what is not given and call the compiled module."""

from typing import Any

from .. import _hopwell
from .._arrays import explaining, printable
from .lightning_indexer import indexer_dense_loss, lightning_indexer, lightning_indexer_backward
from .nvfp4 import nvfp4_dequantize, nvfp4_gemv, nvfp4_linear, nvfp4_matmul, nvfp4_quantize
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
        nvfp4_matmul,
        nvfp4_quantize,
        nvfp4_dequantize,
        lightning_indexer,
        lightning_indexer_backward,
        indexer_dense_loss,
        normalize_l1,
    )
}


def explain(operator: str, /, **arguments: Any) -> str:
    """Which backend would run a call, and why not the others: one line a backend, such as `cpu: slower than sm90`.

    `operator` is the name of a function here, `arguments` are its own, by name; nothing is run. Bad arguments raise
    what the call itself would raise.
    """
    function = _OPERATORS.get(operator) if isinstance(operator, str) else None
    if function is None:
        raise ValueError(f"explain: operator must be one of {', '.join(_OPERATORS)}; got {printable(operator)}")
    explanation = _hopwell.Explanation()
    before = explaining.set(True)
    try:
        function(**{**arguments, "backend": explanation})
    finally:
        explaining.reset(before)
    return explanation.text
