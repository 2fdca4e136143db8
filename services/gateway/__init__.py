"""The only place that knows text and HTTP."""
