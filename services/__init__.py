"""The five services, and the command that runs them all on one machine."""
