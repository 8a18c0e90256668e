"""Generating: prompts to engines, deltas to pieces of text."""
