"""Implementations of the subcommands of ``yardstick``. Each is imported only when it runs."""
