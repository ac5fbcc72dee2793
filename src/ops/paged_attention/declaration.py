from declare import KEYWORD_ONLY, Boolean, Choice, Enum, Integer, Number, Operator, Output, Tensor

paged_attention = Operator(
    "paged_attention",
    "Decode attention of one or a few query tokens per sequence over a paged KV cache, with relative positions.",
    formula="""
        logit_j = scale * ((q + u) . k_j + bias_j)
        out     = sum_j softmax(logit)_j * v_j
    """,
    notes="""
        Query i of q_len has position = context_len - q_len + i and sees the keys j <= position; delta = position - j.
        The relative positions come from Transformer-XL (Dai et al. 2019, arXiv:1901.02860). A query that sees no
        key, or whose logits are all -inf, has out 0 and lse -inf. If a query sees values of +-inf or NaN, out is the
        sum of these alone, however small their weights are. The weights count as positive also where they round to 0.
    """,
    arguments=(
        Tensor(
            "q",
            "Queries. q_len is 1 to 16, d a multiple of 8 from 32 to 256.",
            dtype="fp32 | fp16 | bf16",
            shape="[b, q_len, h_q, d] or [b, h_q, d]",
        ),
        Tensor(
            "k_cache",
            "Keys in blocks of 1 to 256. h_q is a multiple of h_kv.",
            dtype="like q",
            shape="[blocks, block, h_kv, d] (see layout)",
        ),
        Tensor("v_cache", "Values.", dtype="like q", shape="[blocks, block, h_kv, d] (see layout)"),
        Tensor(
            "block_tables",
            "Entry j / block is the block of key j. Keys of an invalid entry are masked. Entries past the context"
            " may be anything.",
            dtype="int32",
            shape="[b, max_blocks]",
        ),
        Tensor(
            "context_lens",
            "Number of keys of each sequence, the query tokens included. Clamped to 0 to max_blocks * block.",
            dtype="int32",
            shape="[b]",
        ),
        Number("scale", "Factor of the logits. Finite; on GPUs below 2.35e38, so that scale * log2(e) is an fp32."),
        KEYWORD_ONLY,
        Choice(
            "layout",
            "Layout of the cache.",
            enum=Enum(
                "cache_layout",
                "HOPWELL_CACHE",
                {
                    "nhd": "k and v [blocks, block, h_kv, d]",
                    "hnd": "k and v [blocks, h_kv, block, d]",
                    "vllm": "k [blocks, h_kv, d/x, block, x] with x = 16 bytes, v [blocks, h_kv, d, block]",
                },
            ),
        ),
        Tensor(
            "pos_bias_u",
            "Added to q before the product with K.",
            dtype="like q | fp32",
            shape="[h_q, d]",
            optional=True,
        ),
        Tensor(
            "bias",
            "A bias by key or by distance. Excludes r.",
            dtype="fp32 | fp16 | bf16",
            shape="[b or 1, h_q, q_len, keys] or [b or 1, h_q, extent]",
            optional=True,
        ),
        Choice(
            "bias_kind",
            "Whether bias has a column for each key or for each distance.",
            enum=Enum(
                "bias_kind",
                "HOPWELL_BIAS",
                {"key": "keys: bias_j = bias[b, h, i, j]", "distance": "distance: bias_j = bias[b, h, delta]"},
            ),
        ),
        Choice(
            "out_of_range",
            "The bias of a key beyond the last column of bias or r.",
            enum=Enum(
                "out_of_range",
                "HOPWELL_OUT_OF_RANGE",
                {"zero": "0", "clamp": "the last column's", "-inf": "-inf"},
            ),
        ),
        Boolean(
            "pre_scale",
            "Adds bias_j before the scale, as Transformer-XL does. Else the logit is scale * (q + u) . k_j + bias_j.",
            default=True,
        ),
        Tensor(
            "pos_bias_v",
            "Added to q before the product with r. Needs r.",
            dtype="like q | fp32",
            shape="[h_q, d]",
            optional=True,
        ),
        Tensor(
            "r",
            "The fused form of the bias: bias_j = (q + v) . r[h, delta].",
            dtype="like q | fp32",
            shape="[h_q or 1, extent, d]",
            optional=True,
        ),
        Tensor(
            "alibi_slopes", "Adds -slope * delta after the scale (ALiBi).", dtype="fp32", shape="[h_q]", optional=True
        ),
        Integer("window", "Only keys with delta < window are visible. 0: every key.", default=None),
        Output("out", dtype="like q", shape="the shape of q"),
        Output(
            "lse",
            "Log of the sum of exp(logit), a natural logarithm.",
            dtype="fp32",
            shape="the shape of q without d",
            optional=True,
        ),
    ),
    returns=("out", "lse"),
)
