"""How a run ends before it has begun."""


class LoadError(Exception):
    """The command cannot go on; the message is one line for the person at the terminal: what is wrong and what to do."""
