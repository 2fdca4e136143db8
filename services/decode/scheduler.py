"""Admits sequences against decode's budgets, and says which run.

Pure; knows lengths, not where pages lie. Host pages, device pages (resident pages and hot rows are
one pool) and index pages are reserved for prompt and answer at once, so nothing is ever preempted.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shared.block_hash import BLOCK_TOKENS
from shared.engine.admission import AdmissionQueue
from shared.engine.kv.residency import ResidencyPolicy


@dataclass(frozen=True)
class Capacity:
    """What one decode rank has."""

    host_pages: int
    device_pages: int
    index_pages: int
    max_sequences: int


@dataclass
class Sequence:
    """A request's state on this worker."""

    request_id: str
    num_tokens: int  # prompt and answer so far
    end: int  # num_tokens when the answer has its greatest length
    is_running: bool = False  # False until its KV is here


class DecodeScheduler:
    """Sequences from offer to end."""

    def __init__(
        self,
        capacity: Capacity,
        policy: ResidencyPolicy,
        *,
        num_draft_tokens: int,
        max_overtakes: int = 64,
    ) -> None:
        """`max_overtakes`: see AdmissionQueue; 64 is about one batch of short sequences."""
        self._capacity = capacity
        self._policy = policy
        self._num_draft_tokens = num_draft_tokens
        totals = {
            "host pages": capacity.host_pages,
            "device pages": capacity.device_pages,
            "index pages": capacity.index_pages,
            "sequences": capacity.max_sequences,
        }
        self._queue = AdmissionQueue(totals, max_overtakes=max_overtakes)
        self._sequences: dict[str, Sequence] = {}

    @property
    def max_sequence_tokens(self) -> int:
        """The longest prompt and answer that could run here alone."""
        num_pages = min(self._capacity.host_pages, self._capacity.index_pages)
        longest = self._policy.max_sequence_tokens(num_pages, self._capacity.device_pages)
        return longest - self._num_draft_tokens

    @property
    def max_whole_pages(self) -> int:
        """A sequence of at most so many pages takes as many of the device; no pool is larger."""
        return min(self._policy.max_whole_pages, self._capacity.device_pages)

    @property
    def leased_device_pages(self) -> int:
        """What a longer one takes there, whatever its length."""
        longest = self._capacity.host_pages * BLOCK_TOKENS
        return self._policy.device_pages(longest)

    @property
    def free(self) -> Capacity:
        """What is not reserved; imports still under way have their reservation."""
        free = self._queue.free
        return Capacity(
            free["host pages"], free["device pages"], free["index pages"], free["sequences"]
        )

    @property
    def num_waiting(self) -> int:
        """Sequences without reservation."""
        return self._queue.num_waiting

    @property
    def unimported_tokens(self) -> int:
        """Tokens of the sequences whose KV is not here yet."""
        return sum(s.num_tokens for s in self._sequences.values() if not s.is_running)

    def reserved_tokens(self, num_tokens: int, max_new_tokens: int) -> int:
        """Slots a sequence may write: rejected drafts after the last token need room too."""
        return num_tokens + max_new_tokens + self._num_draft_tokens

    def enqueue(self, request_id: str, num_tokens: int, max_new_tokens: int) -> None:
        """Let a sequence wait. TooLong if it could never run here; BadRequest if it is here."""
        reserved = self.reserved_tokens(num_tokens, max_new_tokens)
        num_pages = -(-reserved // BLOCK_TOKENS)
        demand = {
            "host pages": num_pages,
            "device pages": self._policy.device_pages(reserved),
            "index pages": num_pages,
            "sequences": 1,
        }
        self._queue.enqueue(request_id, demand)
        end = num_tokens + max_new_tokens
        self._sequences[request_id] = Sequence(request_id, num_tokens, end)

    def admit(self, allocate: Callable[[str], bool]) -> list[str]:
        """Reserve room in order of arrival; `allocate` takes the blocks, False means not now."""
        return self._queue.admit(allocate)

    def start(self, request_id: str) -> None:
        """An admitted sequence's KV is complete: it takes part in the next step."""
        assert self._queue.is_admitted(request_id), "started without a reservation"
        self._sequences[request_id].is_running = True

    def batch(self) -> list[Sequence]:
        """The sequences of the next step, in order of arrival."""
        return [sequence for sequence in self._sequences.values() if sequence.is_running]

    def advance(self, request_id: str, num_new_tokens: int) -> bool:
        """Count a step's accepted tokens. True when the answer has its greatest length."""
        sequence = self._sequences[request_id]
        sequence.num_tokens += num_new_tokens
        assert sequence.num_tokens <= sequence.end, "more tokens than were reserved"
        return sequence.num_tokens == sequence.end

    def release(self, request_id: str) -> bool:
        """Ended, failed or cancelled, in any state; False if it is not known, or no longer."""
        self._sequences.pop(request_id, None)
        return self._queue.release(request_id)
