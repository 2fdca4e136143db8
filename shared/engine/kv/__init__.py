"""Where KV lives: formats, layouts, blocks, pools, residency."""
