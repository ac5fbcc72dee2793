from declare import KEYWORD_ONLY, Boolean, Integer, Operator, Output, PythonOnly, Tensor

KV = Tensor(
    "kv",
    "Values of the tokens. w is d, or 2 * d with overlap. Rows may be halves of a wider matrix.",
    dtype="bf16 | fp32",
    shape="[s, w]",
)
GATE = Tensor("gate", "Logits of the pooling.", dtype="like kv", shape="[s, w]")
RATIO = Integer("ratio", "Tokens of a block, at least 1.")
POSITION_BIAS = Tensor(
    "position_bias",
    "Is added to the gate of the r-th token of each block: position_bias[r].",
    dtype="fp32",
    shape="[ratio, w]",
    optional=True,
)
OVERLAP = Boolean(
    "overlap",
    "Windows of two blocks: columns 0 .. d-1 of the previous block and columns d .. 2d-1 of the block itself.",
)
CU_SEQLENS = Tensor(
    "cu_seqlens",
    "Packed documents: document i has the rows cu_seqlens[i] .. cu_seqlens[i+1] - 1, clamped to 0 .. s. Given"
    " together with cu_compressed. Without them all rows are one document. No values are an error.",
    dtype="int32",
    shape="[documents + 1]",
    optional=True,
)
CU_COMPRESSED = Tensor(
    "cu_compressed",
    "Document i writes the compressed keys cu_compressed[i] .. cu_compressed[i+1] - 1, one for each whole block.",
    dtype="int32",
    shape="[documents + 1]",
    optional=True,
)

kv_compress = Operator(
    "kv_compress",
    "Gated pooling of blocks of tokens into compressed keys (DeepSeek-V4's compressor).",
    formula="""
        g[e,c]   = gate[t,o+c] + position_bias[r,o+c]       entry e of a window: token t, column offset o, place r
        w[e,c]   = exp(g[e,c]) / sum_e' exp(g[e',c])        each column c on its own
        out[j,c] = sum_e w[e,c] * kv[t,o+c]
    """,
    notes="""
        The window of compressed key j is the j-th block of `ratio` tokens of its document, and with overlap the block
        before it, if there is one. Tokens after a document's last whole block are in no window. An entry whose g is
        -inf is absent, whatever its value; a column without an entry gives 0. A g of +inf or NaN gives NaN in its
        column of its key. Rows of out that no document makes are 0. All arithmetic is fp32, rounded once.
    """,
    arguments=(
        KV,
        GATE,
        RATIO,
        KEYWORD_ONLY,
        POSITION_BIAS,
        OVERLAP,
        CU_SEQLENS,
        CU_COMPRESSED,
        PythonOnly(
            "out_dtype",
            "Dtype of out; None is kv's.",
            type="dtype",
            of="out",
            default=None,
            choices=("bfloat16", "float32"),
        ),
        Output(
            "out",
            "Compressed keys. Python allocates n = s // ratio rows, enough for any documents.",
            dtype="bf16 | fp32",
            shape="[n, d]",
            python_shape="compressed_shape(kv, ratio, overlap)",
        ),
    ),
    returns=("out",),
)

kv_compress_backward = Operator(
    "kv_compress_backward",
    "Gradients of `kv_compress` with respect to kv, gate and position_bias. The same bits every time.",
    formula="""
        d_kv[t,o+c]            = w[e,c] * d_out[j,c]
        d_gate[t,o+c]          = w[e,c] * d_out[j,c] * (kv[t,o+c] - out[j,c])
        d_position_bias[r,o+c] = sum over all windows of d_gate, not rounded
    """,
    notes="""
        Weights and out are computed again from kv and gate. Elements of d_kv and d_gate that are in no window are 0.
    """,
    arguments=(
        Tensor("d_out", "Gradient of out.", dtype="bf16 | fp32", shape="[n, d]"),
        KV,
        GATE,
        RATIO,
        KEYWORD_ONLY,
        POSITION_BIAS,
        OVERLAP,
        CU_SEQLENS,
        CU_COMPRESSED,
        Output("d_kv", dtype="like kv", shape="[s, w]", optional=True),
        Output("d_gate", dtype="like kv", shape="[s, w]", optional=True),
        Output(
            "d_position_bias",
            "Needs position_bias.",
            dtype="fp32",
            shape="[ratio, w]",
            optional=True,
            allocation="new",
            when="position_bias",
        ),
    ),
    returns=("d_kv", "d_gate", "d_position_bias"),
    returns_doc="d_position_bias is None without a position_bias.",
)
