"""Constraints of the output - schemas, patterns, choices and grammars - as one text: a grammar of llguidance."""
