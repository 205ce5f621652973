"""What the attention kernels do with scores in Triton: GDPA's activations and their slopes.

`FAST` takes the tanh of NVIDIA's special function unit (absolute error 5e-4), which `fast_gelu` allows; elsewhere the
tanh form is written with a sigmoid, x · sigmoid(2u), which keeps its relative precision for large negative x. A
polynomial for GELU is not used: it saves nothing here and is wrong beyond |x| of about 1.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_NORMAL = tl.constexpr(0.3989422804014327)  # 1 / √(2π)
_GELU_SLOPE = tl.constexpr(0.7978845608028654)  # √(2/π)
_GELU_CUBE = tl.constexpr(0.7978845608028654 * 0.044715)
_LEAKY = tl.constexpr(0.01)


@triton.jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    return 1.0 / (1.0 + tl.exp2(-LOG2_E * x))


@triton.jit
def _gelu_gate(x: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """(1 + tanh(u)) / 2 of the tanh form."""
    u = x * (_GELU_SLOPE + _GELU_CUBE * x * x)
    if FAST:
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1)
        gate = 0.5 + 0.5 * t
    else:
        gate = _sigmoid(2.0 * u)
    return gate


@triton.jit
def act(x: tl.tensor, KIND: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """The activation `KIND` (an `Activation`, gemctl/kernels/gdpa/activation.py) of float32 x."""
    y = x
    if KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    elif KIND == "gelu_approx" or KIND == "fast_gelu":  # noqa: PLR1714 (Triton knows no membership)
        y = x * _gelu_gate(x, FAST)
    elif KIND == "relu":
        y = tl.maximum(x, 0.0)
    elif KIND == "relu_square":
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif KIND == "leaky_relu":
        y = tl.where(x > 0, x, _LEAKY * x)
    elif KIND == "silu":
        y = x * _sigmoid(x)
    elif KIND == "hardswish":
        y = x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    return y


@triton.jit
def slope(x: tl.tensor, KIND: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """The derivative of `act` at x."""
    y = x * 0.0 + 1.0
    if KIND == "gelu":
        y = 0.5 * (1.0 + tl.erf(x * _SQRT_HALF)) + x * _NORMAL * tl.exp2(-0.5 * LOG2_E * x * x)
    elif KIND == "gelu_approx" or KIND == "fast_gelu":  # noqa: PLR1714
        gate = _gelu_gate(x, FAST)
        y = gate + x * gate * (1.0 - gate) * (2.0 * _GELU_SLOPE + 6.0 * _GELU_CUBE * x * x)
    elif KIND == "relu":
        y = tl.where(x > 0, 1.0, 0.0)
    elif KIND == "relu_square":
        y = 2.0 * tl.maximum(x, 0.0)
    elif KIND == "leaky_relu":
        y = tl.where(x > 0, 1.0, _LEAKY)
    elif KIND == "silu":
        gate = _sigmoid(x)
        y = gate + x * gate * (1.0 - gate)
    elif KIND == "hardswish":
        y = tl.where(x < -3.0, 0.0, tl.where(x <= 3.0, x * (1.0 / 3.0) + 0.5, 1.0))
    return y
