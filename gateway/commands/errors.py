"""The error that ends a subcommand early."""


class CommandError(Exception):
    """The command cannot continue. The message is one line for the user: the problem and the remedy."""
