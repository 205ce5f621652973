"""What the Hopper kernels make of raw scores q·k: the weights of GDPA and of softmax, in few instructions each.

The scale is folded into the constants a and b, and a unit that is applied to the output. So GELU costs a score five
instructions and half a conversion, where the plain formula has eight. All activations weigh a score of 0 with 0.
"""

import math
from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gemctl.kernels.gdpa.activation import Activation
from gemctl.kernels.triton_scores import LN_2, act, slope

_SLOPE = math.sqrt(2 / math.pi)
_CUBE = _SLOPE * 0.044715
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Folded:
    """An activation at a scale: act(scale · s) = unit · `weights`(s, a, b), act'(scale · s) = slope_unit · `slopes`."""

    a: float
    b: float
    unit: float
    slope_unit: float


def folded(kind: str, scale: float) -> Folded:
    """The constants of an activation at a scale above 0; of softmax scale · log2 e for `soft_weights`."""
    match kind:
        case "softmax":
            return Folded(_LOG2_E * scale, 0.0, 1.0, 1.0)
        case Activation.FAST_GELU:
            return Folded(_SLOPE * scale, _CUBE * scale**3, scale / 2, 0.5)
        case Activation.GELU_APPROX:
            return Folded(-2 * _LOG2_E * _SLOPE * scale, -2 * _LOG2_E * _CUBE * scale**3, scale, 1.0)
        case Activation.SILU:
            return Folded(-_LOG2_E * scale, 0.0, scale, 1.0)
        case Activation.HARDSWISH:
            return Folded(scale / 6, 0.5, scale, 1.0)
        case Activation.RELU_SQUARE:
            return Folded(0.0, 0.0, scale**2, scale)
        case Activation.GELU:
            return Folded(scale, 0.0, 1.0, 1.0)
    return Folded(0.0, 0.0, scale, 1.0)  # identity, ReLU, leaky ReLU: act(scale · s) = scale · act(s)


@gluon.jit
def exp2(x):  # type: ignore[no-untyped-def]
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def log2(x):  # type: ignore[no-untyped-def]
    return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def inverse_of(x):  # type: ignore[no-untyped-def]
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def weights(s, a, b, KIND: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of raw scores in float32, an activation's weights over their unit, in bfloat16."""
    if KIND == "fast_gelu":
        y = gl.fma(s, _tanh(s * gl.fma(s * s, gl.zeros_like(s) + b, gl.zeros_like(s) + a)), s)
    elif KIND == "gelu_approx":
        y = s * inverse_of(1.0 + exp2(s * gl.fma(s * s, gl.zeros_like(s) + b, gl.zeros_like(s) + a)))
    elif KIND == "silu":
        y = s * inverse_of(1.0 + exp2(s * a))
    elif KIND == "hardswish":
        y = s * gl.minimum(gl.maximum(gl.fma(s, gl.zeros_like(s) + a, gl.zeros_like(s) + b), 0.0), 1.0)
    elif KIND == "gelu":
        y = act(s * a, KIND, False)
    else:
        y = act(s, KIND, False)
    return y.to(gl.bfloat16)


@gluon.jit
def soft_weights(s, peak, scale):  # type: ignore[no-untyped-def]
    """One block of softmax, scores in units of log 2 by `scale` above 0: (weights in bfloat16, their sums, the rows'
    peaks with this block, what everything before counts less for that). A row that has seen nothing has peak −inf.
    """
    higher = gl.maximum(peak, gl.max(s, 1) * scale)
    reference = gl.where(higher == float("-inf"), 0.0, higher)
    rest = exp2(peak - reference)
    y = exp2(gl.fma(s, gl.zeros_like(s) + scale, gl.zeros_like(s) - gl.expand_dims(reference, 1)))
    return y.to(gl.bfloat16), gl.sum(y, 1), higher, rest


@gluon.jit
def weights_and_slopes(s, a, b, KIND: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of raw scores in float32: an activation's weights over their unit, its slopes over theirs, both in float32."""
    if KIND == "fast_gelu":
        square = s * s
        t = _tanh(s * gl.fma(square, gl.zeros_like(s) + b, gl.zeros_like(s) + a))
        inner = s * gl.fma(square, gl.zeros_like(s) + 3.0 * b, gl.zeros_like(s) + a)  # x · u'(x) of tanh(u(x))
        y = gl.fma(s, t, s)
        g = gl.fma(inner, gl.fma(0.0 - t, t, gl.zeros_like(t) + 1.0), t + 1.0)
    elif KIND == "gelu_approx":
        square = s * s
        gate = inverse_of(1.0 + exp2(s * gl.fma(square, gl.zeros_like(s) + b, gl.zeros_like(s) + a)))
        inner = s * gl.fma(square, gl.zeros_like(s) - 3.0 * LN_2 * b, gl.zeros_like(s) - LN_2 * a)
        y = s * gate
        g = gl.fma(gate * (1.0 - gate), inner, gate)
    elif KIND == "silu":
        gate = inverse_of(1.0 + exp2(s * a))
        y = s * gate
        g = gl.fma(gate * (1.0 - gate), s * (0.0 - LN_2 * a), gate)
    elif KIND == "hardswish":
        line = gl.fma(s, gl.zeros_like(s) + a, gl.zeros_like(s) + b)
        y = s * gl.minimum(gl.maximum(line, 0.0), 1.0)
        g = gl.where(line < 0.0, 0.0, gl.where(line > 1.0, 1.0, 2.0 * line - 0.5))
    elif KIND == "gelu":
        y = act(s * a, KIND, False)
        g = slope(s * a, KIND, False)
    else:
        y = act(s, KIND, False)
        g = slope(s, KIND, False)
    return y, g
