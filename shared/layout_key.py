"""Between which layouts KV can move: one rule for placement, for limits and for the handshake."""

from typing import NamedTuple

from shared import farspan_pb2 as pb


class LayoutKey(NamedTuple):
    """The fields of a layout that prefill and decode must have in common.

    Ranks and interleave are the sender's own.
    """

    model_fingerprint: str
    kv_format: str
    block_tokens: int
    num_mla_layers: int
    num_index_layers: int
    row_bytes: int
    index_page_bytes: int


def layout_key(layout: pb.KvLayout) -> LayoutKey:
    """Equal for two layouts exactly if KV can move from one to the other."""
    return LayoutKey(*(getattr(layout, name) for name in LayoutKey._fields))
