"""The pod's HTTP server, and the process of the engine's loop behind it."""
