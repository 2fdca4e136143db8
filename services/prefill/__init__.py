"""Prompts to KV, one chunk at a time, on W ranks."""
