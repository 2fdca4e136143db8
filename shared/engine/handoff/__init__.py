"""KV between workers: NIXL agents, staging, verified reads, and what the two ends must agree on."""
