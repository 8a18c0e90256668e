"""Requests and their branches: what the loop keeps of a message until its reply."""
