"""What two or more services agree on. Imports no torch."""
