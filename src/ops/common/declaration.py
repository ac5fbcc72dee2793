"""Arguments that several operators share."""

from declare import Boolean, Choice, Enum, Integer, Number, NumberOrTensor, Output, Struct, Tensor

# ---- attention over selected keys ------------------------------------------------------------------------------------

Q = Tensor("q", "Queries.", dtype="bf16 | fp32 (CPU)", shape="[s_q, h_q, d_qk]")
KV = Tensor(
    "kv",
    "Keys. V is their first d_v columns. There is one head of keys.",
    dtype="like q",
    shape="[s_kv, 1, d_qk] or [s_kv, d_qk]",
)
INDICES = Tensor(
    "indices",
    "The keys that each query selects. Without indices every visible key is selected, in order, and topk is s_kv.",
    dtype="int32",
    shape="[s_q, 1, topk] or [s_q, topk]",
    optional=True,
)
LSE = Tensor("lse", "The forward's lse.", dtype="fp32", shape="[s_q, h_q]")
SM_SCALE = Number("sm_scale", "Factor of the attention's scores. Finite.")
D_V = Integer("d_v", "Number of columns of V, 1 to d_qk.", default=512, at_most="d_qk")
ATTN_SINK = Tensor(
    "attn_sink",
    "Logit of a sink that each head attends besides the keys. It may be +inf or -inf.",
    dtype="fp32",
    shape="[h_q]",
    optional=True,
)
INDICES_ASCENDING = Boolean(
    "indices_ascending",
    "A hint that the rows of indices ascend, as the indexer's do, so that no pass needs to order them. Rows that do"
    " not ascend give the same results, later.",
)
DETERMINISTIC = Boolean(
    "deterministic",
    "Gives the same bits every time, also where the fastest way would not. The CPU always does.",
)

SELECTION = Struct(
    "selection",
    "Which keys a query sees.",
    fields=(
        Tensor(
            "topk_length",
            "Only the first topk_length[s] entries of index row s count. Needs indices.",
            dtype="int32",
            shape="[s_q]",
            optional=True,
        ),
        Tensor(
            "q_positions",
            "Turns on causal masking: query s sees key t if (t + 1) * kv_stride <= q_positions[s] + 1, where t"
            " counts from k_start[s] if there are key ranges.",
            dtype="int32",
            shape="[s_q]",
            optional=True,
        ),
        Integer(
            "q_start",
            "Turns on causal masking with q_positions[s] = q_start + s. Excludes q_positions. Between -2^62 and 2^62.",
            default=None,
            zero_is_a_value=True,
        ),
        Integer("kv_stride", "Number of consecutive tokens that one key stands for, at least 1.", default=1),
        Tensor(
            "k_start",
            "Query s sees only the keys k_start[s] <= t < k_end[s], as documents that are packed one after another"
            " need. With k_end[s] <= k_start[s] it sees none. Needs k_end.",
            dtype="int32",
            shape="[s_q]",
            optional=True,
        ),
        Tensor("k_end", "See k_start.", dtype="int32", shape="[s_q]", optional=True),
    ),
    taken=("topk_length", "q_positions", "q_start", "kv_stride", "k_start", "k_end"),
)

WINDOW = (
    Tensor(
        "window_kv",
        "Window keys, which a query attends besides its selected keys, in one softmax. V is their first d_v columns."
        " Query s sees the rows t with max(lo, hi - window) <= t < hi, where lo and hi are w_start[s] and w_end[s]"
        " clamped to 0 .. s_w. Rows that no query sees are not read.",
        dtype="like kv",
        shape="[s_w, 1, d_qk] or [s_w, d_qk]",
        optional=True,
    ),
    Integer("window", "The most window keys that a query sees, at least 1. Needs window_kv.", default=None),
    Tensor(
        "w_start",
        "First row of window_kv that each query may see. Needs w_end. Without both, lo is 0 and hi is"
        " s_w - s_q + s + 1: the queries belong to the last rows of window_kv.",
        dtype="int32",
        shape="[s_q]",
        optional=True,
    ),
    Tensor("w_end", "See w_start.", dtype="int32", shape="[s_q]", optional=True),
)

