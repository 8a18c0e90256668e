"""The gateway: serves the HTTP API and converts between text and the token ids that engines process. It needs no torch."""
