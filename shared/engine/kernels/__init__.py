"""GPU kernels: one file each, its meaning in `reference`."""
