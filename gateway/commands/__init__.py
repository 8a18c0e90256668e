"""Implementations of the subcommands of ``yardstick``, each imported only when it runs, and the errors that end one early."""

from typing import ClassVar


class CommandError(Exception):
    """The command cannot continue. The message is one line for the user: the problem and the remedy."""

    status: ClassVar[int] = 1
    """Exit status of the command."""


class WrongUsage(CommandError):
    """An option, or a file that an option names, cannot be used."""

    status = 2


class Interrupted(CommandError):
    """A signal asked the command to end."""

    status = 130
