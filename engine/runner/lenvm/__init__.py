"""The length model (LenVM): values of the candidates of a draw, and the tilt of their probabilities."""
