"""What a CUDA device does in a way of its own: products, experts, attention over encoded rows."""
