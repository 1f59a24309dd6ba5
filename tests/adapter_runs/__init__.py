"""Lives of loaded adapters on any engine: random commands, in turn or from many threads at once."""
