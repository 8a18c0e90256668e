"""What the subcommands of ``yardstick`` do. Each is imported only when it runs."""
