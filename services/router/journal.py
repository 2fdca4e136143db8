"""The latest decisions of one router, to be asked for by id; and a file of all of them, if wanted.

Keeps bytes: what is kept as objects is walked by every full garbage collection, which stops the
router for longer than a placement may take (docs/LOG.md).
"""

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from google.protobuf import json_format

from services.router import records
from services.router.policy import Judgement
from services.router.records import Inputs
from shared import farspan_pb2 as pb
from shared.errors import ConfigError

logger = logging.getLogger(__name__)

_MAX_UNWRITTEN = 4096
_WRITE_S = 0.2


class _Kept(NamedTuple):
    known_as: tuple[str, ...]
    record: bytes  # a DecisionRecord


class Journal:
    """A bounded memory of decisions. Used on one event loop."""

    def __init__(self, router_id: str, num_kept: int, file: Path | None) -> None:
        """Raises ConfigError if the file cannot be written."""
        self.num_unwritten = 0  # lost to the file: it was too slow, or full
        self._router_id = router_id
        self._num_kept = num_kept
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # by request id
        self._aliases: dict[str, list[str]] = {}  # of what clients know to request ids
        self._file = file
        self._waiting: list[bytes] = []
        if file is not None:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.open("ab").close()
            except OSError as error:
                raise ConfigError(f"decisions cannot be written to {file}: {error}") from error

    def add(
        self, decided_unix_ms: int, seen: Inputs, judgement: Judgement, withdrawn: str = ""
    ) -> None:
        """Remember a decision or a refusal, and forget the oldest.

        `withdrawn` says why what was decided has not been promised after all.
        """
        if not self._num_kept and self._file is None:
            return
        record = records.record(self._router_id, decided_unix_ms, seen, judgement)
        record.withdrawn = withdrawn
        request_id, known_as = seen.request.request_id, tuple(seen.request.known_as)
        kept = _Kept(known_as, record.SerializeToString())
        if self._num_kept:
            self._forget(request_id)
            self._kept[request_id] = kept
            for name in known_as:
                self._aliases.setdefault(name, []).append(request_id)
            if len(self._kept) > self._num_kept:
                self._forget(next(iter(self._kept)))
        if self._file is not None:
            if len(self._waiting) < _MAX_UNWRITTEN:
                self._waiting.append(kept.record)
            else:
                self.num_unwritten += 1

    def find(self, name: str) -> list[pb.DecisionRecord]:
        """What is remembered of this request, by its id or by one that its client knows."""
        request_ids = dict.fromkeys([name, *self._aliases.get(name, [])])
        return [_read(self._kept[each].record) for each in request_ids if each in self._kept]

    async def write(self) -> None:
        """For ever append what was decided to the file."""
        while self._file is not None:
            await asyncio.sleep(_WRITE_S)
            await self.flush()

    async def flush(self) -> None:
        """Append what waits. A full disk loses records, never a request."""
        waiting, self._waiting = self._waiting, []
        if self._file is None or not waiting:
            return
        try:
            await asyncio.to_thread(_append, self._file, waiting)
        except OSError as error:
            if not self.num_unwritten:
                logger.error("decisions are not being written: %s", error)
            self.num_unwritten += len(waiting)

    def _forget(self, request_id: str) -> None:
        kept = self._kept.pop(request_id, None)
        if kept is None:
            return
        for name in kept.known_as:
            self._aliases[name].remove(request_id)
            if not self._aliases[name]:
                del self._aliases[name]


def _read(record: bytes) -> pb.DecisionRecord:
    return pb.DecisionRecord.FromString(record)


def _append(file: Path, decided: Sequence[bytes]) -> None:
    lines = [json.dumps(json_format.MessageToDict(_read(each))) + "\n" for each in decided]
    with file.open("a") as output:
        output.write("".join(lines))
