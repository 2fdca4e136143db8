"""Which part of an offer can be pulled next. Pure arithmetic over token counts."""

from dataclasses import dataclass

from shared.block_hash import BLOCK_TOKENS

# 230 MB of GLM-5.3: long enough to be fast, short enough that a cancel is heard in between.
MAX_PULL_TOKENS = 4096


@dataclass(frozen=True)
class PullWindow:
    """The pulls of one sequence, each beginning where the one before ended."""

    num_tokens: int
    num_ranks: int
    interleave: int

    @property
    def stride_tokens(self) -> int:
        """Pages lie whole on one rank if it owns 64 tokens in a row; else a page is read with all
        the pages of its effective block, so whole ones are waited for.
        """
        is_whole = self.interleave == BLOCK_TOKENS
        return BLOCK_TOKENS if is_whole else BLOCK_TOKENS * self.num_ranks

    def end(self, first_token: int, num_ready_tokens: int, *, is_complete: bool) -> int:
        """One past the last token to pull now; `first_token` when there is nothing yet.

        The tail of a page is pulled only when the prompt `is_complete`.
        """
        stride = self.stride_tokens
        ready = min(num_ready_tokens, self.num_tokens)
        if is_complete:
            ready = self.num_tokens
        elif ready < self.num_tokens or ready % BLOCK_TOKENS:
            ready = ready // stride * stride
        longest = max(MAX_PULL_TOKENS // stride, 1) * stride
        return max(first_token, min(ready, first_token // stride * stride + longest))
