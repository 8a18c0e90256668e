"""Readouts: the kinds of output of a step, and the plan that says which of them a step has."""
