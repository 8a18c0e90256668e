"""The endpoints, a file for each family."""
