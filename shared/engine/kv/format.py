"""How one token's KV is written as bytes: `fp8_ds_mla` rows and index pages, and fp32 ones for
exact tests.

fp8_ds_mla row (656 bytes at the released dimensions), after FlashMLA's FP8 cache:
    offset 0     kv_lora_rank e4m3 values
    offset 512   one fp32 scale per 128 values, a power of two
    offset 528   rope_dim bf16 values
Index page of 64 tokens (8,448 bytes): 64 x index_dim e4m3 keys, then 64 fp32 scales.
The fp32 format has the same shape with fp32 values and no scales. A token's key outside a page
("key record") is its values followed by its scale.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from shared.engine.kv.layout import BLOCK_TOKENS
from shared.engine.model.config import AttentionConfig
from shared.errors import ConfigError

_TILE = 128  # latent values that share one scale
_E4M3_MAX = 448.0
_MIN_AMAX = 1e-4  # keeps the scale of an all-zero vector finite (vLLM uses the same floor)


class KvFormat(Protocol):
    """Encoding of latent rows and index keys; every method is a pure function of its tensors."""

    name: str
    row_bytes: int
    key_value_bytes: int  # one key's values
    key_scale_bytes: int  # one key's scale, 0 when there is none

    def encode_rows(self, latent: torch.Tensor) -> torch.Tensor:
        """[n, latent_dim] fp32 -> [n, row_bytes] uint8."""
        ...

    def decode_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., row_bytes] uint8 -> [..., latent_dim] fp32."""
        ...

    def encode_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """[n, index_dim] fp32 -> [n, key_value_bytes + key_scale_bytes] uint8."""
        ...

    def decode_keys(self, records: torch.Tensor) -> torch.Tensor:
        """[n, key_value_bytes + key_scale_bytes] uint8 -> [n, index_dim] fp32."""
        ...

    def round_query(self, query: torch.Tensor) -> torch.Tensor:
        """[..., index_dim] fp32 -> the same rounded as the index kernel would see it."""
        ...


def make_format(name: str, attention: AttentionConfig) -> KvFormat:
    """The format called `name`; ConfigError for an unknown name or unsuitable dimensions."""
    if name == "fp32":
        return Fp32Format(attention)
    if name == "fp8_ds_mla":
        return Fp8Format(attention)
    raise ConfigError(f"unknown KV format {name!r}; known are fp8_ds_mla and fp32")


@dataclass(frozen=True)
class PageGeometry:
    """Where the keys of an index page lie."""

    value_bytes: int
    scale_bytes: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of 64 keys."""
        return BLOCK_TOKENS * (self.value_bytes + self.scale_bytes)

    def write(
        self,
        pages: torch.Tensor,  # [num_pages, page_bytes] uint8, changed in place
        slots: torch.Tensor,  # [n] int64 page * 64 + offset; negative = skipped
        records: torch.Tensor,  # [n, value_bytes + scale_bytes] uint8
    ) -> None:
        """Put each key record's values and scale in its slot's places."""
        live = slots >= 0
        slots, records = slots[live], records[live]
        page, offset = slots // BLOCK_TOKENS, slots % BLOCK_TOKENS
        values, scales = self._parts(pages)
        values[page, offset] = records[:, : self.value_bytes]
        if self.scale_bytes:
            scales[page, offset] = records[:, self.value_bytes :]

    def records(
        self,
        pages: torch.Tensor,  # [num_pages, page_bytes] uint8
    ) -> torch.Tensor:  # [num_pages * 64, value_bytes + scale_bytes] uint8
        """All keys of the pages as records, in slot order."""
        values, scales = self._parts(pages)
        return torch.cat((values, scales), -1).flatten(0, 1)

    def _parts(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        split = BLOCK_TOKENS * self.value_bytes
        return (
            pages[:, :split].unflatten(1, (BLOCK_TOKENS, self.value_bytes)),
            pages[:, split:].unflatten(1, (BLOCK_TOKENS, self.scale_bytes)),
        )


def page_geometry(kv_format: KvFormat) -> PageGeometry:
    """The index page of a format."""
    return PageGeometry(kv_format.key_value_bytes, kv_format.key_scale_bytes)


def power_of_two_scale(amax: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that brings amax within e4m3's range."""
    ratio = amax.clamp_min(_MIN_AMAX) / _E4M3_MAX
    # Exact on every device; a rounded logarithm is one too low just past a power of two.
    fraction = torch.frexp(ratio).mantissa  # in [0.5, 1)
    return torch.where(fraction == 0.5, ratio, ratio / fraction)


