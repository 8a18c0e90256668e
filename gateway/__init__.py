"""The gateway: text, JSON and HTTP on one side, token ids to engine pods on the other. It needs no torch."""