# ---- the indexer -----------------------------------------------------------------------------------------------------

Q_INDEX = Tensor("q_index", "Index queries.", dtype="bf16 | fp32 (CPU, sm80)", shape="[s_q, h_index, d_index]")
K_INDEX = Tensor("k_index", "Index keys.", dtype="like q_index", shape="[s_kv, d_index]")
WEIGHTS = Tensor("weights", "Weight of each index head, of any sign.", dtype="fp32 | bf16", shape="[s_q, h_index]")
RELU = Boolean(
    "relu",
    "Applies relu to the product of q_index and k_index. Without it the score is the weighted sum of the products.",
    default=True,
)
ROW_WEIGHTS = Tensor(
    "row_weights",
    "Factor of each row's loss and gradient. A row of weight 0 adds nothing, whatever is in it.",
    dtype="fp32",
    shape="[s_q]",
    optional=True,
)
D_LOSS = NumberOrTensor(
    "d_loss_array",
    "Factor of the gradients, not of the loss. As a tensor it is read on the device, so that the caller need not wait.",
    value="d_loss",
    python="d_loss",
    optional=True,
)
INDEX_GRADIENTS = (
    Output("d_q_index", dtype="like q_index", shape="[s_q, h_index, d_index]", allocation="new"),
    Output("d_k_index", dtype="fp32", shape="[s_kv, d_index]", allocation="new"),
    Output("d_weights", dtype="like weights", shape="[s_q, h_index]", allocation="new"),
)
ROW_LOSS = Output(
    "row_loss",
    "Each row's loss before row_weights.",
    dtype="fp32",
    shape="[s_q]",
    optional=True,
    allocation="given",
)

# ---- NVFP4 -----------------------------------------------------------------------------------------------------------

SCALE_LAYOUTS = Enum(
    "scale_layout",
    "HOPWELL_SCALES",
    {"plain": "[rows, K/16]", "blocked": "the 128x4 order of cuBLAS and CUTLASS, in any shape of as many bytes"},
    doc="""
        NVFP4 stores e2m1 codes, two a byte (the low nibble is the even k), one e4m3 scale for 16 codes along K, and
        one fp32 global scale for a tensor: w = code * scale * global (NVIDIA's NVFP4; element and scale formats: OCP
        Microscaling Formats v1.0 and OCP FP8). Codes are uint8 or float4_e2m1fn_x2, scales uint8 or float8_e4m3fn.
        Scales are plain, [rows, K/16], or blocked. In the blocked order (row m, scale j) has the byte offset

            512 * ((m/128) * ceil((K/16)/4) + j/4) + 16 * (m mod 32) + 4 * ((m mod 128)/32) + j mod 4

        with rows padded to 128 and scales to 4. A blocked tensor may have any shape with that many bytes. It is
        contiguous, and a batch dimension L is the slowest.
    """,
)
SCALE_LAYOUT = Choice("scale_layout", "Layout of the scales.", enum=SCALE_LAYOUTS)
CODES = "uint8 | fp4x2"
SCALES = "uint8 | fp8"
WEIGHT = Tensor("weight", "Codes of the weights. K is a multiple of 16.", dtype=CODES, shape="[N, K/2]")
WEIGHT_SCALE = Tensor("weight_scale", "Scales of the weights.", dtype=SCALES, shape="[N, K/16] or blocked")
WEIGHT_GLOBAL = NumberOrTensor("weight_global", "Global scale of the weights.", value="weight_global_value")


def reciprocal(of: str) -> Boolean:
    return Boolean("global_is_reciprocal", f"{of} is 1 / the factor, as compressed-tensors stores it.")
