"""How much may go on at once, and how much in a minute: of the gateway, and of each key.

Told of time, it never asks for it. Every refusal says when to come again.
"""

from collections import Counter
from dataclasses import dataclass, field
from math import ceil

from services.gateway.door.keys import Caller
from services.gateway.failures import InvalidRequest

LIMITED = "rate_limit_exceeded"
_MINUTE_S = 60.0
_ROUNDING = 1e-6  # of a request or token: who waits as long as he was told is let in


@dataclass(frozen=True)
class Bounds:
    """What the gateway takes in, whoever sends it."""

    max_in_flight: int
    max_queued: int  # of these, how many may still wait for a first token


class Bucket:
    """An allowance of `per_minute`, full at first, that refills evenly.

    More than is left may be taken only if it is all there could ever be: that is a debt, paid
    before anything else.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._then_s = now_s

    def left(self, now_s: float) -> float:
        """What may be taken now; less than nothing while there is a debt."""
        self._level = min(
            float(self.per_minute),
            self._level + (now_s - self._then_s) * self.per_minute / _MINUTE_S,
        )
        self._then_s = now_s
        return self._level

    def wait_s(self, count: int, now_s: float) -> float:
        """How long until `count` may be taken; 0 for now."""
        missing = min(count, self.per_minute) - self.left(now_s)
        return missing * _MINUTE_S / self.per_minute if missing > _ROUNDING else 0.0

    def take(self, count: int, now_s: float) -> None:
        """Take what wait_s allowed."""
        self._level = self.left(now_s) - count


@dataclass
class Account:
    """What one key has used."""

    buckets: dict[str, Bucket] = field(default_factory=dict)

    def bucket(self, unit: str, per_minute: int | None, now_s: float) -> Bucket | None:
        """The key's allowance of requests or tokens; a changed one begins full."""
        if per_minute is None:
            self.buckets.pop(unit, None)
            return None
        bucket = self.buckets.get(unit)
        if bucket is None or bucket.per_minute != per_minute:
            bucket = self.buckets[unit] = Bucket(per_minute, now_s)
        return bucket

    def headers(self, now_s: float) -> dict[str, str]:
        """What is left, as OpenAI's clients read it."""
        told: dict[str, str] = {}
        for unit, bucket in self.buckets.items():
            told[f"x-ratelimit-limit-{unit}"] = str(bucket.per_minute)
            told[f"x-ratelimit-remaining-{unit}"] = str(max(0, int(bucket.left(now_s))))
            reset_s = bucket.wait_s(bucket.per_minute, now_s)
            told[f"x-ratelimit-reset-{unit}"] = f"{reset_s:.3f}s"
        return told


class Turnstile:
    """Counts what is inside. Used on one event loop."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.num_in_flight = 0
        self.num_queued = 0
        self._in_flight_of: Counter[str] = Counter()
        self._accounts: dict[str, Account] = {}  # by the names of keys, so as many as the file has

    def enter(self, caller: Caller, now_s: float) -> "Visit":
        """Let a request in. Raises InvalidRequest with status 429 when it must wait outside."""
        limits = caller.limits
        account = self._accounts.setdefault(caller.name, Account())
        in_flight = self._in_flight_of[caller.name]
        requests = account.bucket("requests", limits.requests_per_minute, now_s)
        account.bucket("tokens", limits.prompt_tokens_per_minute, now_s)
        if self.num_in_flight >= self.bounds.max_in_flight:
            raise _refused(f"{self.num_in_flight} requests are being served, no more can be", 1.0)
        if limits.max_in_flight is not None and in_flight >= limits.max_in_flight:
            raise _refused(f"this key may have {limits.max_in_flight} requests at once", 1.0)
        if requests is not None:
            if (wait_s := requests.wait_s(1, now_s)) > 0:
                told = f"this key may send {requests.per_minute} requests a minute"
                raise _refused(told, wait_s, account.headers(now_s))
            requests.take(1, now_s)
        self.num_in_flight += 1
        self._in_flight_of[caller.name] += 1
        return Visit(self, caller, account)

    def leave(self, visit: "Visit") -> None:
        """The request has ended, however it did. Once for each visit."""
        visit.leave_queue()
        self.num_in_flight -= 1
        self._in_flight_of[visit.caller.name] -= 1
        if not self._in_flight_of[visit.caller.name]:
            del self._in_flight_of[visit.caller.name]


class Visit:
    """One request inside."""

    def __init__(self, turnstile: Turnstile, caller: Caller, account: Account) -> None:
        self.caller = caller
        self._turnstile = turnstile
        self._account = account
        self._is_queued = False

    def enter_queue(self) -> None:
        """It waits for a first token from now on. Raises InvalidRequest, 429, if too many do."""
        if self._is_queued:
            return
        if self._turnstile.num_queued >= self._turnstile.bounds.max_queued:
            num_queued = self._turnstile.num_queued
            raise _refused(f"{num_queued} requests wait for a first token already", 1.0)
        self._is_queued = True
        self._turnstile.num_queued += 1

    def leave_queue(self) -> None:
        """Its first token is there, or it will have none."""
        if self._is_queued:
            self._is_queued = False
            self._turnstile.num_queued -= 1

    def note_prompt(self, num_tokens: int, now_s: float) -> None:
        """Count a prompt before it is placed. Raises InvalidRequest, 429, if it must wait.

        A prompt longer than a minute's allowance goes when the allowance is full, and is paid for
        with the minutes after it.
        """
        bucket = self._account.buckets.get("tokens")
        if bucket is None:
            return
        if (wait_s := bucket.wait_s(num_tokens, now_s)) > 0:
            told = f"this key may send {bucket.per_minute} prompt tokens a minute"
            raise _refused(told, wait_s, self._account.headers(now_s))
        bucket.take(num_tokens, now_s)

    def check_priority(self, priority: int) -> None:
        """Raises InvalidRequest for more than the key may claim."""
        most = self.caller.limits.max_priority
        if most is not None and priority > most:
            raise InvalidRequest(
                f"this key may claim a priority of at most {most}",
                param="priority",
                code="priority_not_allowed",
                status=403,
                error_type="permission_error",
            )

    def headers(self, now_s: float) -> dict[str, str]:
        """What is left to the key."""
        return self._account.headers(now_s)


def _refused(told: str, wait_s: float, headers: dict[str, str] | None = None) -> InvalidRequest:
    return InvalidRequest(
        f"{told}; come again in {wait_s:.1f} s",
        code=LIMITED,
        status=429,
        error_type=LIMITED,
        headers={**(headers or {}), "retry-after": str(max(1, ceil(wait_s)))},
    )
