from common import (
    ATTN_SINK,
    D_V,
    DETERMINISTIC,
    INDICES,
    INDICES_ASCENDING,
    KV,
    SELECTION,
    SM_SCALE,
    WINDOW,
    Q,
)
from declare import KEYWORD_ONLY, Boolean, Operator, Output, PythonOnly, Tensor

sparse_mla_backward = Operator(
    "sparse_mla_backward",
    "Gradients of `sparse_mla_forward` with respect to q, kv, attn_sink and window_kv.",
    formula="""
        lse'   = log(exp(lse) + exp(attn_sink))          lse without a sink
        p      = exp(score - lse')
        delta  = sum_d out * d_out
        ds     = p * (d_out . v - delta) * sm_scale
        dq     = ds . kv
        dkv   += ds^T . q, and p^T . d_out in the first d_v columns
        d_sink = -sum_s exp(attn_sink - lse') * delta
    """,
    notes="""
        If out and lse are merged over shards of the keys, dq is the sum over the shards, and each call gives the
        whole d_sink: take it from one shard.
    """,
    arguments=(
        Tensor("d_out", "Gradient of out.", dtype="like q", shape="[s_q, h_q, d_v]"),
        Q,
        KV,
        INDICES,
        Tensor("out", "The forward's out.", dtype="like q", shape="[s_q, h_q, d_v]"),
        Tensor(
            "lse",
            "The forward's lse. No score may exceed it by more than 44: GPUs take exp(score - lse) as 2^64 there.",
            dtype="fp32",
            shape="[s_q, h_q]",
        ),
        SM_SCALE,
        D_V,
        KEYWORD_ONLY,
        ATTN_SINK,
        SELECTION,
        Boolean(
            "deterministic",
            DETERMINISTIC.doc
            + " It also gives the same dq of a query in every call that has the query. On a GPU it takes"
            " 4 * s_q * topk bytes of scratch.",
        ),
        PythonOnly(
            "dkv_dtype",
            "Dtype of dkv.",
            type="dtype",
            of="dkv d_window_kv",
            default="float32",
            choices=("float32", "bfloat16"),
        ),
        Boolean("accumulate", "Adds into the given fp32 dkv instead of overwriting it."),
        INDICES_ASCENDING,
        Boolean(
            "share_keys",
            "A hint that neighbouring queries select mostly the same keys, as in `sparse_mla_forward`. dq may then"
            " differ in its last bits with the neighbours, and a NaN or infinity in a key reaches all queries that"
            " are computed together with one that selects it. It has no effect with deterministic, attn or a window.",
        ),
        *WINDOW,
        Boolean(
            "attn_with_sink",
            "attn is sum_h exp(score - lse') instead of sum_h exp(score - lse). Needs attn and attn_sink.",
        ),
        PythonOnly("need_dq", "False leaves dq out.", type="bool", default=True),
        PythonOnly("need_dkv", "False leaves dkv out.", type="bool", default=True),
        PythonOnly("need_d_window_kv", "False leaves d_window_kv out.", type="bool", default=True),
        Output("dq", dtype="like q", shape="[s_q, h_q, d_qk]", optional=True, when="need_dq"),
        Output("dkv", dtype="fp32 | bf16", shape="the shape of kv", optional=True, when="need_dkv"),
        Output(
            "d_sink",
            "Needs attn_sink. A row adds to it unless its lse is +inf.",
            dtype="fp32",
            shape="[h_q]",
            optional=True,
            allocation="new",
            when="attn_sink",
        ),
        Output(
            "d_window_kv",
            "Gradient of window_kv. It has the dtype of dkv, and accumulate adds into it, too. Needs window_kv.",
            dtype="fp32 | bf16",
            shape="the shape of window_kv",
            optional=True,
            when="need_d_window_kv and window_kv is not None",
        ),
        Output(
            "attn",
            "sum_h exp(score - lse), the attention distribution over the entries of kv.",
            dtype="fp32",
            shape="[s_q, topk]",
            optional=True,
            allocation="given",
        ),
    ),
    python_check="check_accumulate(accumulate, window_kv, need_dkv, dkv, need_d_window_kv, d_window_kv)",
    returns=("dq", "dkv", "d_sink"),
    more_returns=("window_kv", "d_window_kv"),
    returns_doc="With window_kv, (dq, dkv, d_sink, d_window_kv). None stands for an output that is not needed, and for"
    " d_sink without a sink.",
)
