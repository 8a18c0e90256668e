"""How a subcommand ends early."""


class CommandError(Exception):
    """The command cannot go on; the message is one line for the person at the terminal: what is wrong and what to do."""
