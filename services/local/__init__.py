"""The embedded default: all services as local processes, and the command line a person uses."""
