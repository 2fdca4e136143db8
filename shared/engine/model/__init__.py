"""GLM-5.3: configuration, weights, layers."""
