"""Log lines: written by a thread, so that a full pipe or disk never holds up requests."""
