"""The coordinator's side of a prefill worker's ranks: one process each, started and ended together.

Computes nothing and loads no torch. A step goes to all ranks over pipes; waiting for them blocks
one thread, never the event loop. A rank that ends, fails or disagrees ends the worker.
"""

import asyncio
import ctypes
import multiprocessing
import os
import pickle
import secrets
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from shared import farspan_pb2 as pb
from shared.engine import compute_threads
from shared.engine.model.config import ModelConfig, load_config
from shared.engine.rank_messages import RankReady, RankRefused, RankReply, RankSettings
from shared.engine.step import PrefillStep, StepResult
from shared.errors import ConfigError

_PR_SET_PDEATHSIG = 1
_STOP_S = 5.0  # a rank ends after the step it is in
_KILL_S = 2.0


class RankLost(Exception):
    """A rank's process is gone or not to be trusted; the worker cannot go on."""


class Ranks:
    """Running ranks. Use `run` for one step at a time."""

    def __init__(
        self,
        config: ModelConfig,
        members: "Sequence[_Member]",
        ready: Sequence[RankReady],
        thread: ThreadPoolExecutor,
    ) -> None:
        self.vocab_size = config.vocab_size
        self.max_position = config.max_position
        self.regions: Sequence[pb.RankRegions] = [
            pb.RankRegions.FromString(each.regions) for each in ready
        ]
        self.layout = pb.KvLayout.FromString(ready[0].layout)
        self._members = members
        self._thread = thread

    async def run(self, step: PrefillStep) -> StepResult:
        """Rank 0's result, once every rank has done the step. Raises RankLost."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._run, step)

    async def watch(self) -> None:
        """For ever; raises RankLost when a rank's process ends."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[_Member] = loop.create_future()

        def note(member: _Member) -> None:
            loop.remove_reader(member.process.sentinel)
            if not ended.done():
                ended.set_result(member)

        for member in self._members:
            loop.add_reader(member.process.sentinel, note, member)
        try:
            raise (await ended).loss()
        finally:
            for member in self._members:
                loop.remove_reader(member.process.sentinel)

    def _run(self, step: PrefillStep) -> StepResult:
        data = pickle.dumps(step)
        for member in self._members:
            member.send_bytes(data)
        replies: list[RankReply] = _one_of_each(self._members)
        if len({reply.digest for reply in replies}) != 1:
            raise RankLost("ranks disagree on a step or on its tokens")
        assert replies[0].result is not None
        return replies[0].result


@asynccontextmanager
async def start(settings: RankSettings) -> AsyncIterator[Ranks]:
    """All ranks inside the block, ready; their processes are gone when it is left.

    Raises ConfigError for what a rank finds wrong with settings or files, RankLost when one ends.
    """
    config = load_config(settings.checkpoint)  # what is missing is told before anything is loaded
    members: list[_Member] = []
    # A file that gloo makes: unlike a store on TCP it listens nowhere.
    rendezvous = Path(tempfile.gettempdir()) / f"farspan-ranks-{secrets.token_hex(8)}"
    with ThreadPoolExecutor(1, thread_name_prefix="prefill-step") as thread:
        try:
            for rank in range(settings.num_ranks):
                # On the loop's thread, which lives as long as the process: the kernel kills a rank
                # with the thread that started it.
                members.append(_Member(settings, rank, rendezvous))
            loop = asyncio.get_running_loop()
            ready = await loop.run_in_executor(thread, _one_of_each, members)
            for each in ready:
                if isinstance(each, RankRefused):
                    raise ConfigError(each.reason)
            yield Ranks(config, members, ready, thread)
        finally:
            await asyncio.to_thread(_stop, members)
            rendezvous.unlink(missing_ok=True)


class _Member:
    """One rank's process and our end of its pipe."""

    def __init__(self, settings: RankSettings, rank: int, rendezvous: Path) -> None:
        context = multiprocessing.get_context("spawn")  # NIXL and threads do not survive a fork
        self.rank = rank
        self.calls, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(
            target=_begin,
            args=(settings, rank, rendezvous, theirs, os.getpid()),
            name=f"prefill-rank-{rank}",
            daemon=True,
        )
        self.process.start()
        theirs.close()

    def send_bytes(self, data: bytes) -> None:
        """Raises RankLost when nobody reads any more."""
        try:
            self.calls.send_bytes(data)
        except OSError:
            raise self.loss() from None

    def receive(self) -> Any:
        """The next message. Raises RankLost when there will be none."""
        try:
            return self.calls.recv()
        except (EOFError, OSError):
            raise self.loss() from None

    def loss(self) -> RankLost:
        """What to say when the process is gone."""
        self.process.join(_KILL_S)
        code = self.process.exitcode
        return RankLost(f"rank {self.rank} is gone (exit code {code})")


def _begin(
    settings: RankSettings, rank: int, rendezvous: Path, calls: Connection, parent_pid: int
) -> None:
    _die_with_parent(parent_pid)
    compute_threads.calm_openmp(os.environ)
    # Ranks of one worker share a host: gloo need not listen anywhere else.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from shared.engine.rank_process import serve  # loads torch, which the coordinator does not

    serve(settings, rank, rendezvous, calls)


def _die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the one that started it is gone. Linux only."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it was faster
            os._exit(1)


def _one_of_each(members: Sequence[_Member]) -> list[Any]:
    """The next message of every rank, in order; RankLost as soon as one has ended instead."""
    messages: dict[int, Any] = {}
    while len(messages) < len(members):
        missing = [member for member in members if member.rank not in messages]
        spoken = wait([member.calls for member in missing])
        for member in missing:
            if member.calls in spoken:
                messages[member.rank] = member.receive()
                if isinstance(messages[member.rank], RankRefused):
                    return [messages[member.rank]]  # the others may wait for it for ever
    return [messages[member.rank] for member in members]


def _stop(members: Sequence[_Member]) -> None:
    for member in members:
        with suppress(OSError):
            member.calls.send(None)
    deadline = time.monotonic() + _STOP_S
    for member in members:
        member.process.join(max(0.0, deadline - time.monotonic()))
    for member in members:
        if member.process.is_alive():
            member.process.kill()
        member.process.join()
        member.calls.close()
        member.process.close()
