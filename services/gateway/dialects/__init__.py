"""The public APIs: what each accepts, and what its answers look like."""
