"""Device code that quantising kernels share: e4m3 codes under a power-of-two scale.

The bits are those of `shared.engine.kv.format.quantise_tiles`.
"""

import triton
import triton.language as tl
from triton import knobs

# The interpreter's own conversion to e4m3 rounds wrongly near powers of two.
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)
_MIN_AMAX = tl.constexpr(1e-4)


@triton.jit
def scale_exponent(amax):  # [...] fp32, finite
    """Biased exponent of the smallest power of two that brings amax within +-448."""
    bits = tl.maximum(amax, _MIN_AMAX).to(tl.int32, bitcast=True)
    # 448 is 1.75 * 2**8: a significand above 1.75 carries into the exponent.
    return ((bits + 0x1FFFFF) >> 23) - 8


@triton.jit
def power_of_two(exponent):  # [...] int32 biased, 1..254
    """The power of two with this exponent, as fp32."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def encode(values):  # [...] fp32
    """e4m3 codes as uint8: nearest, ties to even, saturated."""
    if not _INTERPRETED:
        return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    magnitude = tl.minimum(tl.abs(values), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    # Below 2**-6 codes are steps of 2**-9, which is the spacing of fp32 at 16,384.
    steps = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, steps, rounded - (120 << 3))
    sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def rounded(values):  # [...] fp32, within +-448
    """What the codes of `encode` stand for, as fp32.

    Not decoded from them: where codes are stored and decoded in one kernel, ptxas 12.8 decodes
    some registers before it has written them.
    """
    bits = values.to(tl.int32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    # Below 2**-6 codes are steps of 2**-9, which is the spacing of fp32 around 24,576.
    small = (values + 24576.0) - 24576.0
    return tl.where(tl.abs(values) < 0.015625, small, normal.to(tl.float32, bitcast=True))
