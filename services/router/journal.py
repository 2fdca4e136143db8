"""The latest decisions of one router, to be asked for by id; and a file of all of them, if wanted.

Keeps plain data; messages are made when somebody asks, so a decision does not pay for them.
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
    decided_unix_ms: int
    seen: Inputs
    judgement: Judgement


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
        self._waiting: list[_Kept] = []
        if file is not None:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.open("ab").close()
            except OSError as error:
                raise ConfigError(f"decisions cannot be written to {file}: {error}") from error

    def add(self, decided_unix_ms: int, seen: Inputs, judgement: Judgement) -> None:
        """Remember a decision or a refusal, and forget the oldest."""
        kept = _Kept(decided_unix_ms, seen, judgement)
        if self._num_kept:
            self._forget(seen.request.request_id)
            self._kept[seen.request.request_id] = kept
            for name in seen.request.known_as:
                self._aliases.setdefault(name, []).append(seen.request.request_id)
            if len(self._kept) > self._num_kept:
                self._forget(next(iter(self._kept)))
        if self._file is not None:
            if len(self._waiting) < _MAX_UNWRITTEN:
                self._waiting.append(kept)
            else:
                self.num_unwritten += 1

    def find(self, name: str) -> list[pb.DecisionRecord]:
        """What is remembered of this request, by its id or by one that its client knows."""
        request_ids = dict.fromkeys([name, *self._aliases.get(name, [])])
        return [self._record(self._kept[each]) for each in request_ids if each in self._kept]

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
            await asyncio.to_thread(_append, self._file, [self._record(each) for each in waiting])
        except OSError as error:
            if not self.num_unwritten:
                logger.error("decisions are not being written: %s", error)
            self.num_unwritten += len(waiting)

    def _forget(self, request_id: str) -> None:
        kept = self._kept.pop(request_id, None)
        if kept is None:
            return
        for name in kept.seen.request.known_as:
            self._aliases[name].remove(request_id)
            if not self._aliases[name]:
                del self._aliases[name]

    def _record(self, kept: _Kept) -> pb.DecisionRecord:
        return records.record(self._router_id, kept.decided_unix_ms, kept.seen, kept.judgement)


def _append(file: Path, decided: Sequence[pb.DecisionRecord]) -> None:
    lines = [json.dumps(json_format.MessageToDict(each)) + "\n" for each in decided]
    with file.open("a") as output:
        output.write("".join(lines))
