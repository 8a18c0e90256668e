"""Conversion between text and token ids. The engine handles token ids only."""
