"""The loop: checks, requests, replies; how it is built and warmed up."""
