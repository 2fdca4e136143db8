"""The bytes of a row and of an index page, as golden values and against plain arithmetic."""

import hashlib
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from shared.engine.kv.format import (
    Fp8Format,
    e4m3_values,
    make_format,
    page_geometry,
    power_of_two_scale,
)
from shared.engine.model.config import AttentionConfig
from shared.errors import ConfigError
from tests.oracles.slow_quantiser import Fp8Quantiser
from tests.released import ATTENTION


def ramp(num_rows: int, width: int) -> torch.Tensor:
    """Values of many magnitudes, both signs, zero included; exact in fp32."""
    steps = torch.arange(num_rows * width, dtype=torch.float64)
    return (
        (((steps * 37) % 1009 - 504) / 64 * 2.0 ** ((steps % 23) - 12)).float().view(num_rows, -1)
    )


def e4m3_value(code: int) -> float:
    """The value of one e4m3fn byte, from its definition."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


# Midpoints of neighbouring e4m3 numbers, their fp32 neighbours, and values around a scale's limit.
HALVES = [(8 + m / 2) * 2.0**e for m in range(16) for e in (-13, -10, -9, -2, 3, 5)]
LIMITS = [448.0 * 2.0**e for e in (-22, -21, -3, 0, 7, 20)]
EDGES = [
    float(value)
    for edge in np.array([*HALVES, *LIMITS], np.float32)
    for value in (edge, np.nextafter(edge, np.float32(0)), np.nextafter(edge, np.float32(1e9)))
]
values = st.one_of(
    st.just(0.0), st.just(-0.0), st.sampled_from(EDGES), st.floats(-(2.0**30), 2.0**30, width=32)
)


@given(some=st.lists(values, min_size=1, max_size=40), spread=st.integers(1, 128))
@hypothesis_settings(deadline=None, max_examples=150)
def test_any_row_and_key_is_written_as_the_definition_says(some: list[float], spread: int) -> None:
    """Ties, subnormals, both zeros, and maxima at the limit of a scale, byte for byte."""
    fp8, slow = Fp8Format(ATTENTION), Fp8Quantiser(512)
    latent = torch.zeros(576)
    places = torch.arange(len(some)) * spread % 576
    latent[places] = torch.tensor(some)

    row = fp8.encode_rows(latent[None])[0].numpy().tobytes()
    key = fp8.encode_keys(latent[None, :128])[0].numpy().tobytes()

    assert row == slow.encode_row(latent.double().numpy())
    assert key == b"".join(slow.encode_key(latent[:128].double().numpy()))


@pytest.mark.parametrize("exponent", range(-21, 40))
def test_a_scale_grows_just_past_its_limit(exponent: int) -> None:
    """448 times a power of two still fits; the next fp32 number does not."""
    limit = torch.tensor(448.0 * 2.0**exponent)
    above = torch.nextafter(limit, torch.tensor(torch.inf))

    assert power_of_two_scale(limit) == 2.0**exponent
    assert power_of_two_scale(above) == 2.0 ** (exponent + 1)


def test_sizes_of_the_released_model_are_the_published_ones() -> None:
    """656 bytes a row, 8,448 an index page; 54,728 bytes a token, 53.4 GiB a million."""
    fp8 = Fp8Format(ATTENTION)
    mla_layers, index_layers = 78 + 1, 21 + 1
    per_token = mla_layers * fp8.row_bytes + index_layers * page_geometry(fp8).page_bytes // 64

    assert fp8.row_bytes == 656
    assert page_geometry(fp8).page_bytes == 8448
    assert per_token == 54_728
    assert 53.4 < per_token * 2**20 / 2**30 < 53.5


def test_every_code_has_its_defined_value() -> None:
    """All 254 finite e4m3 codes, subnormals and both zeros included."""
    codes = [code for code in range(256) if code & 127 != 127]

    values = e4m3_values(torch.tensor(codes, dtype=torch.uint8))

    assert values.tolist() == [e4m3_value(code) for code in codes]


def test_a_row_is_values_then_scales_then_rope() -> None:
    """Each part decoded by hand from its offset."""
    latent = ramp(3, 576)
    rows = Fp8Format(ATTENTION).encode_rows(latent)

    for row, wanted in zip(rows.numpy(), latent.numpy(), strict=True):
        scales = struct.unpack("<4f", row[512:528].tobytes())
        for tile, scale in enumerate(scales):
            part = slice(tile * 128, tile * 128 + 128)
            amax = float(np.abs(wanted[part]).max())
            assert np.log2(scale) == round(np.log2(scale))
            assert scale / 2 < max(amax, 1e-4) / 448 <= scale
            values = np.array([e4m3_value(int(code)) for code in row[part]]) * scale
            # Half a step: 2**-4 of the value, or of the smallest normal one.
            bound = np.maximum(np.abs(wanted[part]), 2.0**-6 * scale) * 2.0**-4
            assert np.all(np.abs(values - wanted[part]) <= bound)
        rope = torch.from_numpy(row[528:].copy()).view(torch.bfloat16)
        assert torch.equal(rope, torch.from_numpy(wanted[512:]).to(torch.bfloat16))


def test_a_decoded_row_is_what_its_bytes_say() -> None:
    """Attention reads value times scale, nothing else."""
    fp8 = Fp8Format(ATTENTION)
    rows = fp8.encode_rows(ramp(2, 576))
    decoded = fp8.decode_rows(rows)

    row = rows[1].numpy()
    scales = struct.unpack("<4f", row[512:528].tobytes())
    by_hand = [e4m3_value(int(row[i])) * scales[i // 128] for i in range(512)]
    assert decoded[1, :512].tolist() == by_hand


@pytest.mark.parametrize(
    ("what", "digest"),
    [("row", "e1f962edd3c2df5b"), ("page", "07d6dd3571f835e2")],
)
def test_bytes_are_the_golden_ones(what: str, digest: str) -> None:
    """KV is exchanged between workers of different builds; its bytes never change by accident."""
    fp8 = Fp8Format(ATTENTION)
    if what == "row":
        data = fp8.encode_rows(ramp(8, 576))
    else:
        data = torch.zeros((1, 8448), dtype=torch.uint8)
        page_geometry(fp8).write(data, torch.arange(64), fp8.encode_keys(ramp(64, 128)))

    assert hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16] == digest


def test_a_page_holds_all_values_before_all_scales() -> None:
    """Token i's key at 128 i, its scale at 8192 + 4 i; a negative slot writes nothing."""
    fp8, keys = Fp8Format(ATTENTION), ramp(2, 128)
    pages = torch.full((2, 8448), 9, dtype=torch.uint8)
    records = fp8.encode_keys(keys)

    page_geometry(fp8).write(pages, torch.tensor([64 + 5, -1]), records)

    assert torch.equal(pages[1, 5 * 128 : 6 * 128], records[0, :128])
    assert torch.equal(pages[1, 8192 + 20 : 8192 + 24], records[0, 128:])
    assert int((pages != 9).sum()) <= 132
    assert torch.equal(page_geometry(fp8).records(pages)[64 + 5], records[0])


