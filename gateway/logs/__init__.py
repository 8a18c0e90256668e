"""Log lines. A thread writes them, so that a full pipe or disk never delays requests."""
