"""The only place that knows where blocks are."""
