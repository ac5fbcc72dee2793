from declare import KEYWORD_ONLY, Boolean, Choice, Enum, Integer, NumberOrTensor, Operator, Output, Tensor

SCALE_FORMATS = Enum(
    "cache_scale",
    "HOPWELL_CACHE_SCALE",
    {
        "pow2": "the smallest power of two, not below 2^-13 (V3.2) or 2^-22, that keeps codes within 448",
        "fp32": "max(amax, 1e-4) / 448, for rows of V3.2 and index rows",
    },
    doc="How the scale of a group of codes follows from its largest finite magnitude amax.",
)

mla_cache_append = Operator(
    "mla_cache_append",
    "Rotates and quantises the latents or index keys of new tokens, and writes them into the slots of a paged cache.",
    formula="""
        y0   = x0 * cos_sin[p, i] - x1 * cos_sin[p, r/2 + i]      with positions; p = positions[row]
        y1   = x1 * cos_sin[p, i] + x0 * cos_sin[p, r/2 + i]      fp32, rounded to kv's dtype
        code = e4m3(y / scale)                                    nearest, ties to even; saturated to +-448
    """,
    notes="""
        A cache is [blocks, block, row]; slot s is row s mod block of block s div block. The row's size and d, the width
        of a token, name the format. bf16 [.., d] stores the token. Of bytes: (d 576, 656) and (512, 656) are rows of
        DeepSeek-V3.2, (512, 584) of V4, (512, 528) of V4.1, (d, d) has one scale for the whole cache, (d, d + 4) is an
        index key with its scale. A NaN or an infinity gets the code 0x7F and does not count in amax. Rows of kv whose
        slot or position is out of range are skipped. No other byte of the cache is written. If several rows have
        one slot, it gets the last of these rows.
    """,
    arguments=(
        Tensor(
            "kv",
            "New rows: all d columns, or with k_rope those before it.",
            dtype="bf16 | fp32 (CPU)",
            shape="[n, d]",
        ),
        Output(
            "cache",
            "The cache. Other slots are unmodified.",
            dtype="bf16 | fp32 (CPU) | uint8 | int8 | fp8",
            shape="[blocks, block, row] or [blocks, block, 1, row]",
            allocation="given",
        ),
        Tensor("slots", "Row i goes to slot slots[i].", dtype="int64 | int32", shape="[n]"),
        KEYWORD_ONLY,
        Tensor("k_rope", "The last columns of the rows.", dtype="like kv", shape="[n, d_rope]", optional=True),
        Tensor(
            "positions",
            "Turns on RoPE: row i is rotated by row positions[i] of cos_sin, which is given with it.",
            dtype="int64 | int32",
            shape="[n]",
            optional=True,
        ),
        Tensor("cos_sin", "Cosines, then sines.", dtype="fp32 | bf16", shape="[max_positions, r]", optional=True),
        Integer("rope_offset", "First rotated column; d - r by default.", default=None, zero_is_a_value=True),
        Boolean(
            "interleaved",
            "Rotates the columns 2i and 2i + 1 together. Otherwise i and i + r/2 (NeoX).",
            default=True,
        ),
        Choice("scale_format", "How scales are chosen.", enum=SCALE_FORMATS),
        NumberOrTensor(
            "kv_scale",
            "Scale of a cache with one scale; 1 by default. Positive and finite.",
            value="kv_scale_value",
            default=None,
            optional=True,
        ),
    ),
    returns=("cache",),
)
