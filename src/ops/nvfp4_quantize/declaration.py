from common import CODES, SCALE_LAYOUT, SCALES, reciprocal
from declare import KEYWORD_ONLY, NumberOrTensor, Operator, Output, PythonOnly, Tensor

nvfp4_quantize = Operator(
    "nvfp4_quantize",
    "NVFP4 codes and scales of an array.",
    formula="""
        global = amax / 2688
        scale  = e4m3(block amax / (6 * global))
        code   = nearest (ties to even) to x / (scale * global), with x's sign
    """,
    notes="""
        A block of zeros, or too small for its global scale, gets scale 0 and codes 0. A block with a NaN or an
        infinity gets a NaN scale and codes 0, and such values do not count in amax. Scales saturate at 448 if a given
        global scale is too small.
    """,
    arguments=(
        Tensor("x", "K is a multiple of 16.", dtype="fp32 | fp16 | bf16", shape="[rows, K]"),
        KEYWORD_ONLY,
        NumberOrTensor(
            "global_in",
            "The global scale to use instead of amax / 2688. In host memory it must be positive and finite; on a"
            " CUDA device it is data.",
            value="global_in_value",
            default=None,
            python="global_scale",
            optional=True,
        ),
        SCALE_LAYOUT,
        Output("codes", dtype=CODES, shape="[rows, K/2]", allocation="new"),
        Output(
            "scales",
            "The padding of the blocked layout is written as 0.",
            dtype=SCALES,
            shape="[rows, K/16] or blocked",
            allocation="new",
            python_shape="scales_shape(x, scale_layout)",
        ),
        Output("global_scale", dtype="fp32", shape="[]", allocation="new"),
    ),
    returns=("codes", "scales", "global_scale"),
)

nvfp4_dequantize = Operator(
    "nvfp4_dequantize",
    "The numbers of NVFP4 codes and scales.",
    formula="""
        x = code * scale * global_scale
    """,
    arguments=(
        Tensor("codes", "K is a multiple of 16.", dtype=CODES, shape="[rows, K/2]"),
        Tensor("scales", dtype=SCALES, shape="[rows, K/16] or blocked"),
        NumberOrTensor("global_scale", "The global scale.", value="global_value"),
        KEYWORD_ONLY,
        reciprocal("The global scale"),
        SCALE_LAYOUT,
        PythonOnly(
            "dtype", "Dtype of x.", type="dtype", of="x", default="float32", choices=("float32", "float16", "bfloat16")
        ),
        Output("x", dtype="fp32 | fp16 | bf16", shape="[rows, K]", allocation="new"),
    ),
    returns=("x",),
)
