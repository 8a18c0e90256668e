"""Replies of the loop: what becomes of a step's results, refusals, counters."""
