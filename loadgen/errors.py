"""The error that ends a command early."""


class LoadError(Exception):
    """The command cannot continue. The message is one line for the user: the problem and the remedy."""
