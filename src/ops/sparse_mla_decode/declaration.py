from common import ATTN_SINK, D_V, SM_SCALE
from declare import KEYWORD_ONLY, Integer, NumberOrTensor, Operator, Output, Tensor

CACHE = "bf16 | fp32 (CPU) | uint8 | int8 | fp8"
ROWS = "[blocks, block, row] or [blocks, block, 1, row]"
PER_QUERY = "[b] or [b, q_len]"

sparse_mla_decode = Operator(
    "sparse_mla_decode",
    "Multi-query latent attention (MLA) of one or a few query tokens a sequence over selected rows of paged caches.",
    formula="""
        score[s,i,h,j] = sm_scale * sum_d q[s,i,h,d] * K[slot_j, d]       over the valid entries of indices
        out            = softmax(score) . K[:, :d_v] / (1 + exp(attn_sink - lse))
    """,
    notes="""
        A cache is [blocks, block, row], in the formats of latents that mla_cache_append writes; the row's size and d_qk
        name the format. An entry of indices is a slot, and with block_tables a position p: slot
        block_tables[s, p div block] * block + p mod block. It is valid if it is among the first topk_length entries and
        its slot exists; with block_tables p must be visible, too. Entries that occur twice count twice. A row without a
        valid entry gives out 0 and lse +inf. Entries of extra_indices join the same softmax. The softmax is computed
        for splits of keys_per_split entries, each cache by itself, and splits are merged in order. Therefore the
        results of a query have the same bits in any call with the same keys_per_split. One exception: on GPUs a call
        with rows of bf16 may have other bits if it needs no splits, see docs/bits.md. Values of quantised rows are
        bf16(fp32(code * scale)); with one scale for the whole cache, kv_scale multiplies scores and out.
    """,
    arguments=(
        Tensor(
            "q",
            "Queries; the last q_len tokens of each sequence.",
            dtype="bf16 | fp32 (CPU)",
            shape="[b, q_len, h_q, d_qk] or [b, h_q, d_qk]",
        ),
        Tensor("cache", "Latents. V is the first d_v columns of K.", dtype=CACHE, shape=ROWS),
        Tensor(
            "indices",
            "Selected slots, or with block_tables positions, in any order.",
            dtype="int32",
            shape="[b, q_len, topk] or [b, topk]",
        ),
        SM_SCALE,
        D_V,
        KEYWORD_ONLY,
        Tensor(
            "block_tables",
            "Makes entries positions: entry p / block is the block of position p.",
            dtype="int32",
            shape="[b, max_blocks]",
            optional=True,
        ),
        Tensor(
            "context_lens",
            "Number of positions that are visible. [b] counts the query tokens: query i sees the first"
            " context_lens[s] - q_len + 1 + i. Needs block_tables. It does not apply to extra_cache.",
            dtype="int32",
            shape=PER_QUERY,
            optional=True,
        ),
        Tensor(
            "topk_length",
            "Only the first topk_length entries of a row count.",
            dtype="int32",
            shape=PER_QUERY,
            optional=True,
        ),
        Tensor(
            "extra_cache",
            "A second cache of the same row format. Its blocks may have another size.",
            dtype=CACHE,
            shape=ROWS,
            optional=True,
        ),
        Tensor(
            "extra_indices",
            "Entries of extra_cache.",
            dtype="int32",
            shape="[b, q_len, extra_topk] or [b, extra_topk]",
            optional=True,
        ),
        Tensor("extra_topk_length", "topk_length of extra_indices.", dtype="int32", shape=PER_QUERY, optional=True),
        Tensor(
            "extra_block_tables",
            "Block tables of extra_cache. Both caches have tables, or none.",
            dtype="int32",
            shape="[b, extra_max_blocks]",
            optional=True,
        ),
        ATTN_SINK,
        NumberOrTensor(
            "kv_scale",
            "Scale of caches with one scale; 1 by default. Positive and finite.",
            value="kv_scale_value",
            default=None,
            optional=True,
        ),
        Tensor(
            "rope_cache",
            "The last columns of K, where the rows of cache are its first d_v. Slots are the same as in cache.",
            dtype="like cache",
            shape="[blocks, block, d_qk - d_v]",
            optional=True,
        ),
        Integer("keys_per_split", "Entries of a split, a multiple of 64.", default=256),
        Output(
            "out",
            dtype="like q | fp32",
            shape="[b, q_len, h_q, d_v] or [b, h_q, d_v]",
            python_shape="decode_shape(q, d_v)",
        ),
        Output(
            "lse",
            "Log of the sum of exp(score), a natural logarithm.",
            dtype="fp32",
            shape="the shape of q without d",
            optional=True,
        ),
    ),
    returns=("out", "lse"),
)
