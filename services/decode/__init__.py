"""KV to tokens, one step at a time."""
