"""The only place that chooses workers."""
