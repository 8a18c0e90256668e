"""The installed package. Its folders are links to those at the top of the repository."""
