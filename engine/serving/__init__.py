"""The HTTP server of a pod, and the process of the engine's loop behind it."""
