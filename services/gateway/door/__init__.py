"""Who may come in, and how much of it: keys, tenants and limits."""
