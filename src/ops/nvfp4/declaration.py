from common import CODES, SCALE_LAYOUT, SCALES, WEIGHT, WEIGHT_GLOBAL, WEIGHT_SCALE, reciprocal
from declare import KEYWORD_ONLY, Number, Operator, Output, PythonOnly, Tensor

ALPHA = Number("alpha", "Factor of the product, such as both sides' global scales.", default=1.0)

nvfp4_gemv = Operator(
    "nvfp4_gemv",
    "Batched product of a matrix and a vector, both sides NVFP4.",
    formula="""
        out[m,0,l] = alpha * sum_k a[m,k,l] * b[0,k,l]
    """,
    notes="The sum is in fp32 and in a fixed order, and is rounded once.",
    arguments=(
        Tensor(
            "a",
            "Codes. K is a multiple of 16 and fastest in memory, then rows, then L.",
            dtype=CODES,
            shape="[M, K/2, L]",
        ),
        Tensor(
            "b", "Codes of the vector: 1 row, or 128 of which only the first counts.", dtype=CODES, shape="[N, K/2, L]"
        ),
        Tensor("sfa", "Scales of a.", dtype=SCALES, shape="[M, K/16, L] or blocked"),
        Tensor("sfb", "Scales of b.", dtype=SCALES, shape="[N, K/16, L] or blocked"),
        KEYWORD_ONLY,
        ALPHA,
        reciprocal("alpha"),
        PythonOnly(
            "out_dtype",
            "Dtype of out.",
            type="dtype",
            of="out",
            default="float16",
            choices=("float16", "bfloat16", "float32"),
        ),
        SCALE_LAYOUT,
        Output("out", "Any strides.", dtype="fp16 | bf16 | fp32", shape="[M, 1, L]"),
    ),
    returns=("out",),
)

nvfp4_linear = Operator(
    "nvfp4_linear",
    "Product of 16-bit activations and 4-bit weights (W4A16).",
    formula="""
        out[i,n] = weight_global * sum_k x[i,k] * code[n,k] * scale[n,k/16] + bias[n]
    """,
    notes="The sum is in fp32, and the global scale is applied in fp32 before the rounding.",
    arguments=(
        Tensor("x", "Activations.", dtype="bf16 | fp16 | fp32 (CPU)", shape="[n, K]"),
        WEIGHT,
        WEIGHT_SCALE,
        WEIGHT_GLOBAL,
        KEYWORD_ONLY,
        reciprocal("The global scale"),
        Tensor("bias", dtype="like x", shape="[N]", optional=True),
        SCALE_LAYOUT,
        Output("out", dtype="like x", shape="[n, N]"),
    ),
    returns=("out",),
)

nvfp4_matmul = Operator(
    "nvfp4_matmul",
    "Product of two matrices, both sides NVFP4 (W4A4).",
    formula="""
        out[m,n] = alpha * sum_k a[m,k] * b[n,k] + bias[n]
    """,
    notes="The sum is in fp32 and in a fixed order, and is rounded once.",
    arguments=(
        Tensor("a", "Codes. K is a multiple of 16.", dtype=CODES, shape="[M, K/2]"),
        Tensor("b", "Codes.", dtype=CODES, shape="[N, K/2]"),
        Tensor("sfa", "Scales of a.", dtype=SCALES, shape="[M, K/16] or blocked"),
        Tensor("sfb", "Scales of b.", dtype=SCALES, shape="[N, K/16] or blocked"),
        KEYWORD_ONLY,
        ALPHA,
        reciprocal("alpha"),
        Tensor("bias", dtype="like out", shape="[N]", optional=True),
        PythonOnly(
            "out_dtype",
            "Dtype of out.",
            type="dtype",
            of="out",
            default="bfloat16",
            choices=("bfloat16", "float16", "float32"),
        ),
        SCALE_LAYOUT,
        Output("out", dtype="fp16 | bf16 | fp32", shape="[M, N]"),
    ),
    returns=("out",),
)
