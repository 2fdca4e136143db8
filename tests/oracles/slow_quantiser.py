"""The KV formats from their definitions, in float64 and one vector at a time.

e4m3 and bf16 are "round to so many mantissa bits, ties to even"; a scale is the smallest power of
two that brings a vector into e4m3's range. Layout: design.md section 4 and facts on FlashMLA's
cache. Shares no code with shared/engine/kv/format.py, which is held against it.
"""

import math
from typing import Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

PAGE_TOKENS = 64
_TILE = 128
_E4M3_BITS, _E4M3_LEAST, _E4M3_MAX = 3, -6, 448.0
_BF16_BITS, _BF16_LEAST = 7, -126
_LEAST_AMAX = 1e-4


class Quantiser(Protocol):
    """How one token's latent row and index key become bytes, and back."""

    def encode_row(self, latent: Array) -> bytes: ...
    def decode_row(self, data: bytes) -> Array: ...
    def encode_key(self, key: Array) -> tuple[bytes, bytes]: ...
    def decode_key(self, values: bytes, scale: bytes) -> Array: ...
    def round_query(self, query: Array) -> Array: ...
    def row_rounding(self, latent: Array) -> Array: ...
    def key_rounding(self, key: Array) -> Array: ...


class Fp32Quantiser:
    """Values as little-endian fp32; what rounding that is, is far below any tolerance."""

    def encode_row(self, latent: Array) -> bytes:
        return latent.astype("<f4").tobytes()

    def decode_row(self, data: bytes) -> Array:
        return np.frombuffer(data, "<f4").astype(np.float64)

    def encode_key(self, key: Array) -> tuple[bytes, bytes]:
        return self.encode_row(key), b""

    def decode_key(self, values: bytes, scale: bytes) -> Array:
        return self.decode_row(values)

    def round_query(self, query: Array) -> Array:
        return query

    def row_rounding(self, latent: Array) -> Array:
        return np.zeros_like(latent)

    key_rounding = row_rounding


class Fp8Quantiser:
    """fp8_ds_mla: 128-wide tiles of e4m3 under one scale each, the rotary part in bf16."""

    def __init__(self, kv_lora_rank: int) -> None:
        self._rank = kv_lora_rank
        self._tiles = kv_lora_rank // _TILE

    def encode_row(self, latent: Array) -> bytes:
        tiles = latent[: self._rank].reshape(self._tiles, _TILE)
        scales = scales_of(tiles)
        rope = nearest(latent[self._rank :], _BF16_BITS, _BF16_LEAST).astype("<f4")
        return e4m3_codes(tiles / scales) + scales.astype("<f4").tobytes() + _upper_halves(rope)

    def decode_row(self, data: bytes) -> Array:
        scales_end = self._rank + 4 * self._tiles
        scales = np.frombuffer(data[self._rank : scales_end], "<f4").astype(np.float64)
        values = e4m3_values(data[: self._rank]).reshape(self._tiles, _TILE) * scales[:, None]
        halves = np.frombuffer(data[scales_end:], "<u2").astype(np.uint32) << 16
        return np.concatenate((values.ravel(), halves.view(np.float32).astype(np.float64)))

    def encode_key(self, key: Array) -> tuple[bytes, bytes]:
        scale = scales_of(key)
        return e4m3_codes(key / scale), scale.astype("<f4").tobytes()

    def decode_key(self, values: bytes, scale: bytes) -> Array:
        return e4m3_values(values) * np.frombuffer(scale, "<f4").astype(np.float64)

    def round_query(self, query: Array) -> Array:
        scales = scales_of(query)
        return nearest(query / scales, _E4M3_BITS, _E4M3_LEAST) * scales

    def row_rounding(self, latent: Array) -> Array:
        """How far a correct rounding may be from each value."""
        tiles = latent[: self._rank].reshape(self._tiles, _TILE)
        rope = quantum(latent[self._rank :], _BF16_BITS, _BF16_LEAST) / 2
        return np.concatenate((self.key_rounding(tiles).ravel(), rope))

    def key_rounding(self, key: Array) -> Array:
        scales = scales_of(key)
        return quantum(key / scales, _E4M3_BITS, _E4M3_LEAST) * scales / 2


def quantum(values: Array, mantissa_bits: int, least_exponent: int) -> Array:
    """The distance of neighbouring representable numbers at each value."""
    exponents = np.maximum(np.frexp(values)[1] - 1, least_exponent)
    return np.ldexp(np.ones_like(values), exponents - mantissa_bits)


def nearest(values: Array, mantissa_bits: int, least_exponent: int) -> Array:
    """Each value rounded to the nearest representable number, ties to even."""
    step = quantum(values, mantissa_bits, least_exponent)
    return np.rint(values / step) * step


def scales_of(vectors: Array) -> Array:
    """Per vector the smallest power of two s with max |vector| / s <= 448; [..., 1]."""
    amax = np.maximum(np.abs(vectors).max(-1, keepdims=True), _LEAST_AMAX)
    mantissas, exponents = np.frexp(amax / _E4M3_MAX)
    return np.ldexp(np.ones_like(amax), np.where(mantissas == 0.5, exponents - 1, exponents))


def e4m3_codes(values: Array) -> bytes:
    """Sign bit, 4 exponent bits with bias 7, 3 mantissa bits, of the rounded values."""
    rounded = nearest(values, _E4M3_BITS, _E4M3_LEAST)
    known = _E4M3_VALUES[:_NUM_FINITE]
    magnitudes = np.searchsorted(known, np.abs(rounded)).astype(np.uint8)
    assert np.array_equal(known[magnitudes], np.abs(rounded))
    return (magnitudes | np.signbit(values).astype(np.uint8) << 7).tobytes()


def e4m3_values(codes: bytes) -> Array:
    """What each byte means."""
    return _E4M3_VALUES[np.frombuffer(codes, np.uint8)]


def _e4m3_value(code: int) -> float:
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if code & 127 == 127:
        return math.nan
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


_NUM_FINITE = 127  # codes 0..126 are the magnitudes in ascending order, 127 is NaN
_E4M3_VALUES = np.array([_e4m3_value(code) for code in range(256)])


def _upper_halves(rounded: npt.NDArray[np.float32]) -> bytes:
    """bf16 is the upper half of an fp32 whose lower half is zero."""
    return (rounded.view(np.uint32) >> 16).astype("<u2").tobytes()
