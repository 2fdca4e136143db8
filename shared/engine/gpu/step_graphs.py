"""Decode steps captured as CUDA graphs, one for each padded shape.

A step of hundreds of kernels takes longer to launch than to compute; a replay is one launch. All
are captured before the worker serves: a capture amid serving would hold every sequence up.
"""

import itertools

import torch

from shared.engine.gpu.decode_step import DecodeStep
from shared.engine.kv.layout import BLOCK_TOKENS


class StepGraphs:
    """All shapes of one DecodeStep."""

    def __init__(self, step: DecodeStep, max_pages: int) -> None:
        self._step = step
        self._row_sizes = row_sizes(step.max_rows)
        self._page_sizes = page_sizes(step.model.config.attention.index_topk, max_pages)
        self._pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        # The largest first: the smaller ones live in its memory.
        with torch.cuda.stream(stream):
            self._graphs = {
                shape: self._captured(*shape)
                for shape in itertools.product(self._row_sizes[::-1], self._page_sizes[::-1])
            }
        torch.cuda.current_stream().wait_stream(stream)

    def run(self, num_rows: int, num_pages: int) -> None:
        """See DecodeStep.run; what lies behind num_rows must be padding."""
        rows = next(size for size in self._row_sizes if size >= num_rows)
        pages = next(size for size in self._page_sizes if size >= num_pages)
        self._graphs[rows, pages].replay()

    def _captured(self, num_rows: int, num_pages: int) -> torch.cuda.CUDAGraph:
        # Kernels are compiled, and libraries set up, by a run that is not captured.
        self._step.run(num_rows, num_pages)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            self._step.run(num_rows, num_pages)
        finally:
            graph.capture_end()
        return graph


def row_sizes(max_rows: int) -> list[int]:
    """Powers of two up to 8, then steps of at most a third, so that little is padding."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < max_rows:
        sizes.append(sizes[-1] * 3 // 2 if sizes[-1] & (sizes[-1] - 1) == 0 else sizes[-1] * 4 // 3)
    return [size for size in sizes if size < max_rows] + [max_rows]


def page_sizes(topk: int, max_pages: int) -> list[int]:
    """Contexts that need no choice, then four times as many, and so on.

    A program of the indexer takes a share of the pages that a graph is made for, so a graph must
    not be much larger than the context.
    """
    sizes = [max(topk // BLOCK_TOKENS, 1)]
    while sizes[-1] < max_pages:
        sizes.append(sizes[-1] * 4)
    return [size for size in sizes if size < max_pages] + [max_pages]