@pytest.mark.parametrize("name", ["fp32", "fp8_ds_mla"])
def test_reading_a_page_gives_the_records_written(name: str) -> None:
    """Writing and reading are inverse, in any order of slots."""
    kv_format = make_format(name, ATTENTION)
    geometry = page_geometry(kv_format)
    pages = torch.zeros((3, geometry.page_bytes), dtype=torch.uint8)
    slots = torch.randperm(3 * 64)[:100]
    records = kv_format.encode_keys(torch.randn(100, 128))

    geometry.write(pages, slots, records)

    assert torch.equal(geometry.records(pages)[slots], records)


def test_the_fp32_format_changes_nothing() -> None:
    """It exists to compare compositions exactly."""
    fp32, latent, keys = make_format("fp32", ATTENTION), torch.randn(5, 576), torch.randn(5, 128)

    assert torch.equal(fp32.decode_rows(fp32.encode_rows(latent)), latent)
    assert torch.equal(fp32.decode_keys(fp32.encode_keys(keys)), keys)
    assert torch.equal(fp32.round_query(keys), keys)


def test_scales_are_powers_of_two_that_avoid_overflow() -> None:
    """At the edges: zero, just in range, just out of it."""
    scale = power_of_two_scale(torch.tensor([0.0, 448.0, 448.1, 3.5]))

    assert scale.tolist() == [2.0**-22, 1.0, 2.0, 2.0**-7]


@pytest.mark.parametrize("name", ["fp8", "", "FP32"])
def test_an_unknown_format_is_refused(name: str) -> None:
    """The message names what there is."""
    with pytest.raises(ConfigError, match="fp8_ds_mla and fp32"):
        make_format(name, ATTENTION)


def test_fp8_refuses_dimensions_it_cannot_tile() -> None:
    """Scales cover 128 values."""
    narrow = AttentionConfig(**{**ATTENTION.__dict__, "kv_lora_rank": 448})
    with pytest.raises(ConfigError, match="steps of 128"):
        make_format("fp8_ds_mla", narrow)
