"""Lets decode workers read one prefill rank's pools over NIXL.

NIXL gives no protection: what is registered here stays readable, so decode checks epoch and
generations itself. The owner raises a block's generation before it writes the block for another
request.
"""

import os
import signal
import threading
from types import TracebackType
from typing import Self

import torch

from shared import farspan_pb2 as pb
from shared.engine.handoff.agent import NixlAgent, place_of

_POLL_S = 0.001  # 3-6 % of a core; a read of 1 MiB takes 0.7 ms, so a longer wait would show


class KvExporter:
    """Serves reads of the pools while inside its `with`.

    The pools must stay allocated until the process ends: over TCP, a peer that reads unmapped
    memory kills its owner. They may lie on a GPU, the generations never: a CPU writes them
    and a CPU checks them.
    """

    def __init__(
        self,
        owner: str,
        mla_pool: torch.Tensor,  # [num_blocks, num_mla_layers, 64, row_bytes] uint8
        index_pool: torch.Tensor,  # [num_blocks, num_index_layers, index_page_bytes] uint8
        generations: torch.Tensor,  # [1 + num_blocks] int64: epoch, then each block's
    ) -> None:
        assert len(mla_pool) == len(index_pool) == len(generations) - 1
        assert mla_pool.dtype == index_pool.dtype == torch.uint8
        assert generations.dtype == torch.int64 and generations.device.type == "cpu"
        assert mla_pool.device == index_pool.device
        self._pools = (mla_pool, index_pool, generations)
        self._agent = NixlAgent(owner)
        for pool in self._pools:
            self._agent.register(pool)
        self._stopping = threading.Event()
        self._poller = threading.Thread(target=self._serve, name="kv-exporter")

    def __enter__(self) -> Self:
        self._poller.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        self._poller.join()

    def regions(self) -> pb.RankRegions:
        """What decode needs to read the pools."""
        mla_pool, index_pool, generations = self._pools
        place = place_of(mla_pool)
        return pb.RankRegions(
            agent_name=self._agent.name,
            agent_metadata=self._agent.metadata(),
            mla_base=mla_pool.data_ptr(),
            index_base=index_pool.data_ptr(),
            generation_base=generations.data_ptr(),
            num_blocks=len(mla_pool),
            memory_kind=place.kind,
            device_idx=place.device_idx,
        )

    def _serve(self) -> None:
        device = self._pools[0].device
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # for reads that UCX copies on our side
            while not self._stopping.wait(_POLL_S):
                self._agent.progress()
        finally:
            if not self._stopping.is_set():
                # A rank that serves no reads would let every handoff time out: it had better end.
                os.kill(os.getpid(), signal.SIGTERM)
