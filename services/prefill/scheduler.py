"""Chooses what the next prefill step computes.

Pure; knows lengths and budgets, nothing of ranks, blocks' places or messages. Chunked prefill after
Sarathi-Serve (arXiv:2403.02310); shortest remaining work first, but every fourth step by age.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shared.block_hash import BLOCK_TOKENS
from shared.engine.admission import AdmissionQueue
from shared.errors import ConfigError

# A long prompt keeps at least a quarter of the engine while short turns keep coming, and a short
# turn waits for at most one step of an older prompt.
AGE_EVERY = 4


@dataclass
class Prompt:
    """A prompt that has its blocks."""

    request_id: str
    num_tokens: int
    num_done: int  # cached or computed; a multiple of 64 until the prompt is complete
    lent: int | None = None  # what is left for the shortest prompt that waits for this one's blocks

    @property
    def remaining(self) -> int:
        """Tokens to compute."""
        return self.num_tokens - self.num_done

    @property
    def urgency(self) -> int:
        """Lower is sooner: who waits for a prompt must not wait behind others for it."""
        return self.remaining if self.lent is None else min(self.remaining, self.lent)


@dataclass(frozen=True)
class PlannedChunk:
    """Positions first..end-1 of a prompt, to be computed in the next step."""

    request_id: str
    first: int
    end: int


def plan_chunks(prompts: Iterable[Prompt], chunk_tokens: int) -> list[PlannedChunk]:
    """Fill one step's budget in the given order.

    A chunk that does not finish its prompt ends with a block, which can be published then.
    """
    chunks = []
    left = chunk_tokens
    for prompt in prompts:
        taken = prompt.remaining if prompt.remaining <= left else left - left % BLOCK_TOKENS
        if taken == 0:
            continue
        chunks.append(PlannedChunk(prompt.request_id, prompt.num_done, prompt.num_done + taken))
        left -= taken
    return chunks


def max_steps(remaining: Sequence[int], chunk_tokens: int) -> int:
    """After so many steps a prompt is complete, whatever arrives later.

    `remaining` are the tokens to compute of the prompts that started before it, and its own. Every
    AGE_EVERY-th step serves these first; a prompt wastes less than a block where it ends.
    """
    whole_blocks = sum(-(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS for tokens in remaining)
    return AGE_EVERY * -(-whole_blocks // chunk_tokens)


class PrefillScheduler:
    """Prompts from arrival to the release of their blocks."""

    def __init__(
        self, *, num_blocks: int, block_tokens: int, chunk_tokens: int, max_overtakes: int = 64
    ) -> None:
        """`block_tokens` is what one block id covers: 64 on each rank.

        `max_overtakes`: 64 short turns use a few percent of a pool that a million tokens wait for.
        """
        if chunk_tokens < BLOCK_TOKENS or chunk_tokens % BLOCK_TOKENS:
            raise ConfigError(f"chunk tokens {chunk_tokens} must be a multiple of {BLOCK_TOKENS}")
        self._block_tokens = block_tokens
        self._chunk_tokens = chunk_tokens
        self._queue = AdmissionQueue({"blocks": num_blocks}, max_overtakes=max_overtakes)
        self._num_tokens: dict[str, int] = {}
        self._active: dict[str, Prompt] = {}  # in order of their start
        self._num_steps = 0

    @property
    def num_waiting(self) -> int:
        """Prompts without blocks."""
        return self._queue.num_waiting

    @property
    def num_active(self) -> int:
        """Prompts being computed."""
        return len(self._active)

    @property
    def active_tokens(self) -> int:
        """Tokens to compute of the prompts that have started."""
        return sum(prompt.remaining for prompt in self._active.values())

    @property
    def waiting_tokens(self) -> int:
        """Of the prompts that have not; what of them is cached, or computed by others, is unknown
        here.
        """
        waiting = self._num_tokens.keys() - self._active.keys()
        return sum(self._num_tokens[request_id] for request_id in waiting)

    def enqueue(self, request_id: str, num_tokens: int) -> None:
        """Let a prompt wait. TooLong if the pool could never hold it; BadRequest if it is here."""
        num_blocks = -(-num_tokens // self._block_tokens)
        self._queue.enqueue(request_id, {"blocks": num_blocks})
        self._num_tokens[request_id] = num_tokens

    def admit(
        self,
        allocate: Callable[[str], int | None],
        leader: Callable[[str], str | None] = lambda _: None,
    ) -> list[str]:
        """Start prompts whose blocks are there.

        `allocate` takes a prompt's blocks and returns its hit tokens, or None if it cannot now.
        `leader` names the prompt that is computing what this one needs next: it waits for that.
        """
        for prompt in self._active.values():
            prompt.lent = None

        def reserve(request_id: str) -> bool:
            hit = allocate(request_id)
            if hit is not None:
                num_tokens = self._num_tokens[request_id]
                self._active[request_id] = Prompt(request_id, num_tokens, hit)
            return hit is not None

        def is_held(request_id: str) -> bool:
            leading = self._active.get(leader(request_id) or "")
            if leading is None:
                return False
            # All that is left for it, what the other one computes of it included.
            num_left = self._num_tokens[request_id] - leading.num_done
            leading.lent = min(num_left, leading.lent or leading.num_tokens)
            return True

        return self._queue.admit(reserve, is_held)

    def next_step(self) -> list[PlannedChunk]:
        """The next step's chunks; empty when nothing waits for computation."""
        prompts: Iterable[Prompt] = self._active.values()
        if self._num_steps % AGE_EVERY != AGE_EVERY - 1:
            prompts = sorted(prompts, key=lambda prompt: prompt.urgency)
        return plan_chunks(prompts, self._chunk_tokens)

    def computed(self, chunks: Sequence[PlannedChunk]) -> list[str]:
        """The step is done. Returns the prompts it completed; they keep their blocks."""
        self._num_steps += 1
        complete = []
        for chunk in chunks:
            prompt = self._active.get(chunk.request_id)
            if prompt is None:
                continue  # released while the step ran
            prompt.num_done = chunk.end
            if prompt.remaining == 0:
                del self._active[chunk.request_id]
                del self._num_tokens[chunk.request_id]
                complete.append(chunk.request_id)
        return complete

    def release(self, request_id: str) -> bool:
        """Handed off, failed or cancelled, in any state; False if it is not known, or no longer."""
        self._active.pop(request_id, None)
        self._num_tokens.pop(request_id, None)
        return self._queue.release(request_id)
