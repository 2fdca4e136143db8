"""Slow, independent implementations that fast code is compared with."""
