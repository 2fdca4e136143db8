"""The gateway's speed: a client and mocks that are faster than it, and LiteLLM beside it."""
