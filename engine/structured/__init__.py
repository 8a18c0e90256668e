"""Outputs that follow a grammar: the tokens that may come next, as bits. It knows neither requests nor tensors."""
