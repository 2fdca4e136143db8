"""Everything that needs torch: model, KV, kernels, ranks, transfer."""
