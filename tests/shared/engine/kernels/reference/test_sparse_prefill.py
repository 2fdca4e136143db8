"""The meaning of the sparse prefill kernels against the engine's own attention on a CPU."""

import torch

from shared.engine.attention import sparse_attention
from shared.engine.kernels.reference.sparse_prefill import sparse_mla_prefill


def test_the_meaning_is_that_of_the_cpu_engine() -> None:
    """Both in fp32, so that they differ by the order of sums alone."""
    torch.manual_seed(0)
    query, rows = torch.randn(5, 4, 24), torch.randn(40, 24)
    chosen = torch.randint(40, (5, 12))
    chosen[1, ::2] = -1
    chosen[2] = -1

    out, _ = sparse_mla_prefill(query, rows, chosen, 16, 0.25)

    torch.testing.assert_close(out, sparse_attention(query, rows, chosen, 16, 0.25))


def test_parts_merge_by_their_logarithms_into_the_whole() -> None:
    """What it gives beside the output is what a merge of partial attention needs."""
    torch.manual_seed(1)
    query, rows = torch.randn(3, 4, 24), torch.randn(40, 24)
    chosen = torch.randint(40, (3, 12))

    parts = [sparse_mla_prefill(query, rows, part, 16, 0.25) for part in chosen.split(5, 1)]
    out, lse = sparse_mla_prefill(query, rows, chosen, 16, 0.25)

    logarithms = torch.stack([part[1] for part in parts])
    torch.testing.assert_close(logarithms.logsumexp(0), lse)
    shares = logarithms.softmax(0).unsqueeze(-1)
    torch.testing.assert_close((torch.stack([part[0] for part in parts]) * shares).sum(0), out)
