"""Meaning of the kernels that write, read and reorder KV rows."""

import numpy as np
import torch

from shared.engine.kv.format import PageGeometry, e4m3_values, quantise_tiles
from shared.engine.kv.layout import BLOCK_TOKENS, Sharding

_RANK = 512
_SCALES_END = 528


def encode_rows(
    latent: torch.Tensor,  # [n, 576] bf16
) -> torch.Tensor:  # [n, 656] uint8
    """fp8_ds_mla rows: 512 e4m3 values, four fp32 scales, 64 bf16 values."""
    values, scales = quantise_tiles(latent[:, :_RANK].float().unflatten(1, (4, 128)))
    rope = latent[:, _RANK:].contiguous()
    return torch.cat([part.flatten(1).view(torch.uint8) for part in (values, scales, rope)], 1)


def insert_rows(
    latent: torch.Tensor,  # [n, 576] bf16
    slots: torch.Tensor,  # [n] int64, negative = skipped
    pages: torch.Tensor,  # [num_pages, 64, 656] uint8, changed in place
) -> None:
    """The fp8_ds_mla row of latent[i] lands in slot slots[i]."""
    live = slots >= 0
    page, offset = slots[live] // BLOCK_TOKENS, slots[live] % BLOCK_TOKENS
    pages[page, offset] = encode_rows(latent[live])


def insert_keys(
    keys: torch.Tensor,  # [n, 128] bf16
    slots: torch.Tensor,  # [n] int64, negative = skipped
    pages: torch.Tensor,  # [num_pages, 8448] uint8, changed in place
) -> None:
    """Key i as 128 e4m3 values and an fp32 scale lands in slot slots[i]."""
    values, scales = quantise_tiles(keys.float())
    records = torch.cat((values.view(torch.uint8), scales[:, None].view(torch.uint8)), 1)
    PageGeometry(128, 4).write(pages, slots, records)


def dequantise_rows(
    pages: torch.Tensor,  # [num_pages, 64, 656] uint8
    row_ids: torch.Tensor,  # [n] integers, negative = skipped
    out: torch.Tensor,  # [n, 576] bf16, changed in place
) -> None:
    """The values of row row_ids[i] land in out[i]."""
    live = row_ids >= 0
    ids = row_ids[live].long()
    rows = pages[ids // BLOCK_TOKENS, ids % BLOCK_TOKENS]
    values = e4m3_values(rows[:, :_RANK]).unflatten(1, (4, 128))
    scales = rows[:, _RANK:_SCALES_END].contiguous().view(torch.float32)
    rope = rows[:, _SCALES_END:].contiguous().view(torch.bfloat16)
    out[live] = torch.cat(((values * scales[..., None]).flatten(1).bfloat16(), rope), 1)


def to_token_order(
    shards: torch.Tensor,  # [R, pages, 64, row_bytes] uint8
    sharding: Sharding,
    num_tokens: int,
    out: torch.Tensor,  # [pages, 64, row_bytes] uint8, changed in place
) -> None:
    """Row t of out is the row in which the owner of token t keeps it."""
    token, rank, row = _places(sharding, num_tokens)
    out[token // BLOCK_TOKENS, token % BLOCK_TOKENS] = shards[
        rank, row // BLOCK_TOKENS, row % BLOCK_TOKENS
    ]


def to_shards(
    tokens: torch.Tensor,  # [pages, 64, row_bytes] uint8
    sharding: Sharding,
    num_tokens: int,
    out: torch.Tensor,  # [R, pages, 64, row_bytes] uint8, changed in place
) -> None:
    """Each owner's row of token t is row t of tokens."""
    token, rank, row = _places(sharding, num_tokens)
    out[rank, row // BLOCK_TOKENS, row % BLOCK_TOKENS] = tokens[
        token // BLOCK_TOKENS, token % BLOCK_TOKENS
    ]


def place_pages(
    shards: torch.Tensor,  # [R, blocks, layers, 64, row_bytes] uint8
    sharding: Sharding,
    first_page: int,
    num_tokens: int,
    page_ids: torch.Tensor,  # [ceil(num_tokens / 64)] int64
    pages: torch.Tensor,  # [layers, num_pages, 64, row_bytes] uint8, changed in place
) -> None:
    """Row t % 64 of page page_ids[t // 64] is, in all layers, the row in which the owner of token
    64 * first_page + t keeps it.
    """
    for token in range(num_tokens):
        position = np.array(first_page * BLOCK_TOKENS + token)
        rank, row = int(sharding.owner(position)), int(sharding.local_row(position))
        kept = shards[rank, row // BLOCK_TOKENS, :, row % BLOCK_TOKENS]  # [layers, row_bytes]
        pages[:, page_ids[token // BLOCK_TOKENS], token % BLOCK_TOKENS] = kept


def _places(sharding: Sharding, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    token = torch.arange(num_tokens)
    owner, row = sharding.owner(token.numpy()), sharding.local_row(token.numpy())
    return token, torch.from_numpy(owner), torch.from_numpy(row)
