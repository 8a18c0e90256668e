"""The gateway as a process: event loop, memory, shutdown."""
