"""All of Farspan on one machine: NATS, Redis and the five services, as processes on 127.0.0.1.

`async with Stack(options) as stack:` starts them, waits until each is ready, and stops them all;
`await stack.keep()` inside starts again what ends by itself.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self

from services.local import checkpoint, child, own_secret, probe, restarts, run_folder
from services.local.child import Child
from services.local.plan import DRAIN_S, HOST, Options, Spec, plan
from services.local.servers import free_ports
from shared.errors import FarspanError

_READY_S = 180.0  # loading a large checkpoint on a slow disk
_STOP_S = DRAIN_S + 10.0  # workers wait 5 s more for gateways that are gone
_POLL_S = 0.1
_REPORT_S = 5.0


class StackFailed(FarspanError):
    """A process of the stack ended by itself, or did not become ready; the message ends its log."""


class Stack:
    """A running stack. `report` gets a line when a process becomes ready, or takes long."""

    def __init__(self, options: Options, report: Callable[[str], None] = lambda line: None) -> None:
        ports = iter(free_ports(4 + 4 + options.prefill_workers + options.decode_workers))
        self.port = options.port or next(ports)
        self.folder = (options.run_folder or run_folder.of_port(self.port)).resolve()
        self.children: dict[str, Child] = {}
        self._alive: set[str] = set()  # what has to be ended, with whatever it started
        self._checkpoint = options.checkpoint
        self._report = report
        self._specs = plan(replace(options, port=self.port), self.folder, ports)
        self._stack = AsyncExitStack()
        self._started_s = time.monotonic()

    @property
    def base_url(self) -> str:
        """What an OpenAI client needs."""
        return f"http://{HOST}:{self.port}/v1"

    @property
    def nats_url(self) -> str:
        """The stack's own NATS server, with its secret."""
        return f"nats://{self._secret}@{HOST}:{self._spec('nats').port}"

    @property
    def redis_url(self) -> str:
        """The stack's own Redis, with its secret."""
        return f"redis://:{self._secret}@{HOST}:{self._spec('redis').port}/0"

    def log(self, name: str) -> Path:
        """Where the output of a process goes."""
        return self.folder / "logs" / f"{name}.log"

    async def __aenter__(self) -> Self:
        checkpoint.require_servable(self._checkpoint)
        probe.require_free(HOST, self.port)
        async with AsyncExitStack() as stack:
            stack.enter_context(run_folder.held(self.folder))
            self._secret = stack.enter_context(own_secret.made(self.folder))
            self._report("Farspan is starting NATS, Redis and its services; Ctrl-C stops them all.")
            self._guard = stack.enter_context(child.guarded())
            stack.push_async_callback(self._stop)
            servers = [spec.name for spec in self._specs if not spec.has_probe]
            services = [spec.name for spec in self._specs if spec.has_probe]
            for group in (servers, services):
                for name in group:
                    await self._launch(name)
                await self._all_ready(group)
            self._announce()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    async def keep(self) -> None:
        """Start each process again when it ends by itself, for ever.

        Raises StackFailed for one that ends again and again.
        """
        keeping = [asyncio.create_task(self._keep(name)) for name in self.children]
        try:
            await asyncio.gather(*keeping)
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)

    async def _keep(self, name: str) -> None:
        """Deaths are timed by the seconds it was ready: one that never is ends the stack, too."""
        deaths_s: deque[float] = deque(maxlen=restarts.MAX_DEATHS)
        ready_s = 0.0
        while True:
            began_s = time.monotonic()
            status = await self.children[name].wait()
            ready_s += time.monotonic() - began_s
            deaths_s.append(ready_s)
            await self._end(name)
            pause_s = restarts.pause_s(deaths_s)
            if pause_s is None:
                often = f"ended {len(deaths_s)} times in a short time"
                raise self._failure(name, f"{often}, at last with status {status}")
            again = f"starts again in {pause_s:g} s"
            self._tell(name, f"ended with status {status}, {again}; its log: {self.log(name)}")
            await asyncio.sleep(pause_s)
            await self._launch(name)
            await self._is_ready(name)

    async def _launch(self, name: str) -> None:
        started = await child.start(self._spec(name), self.log(name))
        self._guard.tell(f"+{started.pid}")
        self.children[name] = started
        self._alive.add(name)

    async def _ready(self, name: str) -> None:
        if not await self._is_ready(name):
            raise self._failure(name, f"ended with status {self.children[name].returncode}")

    async def _is_ready(self, name: str) -> bool:
        """Wait until a process is ready; False if it ends. Raises StackFailed if it takes long."""
        started_s = reported_s = time.monotonic()
        while (reason := await probe.unready(self._spec(name))) is not None:
            now_s = time.monotonic()
            if self.children[name].returncode is not None:
                return False
            if now_s - started_s > _READY_S:
                raise self._failure(name, f"is not ready after {_READY_S:g} s: {reason}")
            if now_s - reported_s > _REPORT_S:
                reported_s = now_s
                self._tell(name, f"... {reason}")
            await asyncio.sleep(_POLL_S)
        self._tell(name, "ready")
        return True

    async def _all_ready(self, names: list[str]) -> None:
        """Return when all are. Raises StackFailed if any ends: it would not fare better again."""
        failing = asyncio.create_task(self._until_one_ends())
        ready = asyncio.gather(*(self._ready(name) for name in names))
        try:
            await asyncio.wait((ready, failing), return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                raise failing.result()
            await ready
        finally:
            failing.cancel()
            ready.cancel()
            await asyncio.gather(ready, failing, return_exceptions=True)

    async def _until_one_ends(self) -> StackFailed:
        waiting = {
            asyncio.create_task(started.wait()): name for name, started in self.children.items()
        }
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            task = done.pop()
            return self._failure(waiting[task], f"ended with status {task.result()}")
        finally:
            for task in waiting:
                task.cancel()

    async def _stop(self) -> None:
        """Services first and together, then the servers they stand on."""
        run_folder.withdraw(self.folder)
        for has_probe in (True, False):
            group = [name for name in self._alive if self._spec(name).has_probe is has_probe]
            await asyncio.gather(*map(self._end, group))

    async def _end(self, name: str) -> None:
        """End a process, if that was not done before, and all that it started."""
        if name not in self._alive:
            return
        ended = self.children[name]
        if not await ended.stop(_STOP_S):
            self._tell(name, f"killed: it did not stop in {_STOP_S:g} s")
        self._alive.remove(name)
        self._guard.tell(f"-{ended.pid}")

    def _announce(self) -> None:
        """Leave word for `farspan status`."""
        running = run_folder.Running(
            base_url=self.base_url,
            nats_url=f"nats://{HOST}:{self._spec('nats').port}",
            probes={spec.name: spec.port for spec in self._specs if spec.has_probe},
            servers={spec.name: spec.port for spec in self._specs if not spec.has_probe},
        )
        run_folder.announce(self.folder, running)

    def _spec(self, name: str) -> Spec:
        return next(spec for spec in self._specs if spec.name == name)

    def _failure(self, name: str, what: str) -> StackFailed:
        log = self.log(name)
        return StackFailed(f"{name} {what}; the end of {log}:\n{self.children[name].last_lines()}")

    def _tell(self, name: str, what: str) -> None:
        self._report(f"[{time.monotonic() - self._started_s:5.1f} s] {name:<10} {what}")
