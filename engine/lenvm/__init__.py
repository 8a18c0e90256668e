"""Length guidance: what a length model says of the candidates of a draw, and what becomes of their probabilities."""
