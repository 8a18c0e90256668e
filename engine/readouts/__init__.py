"""Readouts: the kinds of output of a step, each in its own file, and the plan that says which of them a step has."""