def quantise_tiles(
    values: torch.Tensor,  # [..., tiles, 128] fp32
) -> tuple[torch.Tensor, torch.Tensor]:  # e4m3 of the same shape, [..., tiles] fp32
    """Each 128-wide tile as e4m3 times one power-of-two scale."""
    scale = power_of_two_scale(values.abs().amax(-1))
    return (values / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), scale


def e4m3_values(
    codes: torch.Tensor,  # [...] uint8, none of them NaN (0x7f, 0xff): the encoder saturates
) -> torch.Tensor:  # [...] fp32
    """The values of e4m3 bytes.

    Sign-extended and shifted by 7, with bit 14 cleared, a code is the fp16 number 2**-8 times its
    value, subnormals included; ten times faster on a CPU than torch's own conversion.
    """
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-16385)
    return bits.view(torch.float16).float().mul_(256.0)


class Fp32Format:
    """Exact storage, for tests and for comparing compositions."""

    name = "fp32"
    key_scale_bytes = 0

    def __init__(self, attention: AttentionConfig) -> None:
        self.row_bytes = attention.latent_dim * 4
        self.key_value_bytes = attention.index_dim * 4

    def encode_rows(self, latent: torch.Tensor) -> torch.Tensor:
        """See KvFormat."""
        return latent.contiguous().view(torch.uint8)

    def decode_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """See KvFormat."""
        return rows.view(torch.float32)

    encode_keys = encode_rows
    decode_keys = decode_rows

    def round_query(self, query: torch.Tensor) -> torch.Tensor:
        """See KvFormat."""
        return query


class Fp8Format:
    """The published system's cache format; its dequantised value is what attention reads."""

    name = "fp8_ds_mla"
    key_scale_bytes = 4

    def __init__(self, attention: AttentionConfig) -> None:
        if attention.kv_lora_rank % _TILE or attention.index_dim != _TILE:
            raise ConfigError(
                "fp8_ds_mla wants kv_lora_rank in steps of 128 and index_head_dim 128"
            )
        self._rank = attention.kv_lora_rank
        self._rope_at = self._rank + self._rank // _TILE * 4
        self._rope_dim = attention.rope_dim
        self.row_bytes = self._rope_at + self._rope_dim * 2
        self.key_value_bytes = attention.index_dim

    def encode_rows(self, latent: torch.Tensor) -> torch.Tensor:
        """See KvFormat."""
        values, scale = quantise_tiles(latent[:, : self._rank].unflatten(1, (-1, _TILE)))
        rope = latent[:, self._rank :].to(torch.bfloat16).contiguous()
        parts = (
            values.flatten(1).view(torch.uint8),
            scale.view(torch.uint8),
            rope.view(torch.uint8),
        )
        return torch.cat(parts, 1)

    def decode_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """See KvFormat."""
        # Parts are written in place: a row is read by every layer of every step.
        latent = rows.new_empty((*rows.shape[:-1], self._rank + self._rope_dim), dtype=torch.float)
        values = e4m3_values(rows[..., : self._rank])
        scale = rows[..., self._rank : self._rope_at].contiguous().view(torch.float32)
        tiles = latent[..., : self._rank].unflatten(-1, (-1, _TILE))
        torch.mul(values.unflatten(-1, (-1, _TILE)), scale.unsqueeze(-1), out=tiles)
        latent[..., self._rank :] = rows[..., self._rope_at :].contiguous().view(torch.bfloat16)
        return latent

    def encode_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """See KvFormat."""
        values, scale = quantise_tiles(keys.unsqueeze(1))
        return torch.cat((values.flatten(1).view(torch.uint8), scale.view(torch.uint8)), 1)

    def decode_keys(self, records: torch.Tensor) -> torch.Tensor:
        """See KvFormat."""
        values = e4m3_values(records[:, : self.key_value_bytes])
        return values * records[:, self.key_value_bytes :].contiguous().view(torch.float32)

    def round_query(self, query: torch.Tensor) -> torch.Tensor:
        """See KvFormat.

        The kernel folds the query's scale into the head weight; the product is equal.
        """
        values, scale = quantise_tiles(query)
        return e4m3_values(values.view(torch.uint8)) * scale.unsqueeze(-1)
